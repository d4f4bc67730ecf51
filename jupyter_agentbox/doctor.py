"""``jupyter agentbox doctor``: whether sandboxes start here, and if not, the command that mends it.

The runtime checks itself, by real sandboxes; here are the checks of what lies around it: settings, state directory,
kernelspecs, the Jupyter server's configuration and what may be reached.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_core.paths import jupyter_config_path
from traitlets.config import Configurable

from .egress import presets, rules
from .errors import AgentboxError
from .kernelspecs import find_shadowed, is_sandboxed
from .manager import SandboxManager, load_runtime
from .policy import Policy
from .profiles import expand
from .runtimes import Check
from .runtimes.namespaces import find_spare_ids
from .spec import SandboxSpec
from .templates import Templates

MANAGER_CLASS = "jupyter_agentbox.kernelspecs.AgentboxKernelSpecManager"


def examine(parent: Configurable | None = None, *, runtimes: Sequence[str] = ()) -> list[Check]:
    """Run every check. A check that fails unexpectedly is a finding itself, never an exception.

    Parameters
    ----------
    parent : Configurable, optional
        The application that asks, whose settings go above those of the files.
    runtimes : list of str
        Runtimes to try beside those that policy and its profiles name.
    """
    try:
        policy = Policy(parent=parent)
    except AgentboxError as error:
        return [Check("settings", False, str(error), "correct the setting; docs/configuration.md lists them all")]
    names = ", ".join(policy.profile_names())
    found = [Check("settings", True, f"profiles: {names}; runtime: {policy.runtime}")]
    checks: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("state directory", lambda: check_state(policy.state_path)),
        *(("runtime", partial(check_runtime, policy, name)) for name in find_runtimes(policy, runtimes)),
        ("kernelspecs", check_kernelspecs),
        ("server", check_server),
        ("warm starts", lambda: check_warm(policy)),
        ("egress", lambda: check_hosts(policy)),
    ]
    for name, check in checks:
        found += _safely(name, check)
    return found


def _safely(name: str, check: Callable[[], Iterator[Check]]) -> list[Check]:
    try:
        return list(check())
    except AgentboxError as error:
        return [Check(name, False, str(error), "jupyter agentbox setup")]
    except Exception as error:
        return [
            Check(
                name, False, f"the check itself failed: {error!r}", "report it, with `jupyter agentbox doctor --json`"
            )
        ]


def find_runtimes(policy: Policy, wanted: Sequence[str]) -> list[str]:
    """Return the names of the runtimes in use, policy's own first."""
    names = [policy.runtime]
    for profile in policy.profile_names():
        with contextlib.suppress(AgentboxError):  # said where profiles are checked
            names.append(policy.profile(profile).runtime)
    return list(dict.fromkeys([*names, *wanted]))


def check_runtime(policy: Policy, name: str) -> Iterator[Check]:
    """Ask a runtime."""
    runtime = load_runtime(name, config=policy.config)
    if hasattr(runtime, "state_dir"):
        runtime.state_dir = str(policy.state_path)
    accepted = frozenset(policy.accept_unenforced)
    for check in runtime.check():
        # A limit that policy gives up by name is no fault of the machine's.
        if not check.is_ok and check.name.removeprefix("limit on ") in accepted:
            yield Check(check.name, True, f"{check.message} (accepted by Policy.accept_unenforced)")
        else:
            yield check


def check_state(path: Path) -> Iterator[Check]:
    """Check that the state directory is this user's alone, on a file system that holds sandboxes."""
    name = "state directory"
    if not path.exists():
        yield Check(name, True, f"{path} will be made at the first start")
        return
    status = path.stat()
    if status.st_uid != os.geteuid():
        yield Check(name, False, f"{path} belongs to uid {status.st_uid}", f"chown -R {os.geteuid()} {path}")
    elif stat.S_IMODE(status.st_mode) & 0o077:
        yield Check(name, False, f"other users can enter {path}", f"chmod 700 {path}")
    else:
        free = shutil.disk_usage(path).free >> 20
        yield Check(name, free >= 512, f"{path}, {free} MiB free", "free some space, or set Policy.state_dir")


