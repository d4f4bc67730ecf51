"""``jupyter agentbox doctor``: check whether sandboxes start here, with a fix for each problem.

The runtime checks itself with real sandboxes. The checks here cover settings, state directory, kernelspecs and egress.
The settings of Jupyter servers are not read from files: a server is started and queried.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_server.serverapp import list_running_servers
from traitlets.config import Configurable

from jupyter_agentbox.egress import presets, rules
from jupyter_agentbox.errors import AgentboxError, RuntimeUnavailable
from jupyter_agentbox.jupyter.kernelspecs import find_shadowed, is_sandboxed
from jupyter_agentbox.kernels.warm.templates import Templates
from jupyter_agentbox.models.service import ServerInfo
from jupyter_agentbox.policy.configfiles import find_enforcing_files
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.policy.profiles import expand
from jupyter_agentbox.runtimes import Check
from jupyter_agentbox.runtimes.namespaces import find_spare_ids
from jupyter_agentbox.sandbox.manager import SandboxManager, load_runtime
from jupyter_agentbox.spec import SandboxSpec

#: Seconds for the started server to listen, to respond, and to stop.
START_TIMEOUT, ANSWER_TIMEOUT, STOP_TIMEOUT = 30.0, 10.0, 5.0


def examine(parent: Configurable | None = None, *, runtimes: Sequence[str] = ()) -> list[Check]:
    """Run every check and return the results. An exception in a check is reported as a failed check.

    Parameters
    ----------
    parent : Configurable, optional
        The command, whose settings override those of the files.
    runtimes : list of str
        Runtimes to check besides those of policy and its profiles.
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
                name,
                False,
                f"the check itself failed: {error!r}",
                "report this, with `jupyter agentbox doctor --json`",
            )
        ]


def find_runtimes(policy: Policy, wanted: Sequence[str]) -> list[str]:
    """Return the names of the runtimes in use, policy's own first."""
    names = [policy.runtime]
    for profile in policy.profile_names():
        with contextlib.suppress(AgentboxError):  # reported by the check of profiles
            names.append(policy.profile(profile).runtime)
    return list(dict.fromkeys([*names, *wanted]))


def check_runtime(policy: Policy, name: str) -> Iterator[Check]:
    """Yield the checks of a runtime."""
    runtime = load_runtime(name, config=policy.config)
    if hasattr(runtime, "state_dir"):
        runtime.state_dir = str(policy.state_path)
    accepted = frozenset(policy.accept_unenforced)
    for check in runtime.check():
        # Policy may accept that a limit is not enforced.
        if not check.is_ok and check.name.removeprefix("limit on ") in accepted:
            yield Check(check.name, True, f"{check.message} (accepted by Policy.accept_unenforced)")
        else:
            yield check


def check_state(path: Path) -> Iterator[Check]:
    """Check that the state directory is private and has free space."""
    name = "state directory"
    if not path.exists():
        yield Check(name, True, f"{path} will be created at the first start")
        return
    status = path.stat()
    if status.st_uid != os.geteuid():
        yield Check(name, False, f"{path} belongs to uid {status.st_uid}", f"chown -R {os.geteuid()} {path}")
    elif stat.S_IMODE(status.st_mode) & 0o077:
        yield Check(name, False, f"other users can access {path}", f"chmod 700 {path}")
    else:
        free = shutil.disk_usage(path).free >> 20
        remedy = "" if free >= 512 else "free some space, or set Policy.state_dir"
        yield Check(name, not remedy, f"{path}, {free} MiB free", remedy)


