"""Commands for the machine: setup, doctor, kernelspec, list and prune.

Thin over the modules that do the work; each imports what it needs when it runs.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from traitlets import Bool, Unicode

from jupyter_agentbox.errors import AgentboxError

from .base import ALIASES, FLAGS, Command, UsageError, format_age, printable, write_table

_SETUP_FLAGS = {
    **FLAGS,
    "dry-run": ({"SetupCommand": {"is_dry": True}}, "Say what would be done, and do nothing."),
    "enforce": ({"SetupCommand": {"is_enforcing": True}}, "Make Jupyter servers offer sandboxed kernels only."),
    "docker": ({"SetupCommand": {"has_docker": True}}, "Register gVisor in Docker's engine, for the runtime docker."),
    "reload": ({"SetupCommand": {"may_reload": True}}, "With --docker: have the engine read its settings now."),
    "no-template": ({"SetupCommand": {"has_template": False}}, "Make no template, off which kernels start."),
    "yes": ({}, "Accepted for scripts; nothing is ever asked."),
}
_SETUP_ALIASES = {
    **ALIASES,
    "config-dir": "SetupCommand.config_dir",
    "docker-settings": "SetupCommand.docker_settings",
}
_DOCTOR_FLAGS = {
    **FLAGS,
    "json": ({"DoctorCommand": {"is_json": True}}, "Print a JSON list instead of lines."),
    "docker": ({"DoctorCommand": {"has_docker": True}}, "Try the runtime docker too, whether policy names it or not."),
}
_LIST_FLAGS = {**FLAGS, "json": ({"ListCommand": {"is_json": True}}, "Print a JSON list instead of a table.")}
_KERNELSPEC_ALIASES = {
    **ALIASES,
    "profile": "KernelspecCommand.profile",
    "name": "KernelspecCommand.twin",
    "prefix": "KernelspecCommand.prefix",
    "image": "KernelspecCommand.image",
}


class SetupCommand(Command):
    """Get what sandboxes need: gVisor's runsc and a kernelspec.

    runsc is taken from the configured path, PATH, the distribution's packages, or the official release with its
    checksum verified. Nothing is asked. Each step is said before it is done; a second run does nothing.
    """

    name = "jupyter agentbox setup"
    description = __doc__ or ""
    examples = "jupyter agentbox setup --dry-run"
    flags = _SETUP_FLAGS
    aliases = _SETUP_ALIASES
    is_dry = Bool(False, help="Say what would be done, and do nothing.").tag(config=True)
    is_enforcing = Bool(False, help="Make Jupyter servers of this environment offer sandboxed kernels only.").tag(
        config=True
    )
    config_dir = Unicode(
        help="""With --enforce: the directory of Jupyter's configuration to write to, such as /etc/jupyter for all
        users; the environment's own unless given."""
    ).tag(config=True)
    releases = Unicode(help="Address of gVisor's releases, for a mirror of them.").tag(config=True)
    has_template = Bool(True, help="Make the template of the default profile.").tag(config=True)
    has_docker = Bool(False, help="Add gVisor to the runtimes of Docker's engine, and keep all else.").tag(config=True)
    may_reload = Bool(False, help="Have Docker's engine read its settings now, where it runs.").tag(config=True)
    docker_settings = Unicode(help="Settings of Docker's engine; /etc/docker/daemon.json unless given.").tag(
        config=True
    )

    def run(self) -> int:
        """Set the machine up."""
        from jupyter_agentbox.jupyter import kernelspecs
        from jupyter_agentbox.policy.policy import Policy

        from .install import RELEASES, Setup
        from .warm import set_up_template

        policy = Policy(parent=self)
        setup = Setup(
            policy.state_path,
            configured=str(policy.config.RunscRuntime.get("runsc", "")),
            is_dry=self.is_dry,
            releases=self.releases or RELEASES,
        )
        setup.get_runsc()
        setup.get_uidmap()
        if self.has_docker:
            host = str(policy.config.DockerRuntime.get("host", ""))
            setup.register_in_docker(self.docker_settings, host, may_reload=self.may_reload)
        if self.is_enforcing:
            print("server: sandboxed kernels only, in every Jupyter server that starts from now on")
            if not self.is_dry:
                written = kernelspecs.enforce(Path(self.config_dir).absolute() if self.config_dir else None)
                print(f"  AgentboxExtension.enforce is set in {written}; remove it there to undo this")
        if self.is_dry:
            print("kernelspec: would install the sandboxed kernelspec, unless it is there")
        else:
            print(f"kernelspec: {kernelspecs.ensure_installed()}")
        if self.has_template:
            set_up_template(policy, kernelspecs.OWN_NAME, is_dry=self.is_dry)
        if not self.is_dry:
            print("ready; `jupyter agentbox doctor` examines it all")
        return 0


class DoctorCommand(Command):
    """Examine whether sandboxes start here. Prints for each finding: ok, or what is wrong and what mends it.

    A note is about something that works, and that can be made better by the command beneath it.

    The exit status is 0 if all is well and 1 if not.
    """

    name = "jupyter agentbox doctor"
    description = __doc__ or ""
    examples = "jupyter agentbox doctor --json"
    flags = _DOCTOR_FLAGS
    is_json = Bool(False, help="Print a JSON list.").tag(config=True)
    has_docker = Bool(False, help="Try the runtime docker too.").tag(config=True)

    def run(self) -> int:
        """Examine and print."""
        from dataclasses import asdict

        from .doctor import examine

        found = examine(self, runtimes=("docker",) if self.has_docker else ())
        if self.is_json:
            print(json.dumps([asdict(check) for check in found], indent=2))
        else:
            for check in found:
                first, *more = check.message.splitlines() or [""]
                state = "WRONG" if not check.is_ok else "note " if check.remedy else "ok   "
                print(f"{state}  {check.name}: {first}")
                for line in more:
                    print(f"       {line}")
                if check.remedy:
                    print(f"       mend it: {check.remedy}")
        return 0 if all(check.is_ok for check in found) else 1