def check_kernelspecs() -> Iterator[Check]:
    """Tell which kernelspecs are sandboxed, and which of them are shadowed by one that is not."""
    for shadowed in find_shadowed():
        if shadowed.is_unboxed:
            message = f"{shadowed.name!r} in {shadowed.winner} runs outside of a sandbox and hides a sandboxed one"
            yield Check("kernelspecs", False, message, f"rm -r {shlex.quote(str(shadowed.winner))}")
    # Jupyter's own manager: what is there, not what a server was told to show.
    specs = KernelSpecManager().get_all_specs()
    boxed = sorted(name for name, found in specs.items() if is_sandboxed(KernelSpec(**found["spec"])))
    if boxed:
        yield Check("kernelspecs", True, f"sandboxed: {', '.join(boxed)}")
    else:
        yield Check("kernelspecs", False, "no sandboxed kernelspec is installed", "jupyter agentbox setup")


def check_server() -> Iterator[Check]:
    """Tell whether Jupyter servers here offer sandboxed kernels only."""
    classes = set()
    for directory in jupyter_config_path():
        for file in ("jupyter_config", "jupyter_server_config"):
            for path in Path(directory).glob(f"{file}.*"):
                if path.suffix in (".py", ".json") and MANAGER_CLASS in path.read_text(errors="replace"):
                    classes.add(str(path))
            for path in Path(directory, f"{file}.d").glob("*.json"):
                if MANAGER_CLASS in path.read_text(errors="replace"):
                    classes.add(str(path))
    if classes:
        yield Check("server", True, f"only sandboxed kernels are offered, by {', '.join(sorted(classes))}")
    else:
        message = "kernels outside of sandboxes are offered too; `jupyter agentbox setup --enforce` hides them"
        yield Check("server", True, message)


def check_warm(policy: Policy) -> Iterator[Check]:
    """Tell whether kernels start off templates and out of a pool, and if not, why they start cold."""
    name, sizes = "warm starts", {profile: policy.profile(profile).warm.pool_size for profile in policy.profile_names()}
    pools = ", ".join(f"{size} of {profile!r}" for profile, size in sizes.items() if size) or "none"
    if not policy.templates:
        yield Check(name, True, f"no templates, by Policy.templates; servers keep in their pools: {pools}")
        return
    manager = SandboxManager.shared(policy.state_path, policy.runtime, config=policy.config)
    try:
        manager.runtime.fingerprint(SandboxSpec(runtime=policy.runtime))
    except AgentboxError as error:
        yield Check(name, True, f"kernels start cold, and none wait in pools: {error}")
        return
    if policy.runtime == "runsc" and find_spare_ids(os.geteuid()) is None:
        yield Check(name, True, "kernels start cold: this user has no subordinate ids; see `subordinate ids`")
        return
    count = len(Templates(manager, policy).list())
    made = f"{count} templates" if count else "no template yet: a server makes them, or `jupyter agentbox warm`"
    yield Check(name, True, f"{made}; servers keep in their pools: {pools}")


def check_hosts(policy: Policy) -> Iterator[Check]:
    """Tell what may be reached, which presets are empty, and warn of hosts that anybody can put files on."""
    for name in policy.profile_names():
        entries = policy.profile(name).hosts
        hosts = expand(entries)
        lines = [f"hosts: {', '.join(hosts) or 'none'}"]
        for preset in (presets.lookup(entry) for entry in entries if entry in presets.PRESETS):
            if preset.note:
                lines.append(f"note: the preset {preset.name!r} is empty: {preset.note}")
        if shared := [pattern for pattern in hosts if rules.shared_host_note(pattern)]:
            lines.append(
                f"note: {', '.join(shared)} serve many owners, which a name cannot tell apart: code inside can fetch "
                "anybody's files there, and send data to an account of its own"
            )
        yield Check(f"egress of {name!r}", True, "\n".join(lines))