def check_kernelspecs() -> Iterator[Check]:
    """Report the sandboxed kernelspecs, and unsandboxed ones that shadow them."""
    for shadowed in find_shadowed():
        if shadowed.is_unboxed:
            message = f"{shadowed.name!r} in {shadowed.winner} is not sandboxed and shadows a sandboxed kernelspec"
            yield Check("kernelspecs", False, message, f"rm -r {shlex.quote(str(shadowed.winner))}")
    # Jupyter's own manager lists all installed kernelspecs, not only those that a server offers.
    specs = KernelSpecManager().get_all_specs()
    boxed = sorted(name for name, found in specs.items() if is_sandboxed(KernelSpec(**found["spec"])))
    if boxed:
        yield Check("kernelspecs", True, f"sandboxed: {', '.join(boxed)}")
    else:
        yield Check("kernelspecs", False, "no sandboxed kernelspec is installed", "jupyter agentbox setup")


def check_server(timeout: float = START_TIMEOUT) -> Iterator[Check]:
    """Start a Jupyter server with this user's configuration and check its settings, and those of running servers."""
    name, enforcing = "server", find_enforcing_files()
    try:
        with _started_server(timeout) as server:
            yield from _judge(name, "a server started now", ask_server(server), enforcing)
    except AgentboxError as error:
        yield Check(name, False, str(error), "correct the named setting; `jupyter server` shows the whole log")
    for running in list_running_servers():
        where = f"the running server {running['url']}"
        try:
            yield from _judge("running server", where, ask_server(running), enforcing)
        except AgentboxError as error:
            yield Check("running server", True, f"{where} did not respond: {error}")


def _judge(name: str, where: str, info: ServerInfo | None, enforcing: Sequence[str]) -> Iterator[Check]:
    if info is None:
        remedy = "jupyter server extension enable jupyter_agentbox"
        if enforcing:
            message = f"{where} has not loaded the extension jupyter_agentbox, so AgentboxExtension.enforce in "
            yield Check(name, False, f"{message}{', '.join(enforcing)} has no effect on it", remedy)
        elif name == "server":
            yield Check(name, False, f"{where} has not loaded the extension jupyter_agentbox", remedy)
        else:  # it may belong to another environment
            yield Check(name, True, f"{where} has not loaded the extension jupyter_agentbox")
        return
    offer = (
        f"kernels on the host too ({', '.join(info.host_kernels)})" if info.host_kernels else "sandboxed kernels only"
    )
    lines = [
        f"{where} offers {offer}",
        f"default kernel: {info.default_kernel}; terminals: {info.terminals}",
        f"kernelspecs by {info.kernel_spec_manager}, files by {info.contents_manager}",
    ]
    if info.enforced_by:
        lines.append(f"AgentboxExtension.enforce is set in {', '.join(info.enforced_by)}")
    elif info.host_kernels and not enforcing:
        lines.append("`jupyter agentbox setup --enforce` allows sandboxed kernels only")
    yield Check(name, True, "\n".join(lines))
    if enforcing and not info.enforced_by:
        message = f"{where} was started before AgentboxExtension.enforce was set in {', '.join(enforcing)}"
        yield Check(name, False, message, "restart that server")
    for problem in info.problems:
        yield Check(name, False, f"{where}: {problem}", "remove that setting, or the package that sets it")


def ask_server(server: Mapping[str, Any]) -> ServerInfo | None:
    """Return the settings that a server reports.

    Parameters
    ----------
    server : dict
        Its ``url`` and ``token``, as in Jupyter's server file.

    Returns
    -------
    ServerInfo or None
        None if the server has not loaded the extension.

    Raises
    ------
    RuntimeUnavailable
        It does not respond, or rejects the token.
    """
    try:
        answer = httpx.get(
            f"{server['url']}api/agentbox/server",
            headers={"Authorization": f"token {server['token']}"},
            timeout=ANSWER_TIMEOUT,
            verify=False,  # the server is on a loopback address, and its certificate has another name
            trust_env=False,
        )
        if answer.status_code == 404:
            return None
        if answer.status_code != 200:
            raise RuntimeUnavailable(f"it rejected its own token with status {answer.status_code}")
        return msgspec.json.decode(answer.content, type=ServerInfo)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise RuntimeUnavailable(f"no valid answer: {error!r}") from None