class KernelspecCommand(Command):
    """Make a sandboxed twin of an installed kernelspec: `jupyter agentbox kernelspec python3`.

    With --image, make one for a kernel of that image; without NAME, for each of them.
    """

    name = "jupyter agentbox kernelspec"
    description = __doc__ or ""
    examples = "jupyter agentbox kernelspec ir --profile=small\njupyter agentbox kernelspec --image=r"
    argument = "[NAME...]"
    aliases = _KERNELSPEC_ALIASES
    profile = Unicode(help="Profile of its sandboxes; the default one unless given.").tag(config=True)
    twin = Unicode(help="Name of the twin; NAME with -agentbox behind it unless given.").tag(config=True)
    prefix = Unicode(help="Where to install: a prefix such as sys.prefix; for this user unless given.").tag(config=True)
    image = Unicode(help="Image whose kernels get kernelspecs.").tag(config=True)

    def run(self) -> int:
        """Make the twin."""
        from jupyter_agentbox.jupyter import kernelspecs
        from jupyter_agentbox.policy.policy import Policy

        policy = Policy(parent=self)
        if self.image:
            return self._run_for_image(policy.state_path)
        if len(self.extra_args) != 1:
            raise UsageError("name one installed kernelspec; `jupyter kernelspec list` shows them")
        if self.profile:
            policy.profile(self.profile)
        made = kernelspecs.install_twin(
            self.extra_args[0], name=self.twin or None, profile=self.profile or None, prefix=self.prefix or None
        )
        print(f"installed {made}")
        return 0

    def _run_for_image(self, state: Path) -> int:
        from jupyter_agentbox.jupyter import kernelspecs
        from jupyter_agentbox.storage.images import ImageStore

        image = ImageStore(state).get(self.image)
        wanted = self.extra_args or [entry.name for entry in image.kernels]
        entries = [entry for entry in image.kernels if entry.name in wanted]
        if len(entries) != len(wanted) or (self.twin and len(entries) != 1):
            known = ", ".join(entry.name for entry in image.kernels) or "none"
            raise AgentboxError(f"name kernels of image {image.name}, one of them with --name; there are: {known}")
        for entry in entries:
            made = kernelspecs.install_for_image(image.name, entry, name=self.twin or None, prefix=self.prefix or None)
            print(f"installed {made}")
        return 0


class ListCommand(Command):
    """List the sandboxes of this user, whichever process owns them."""

    name = "jupyter agentbox list"
    description = __doc__ or ""
    flags = _LIST_FLAGS
    is_json = Bool(False, help="Print a JSON list.").tag(config=True)

    def run(self) -> int:
        """Print the registry."""
        from dataclasses import asdict

        from jupyter_agentbox.policy.policy import Policy
        from jupyter_agentbox.sandbox.manager import SandboxManager
        from jupyter_agentbox.service.live.parking import list_parked
        from jupyter_agentbox.spec import format_size

        from .warm import open_templates, write_templates

        policy = Policy(parent=self)
        is_there = (policy.state_path / "sandboxes").is_dir()
        manager = SandboxManager.shared(policy.state_path, policy.runtime, config=policy.config) if is_there else None
        found = [*(manager.list() if manager is not None else []), *list_parked(policy)]
        if self.is_json:
            print(json.dumps([asdict(item) for item in found], indent=2))
            return 0
        rows: list[tuple[str, ...]] = [("ID", "STATE", "PROFILE", "AGE", "MEMORY", "KERNEL", "WORK FOLDER")]
        for item in found:
            age, memory = format_age(time.time() - item.created), format_size(item.memory) if item.memory else "-"
            place = item.workspace or "private"
            rows.append((item.id, item.state, item.profile, age, memory, item.kernel_id or "-", place))
        write_table(rows)
        for item in found:
            if item.reason:
                remedy = f"; `jupyter agentbox stop {item.id}` removes it and its files" if item.state == "lost" else ""
                print(printable(f"{item.id}: {item.reason}{remedy}"))
        if is_there:
            print()
            write_templates(open_templates(policy))
        return 0


class PruneCommand(Command):
    """Remove what is left of sandboxes whose owner is gone and whose lease is over. Others are never touched.

    And the templates off which no kernel starts any more, as not all is as it was when they were made; and what killed
    processes have half made.
    """

    name = "jupyter agentbox prune"
    description = __doc__ or ""

    def run(self) -> int:
        """Sweep once."""
        from jupyter_agentbox.policy.policy import Policy
        from jupyter_agentbox.sandbox.sweep import LOST, sweep
        from jupyter_agentbox.service.startup_cleanup import clear

        from .warm import open_templates

        policy = Policy(parent=self)
        removed = []
        for sandbox_id in sweep(policy.state_path):
            is_kept = (policy.state_path / LOST / sandbox_id).exists()
            removed.append(f"{'kept the files of' if is_kept else 'removed'} {sandbox_id}")
        clear(policy.state_path)
        if (policy.state_path / "snapshots").is_dir():
            for item, why in open_templates(policy).remove_unfit():
                removed.append(f"removed template {item.id} of profile {item.meta.note}, changed since: {why}")
        print("\n".join(map(printable, removed or ["nothing to remove"])))
        return 0