@contextlib.contextmanager
def _started_server(timeout: float) -> Iterator[dict[str, Any]]:
    """Run a Jupyter server with this user's configuration; yield its URL and token.

    Its root, state and runtime directories are temporary: it must not adopt or create sandboxes, and no other program
    should find it.
    """
    with tempfile.TemporaryDirectory(prefix="agentbox-doctor-") as name:
        folder = Path(name)
        for part in ("root", "state", "runtime"):
            (folder / part).mkdir(mode=0o700)
        command = [sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root"]
        command += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", "--ServerApp.sock="]
        command += [f"--ServerApp.root_dir={folder / 'root'}", f"--Policy.state_dir={folder / 'state'}"]
        command += ["--Policy.templates=False", "--Policy.pool_size=0"]
        own = {"JUPYTER_RUNTIME_DIR": str(folder / "runtime"), "JUPYTER_TOKEN": secrets.token_urlsafe(32)}
        with open(folder / "log", "w+b") as log:
            process = subprocess.Popen(
                command,
                cwd=folder / "root",
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                yield _wait_for_server(process, folder, timeout)
            finally:
                process.terminate()
                try:
                    process.wait(STOP_TIMEOUT)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _wait_for_server(process: subprocess.Popen[bytes], folder: Path, timeout: float) -> dict[str, Any]:
    """Return the server file of a started server once it listens."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        for info in list_running_servers(str(folder / "runtime")):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", info["port"]), ANSWER_TIMEOUT):
                return dict(info)
        time.sleep(0.05)
    lines = (folder / "log").read_text(errors="replace").strip().splitlines()
    reason = next(
        (line for line in lines if "the server does not start" in line), lines[-1] if lines else "the log is empty"
    )
    what = f"did not respond within {timeout:g} s" if process.poll() is None else "did not start"
    raise RuntimeUnavailable(f"a Jupyter server {what}: {reason}")


def check_warm(policy: Policy) -> Iterator[Check]:
    """Report whether kernels start warm, from templates or a pool, and if not, why."""
    name, sizes = "warm starts", {profile: policy.profile(profile).warm.pool_size for profile in policy.profile_names()}
    pools = ", ".join(f"{size} of {profile!r}" for profile, size in sizes.items() if size) or "none"
    if not policy.templates:
        yield Check(name, True, f"Policy.templates is off; pools: {pools}")
        return
    manager = SandboxManager.shared(policy.state_path, policy.runtime, config=policy.config)
    try:
        manager.runtime.fingerprint(SandboxSpec(runtime=policy.runtime))
    except AgentboxError as error:
        yield Check(name, True, f"kernels start cold, without pools: {error}")
        return
    if policy.runtime == "runsc" and find_spare_ids(os.geteuid()) is None:
        yield Check(name, True, "kernels start cold: this user has no subordinate ids; see `subordinate ids`")
        return
    count = len(Templates(manager, policy).list())
    made = f"{count} templates" if count else "no template yet: a server creates them, or `jupyter agentbox warm`"
    yield Check(name, True, f"{made}; pools: {pools}")


def check_hosts(policy: Policy) -> Iterator[Check]:
    """Report the allowed hosts and empty presets, and warn of hosts that serve files of many owners."""
    for name in policy.profile_names():
        entries = policy.profile(name).hosts
        hosts = expand(entries)
        may_allow = ", ".join(policy.profile(name).user_may_allow)
        lines = [f"hosts: {', '.join(hosts) or 'none'}", f"hosts that a person may allow: {may_allow or 'none'}"]
        for preset in (presets.lookup(entry) for entry in entries if entry in presets.PRESETS):
            if preset.note:
                lines.append(f"note: the preset {preset.name!r} is empty: {preset.note}")
        if shared := [pattern for pattern in hosts if rules.shared_host_note(pattern)]:
            lines.append(
                f"note: {', '.join(shared)} serve files of many owners, so code in a sandbox can fetch "
                "anyone's files from them, and can send data to an account of its own"
            )
        yield Check(f"egress of {name!r}", True, "\n".join(lines))
