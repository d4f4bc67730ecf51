"""Commands for the machine: setup, doctor, kernelspec, list and prune.

They are thin wrappers; each imports the modules that do the work when it runs.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from traitlets import Bool, Unicode

from jupyter_agentbox.errors import AgentboxError

from .base import Command, UsageError, format_age, printable, write_table


class SetupCommand(Command):
    """Install what sandboxes need: gVisor's runsc and a kernelspec.

    runsc is taken from the configured path, PATH, the distribution's packages, or the official release after its
    checksum is verified. The command never prompts, prints each step before it runs it, and can be repeated.
    """

    name = "jupyter agentbox setup"
    description = __doc__ or ""
    examples = "jupyter agentbox setup --dry-run"
    dry_run = Bool(False, help="Print the steps without running them.").tag(config=True)
    enforce = Bool(False, help="Make the Jupyter servers of this environment offer sandboxed kernels only.").tag(
        config=True
    )
    config_dir = Unicode(
        help="With --enforce: write to this Jupyter configuration directory, such as /etc/jupyter for all users. "
        "Default: that of this environment."
    ).tag(config=True)
    releases = Unicode(help="URL of gVisor's releases or of a mirror.").tag(config=True, option="")
    no_template = Bool(False, help="Do not create the template for warm starts.").tag(config=True)
    docker = Bool(False, help="Register gVisor as a runtime of Docker's engine; its other settings are kept.").tag(
        config=True
    )
    reload = Bool(False, help="With --docker: make a running engine reload its settings.").tag(config=True)
    docker_settings = Unicode(help="Settings file of Docker's engine. Default: /etc/docker/daemon.json.").tag(
        config=True
    )
    yes = Bool(False, help="Accepted for scripts; the command never prompts.").tag(config=True)

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
            is_dry=self.dry_run,
            releases=self.releases or RELEASES,
        )
        setup.get_runsc()
        setup.get_uidmap()
        if self.docker:
            host = str(policy.config.DockerRuntime.get("host", ""))
            setup.register_in_docker(self.docker_settings, host, may_reload=self.reload)
        if self.enforce:
            print("server: every Jupyter server started from now on offers sandboxed kernels only")
            if not self.dry_run:
                written = kernelspecs.enforce(Path(self.config_dir).absolute() if self.config_dir else None)
                print(f"  AgentboxExtension.enforce is set in {written}; remove it there to undo this")
        if self.dry_run:
            print("kernelspec: would install the sandboxed kernelspec if it is missing")
        else:
            print(f"kernelspec: {kernelspecs.ensure_installed()}")
        if not self.no_template:
            set_up_template(policy, kernelspecs.OWN_NAME, is_dry=self.dry_run)
        if not self.dry_run:
            print("ready; run `jupyter agentbox doctor` to check it")
        return 0


class DoctorCommand(Command):
    """Check whether sandboxes start on this machine, and print a fix for each problem.

    Each check prints ok or FAIL, or note if it passes and can be improved by the command below it. The exit status
    is 0 if no check fails, else 1.
    """

    name = "jupyter agentbox doctor"
    description = __doc__ or ""
    examples = "jupyter agentbox doctor --json"
    json = Bool(False, help="Print a JSON list instead of lines.").tag(config=True)
    docker = Bool(False, help="Also check the docker runtime, even if no profile uses it.").tag(config=True)

    def run(self) -> int:
        """Run the checks and print the results."""
        from dataclasses import asdict

        from .doctor import examine

        found = examine(self, runtimes=("docker",) if self.docker else ())
        if self.json:
            print(json.dumps([asdict(check) for check in found], indent=2))
        else:
            for check in found:
                first, *more = check.message.splitlines() or [""]
                state = "FAIL " if not check.is_ok else "note " if check.remedy else "ok   "
                print(f"{state}  {check.name}: {first}")
                for line in more:
                    print(f"       {line}")
                if check.remedy:
                    print(f"       fix: {check.remedy}")
        return 0 if all(check.is_ok for check in found) else 1


class KernelspecCommand(Command):
    """Create a sandboxed copy of an installed kernelspec: `jupyter agentbox kernelspec python3`.

    With --image, create kernelspecs for the named kernels of that image; without NAME, for all of them.
    """

    name = "jupyter agentbox kernelspec"
    description = __doc__ or ""
    examples = "jupyter agentbox kernelspec ir --profile=small\njupyter agentbox kernelspec --image=r"
    argument = "[NAME...]"
    profile = Unicode(help="Profile of its sandboxes. Default: Policy.default_profile.").tag(config=True)
    new_name = Unicode(help="Name of the copy. Default: NAME-agentbox.").tag(config=True, option="name")
    prefix = Unicode(help="Install below this prefix, such as sys.prefix. Default: for this user.").tag(config=True)
    image = Unicode(help="Create kernelspecs for the kernels of this image.").tag(config=True)

    def run(self) -> int:
        """Create the kernelspec."""
        from jupyter_agentbox.jupyter import kernelspecs
        from jupyter_agentbox.policy.policy import Policy

        policy = Policy(parent=self)
        if self.image:
            return self._run_for_image(policy.state_path)
        if len(self.extra_args) != 1:
            raise UsageError("name one installed kernelspec; `jupyter kernelspec list` shows them")
        if self.profile:
            policy.profile(self.profile)
        made = kernelspecs.install_copy(
            self.extra_args[0], name=self.new_name or None, profile=self.profile or None, prefix=self.prefix or None
        )
        print(f"installed {made}")
        return 0

    def _run_for_image(self, state: Path) -> int:
        from jupyter_agentbox.jupyter import kernelspecs
        from jupyter_agentbox.storage.images import ImageStore

        image = ImageStore(state).get(self.image)
        wanted = self.extra_args or [entry.name for entry in image.kernels]
        entries = [entry for entry in image.kernels if entry.name in wanted]
        if len(entries) != len(wanted) or (self.new_name and len(entries) != 1):
            known = ", ".join(entry.name for entry in image.kernels) or "none"
            raise AgentboxError(f"name kernels of image {image.name}, or exactly one with --name; its kernels: {known}")
        for entry in entries:
            made = kernelspecs.install_for_image(
                image.name, entry, name=self.new_name or None, prefix=self.prefix or None
            )
            print(f"installed {made}")
        return 0


class ListCommand(Command):
    """List all sandboxes of this user, whichever process owns them."""

    name = "jupyter agentbox list"
    description = __doc__ or ""
    json = Bool(False, help="Print a JSON list instead of a table.").tag(config=True)

    def run(self) -> int:
        """Print the list."""
        from dataclasses import asdict

        from jupyter_agentbox.policy.policy import Policy
        from jupyter_agentbox.sandbox.manager import SandboxManager
        from jupyter_agentbox.service.live.parking import list_parked
        from jupyter_agentbox.spec import format_size

        from .warm import open_templates, write_templates

        policy = Policy(parent=self)
        exists = (policy.state_path / "sandboxes").is_dir()
        manager = SandboxManager.shared(policy.state_path, policy.runtime, config=policy.config) if exists else None
        found = [*(manager.list() if manager is not None else []), *list_parked(policy)]
        if self.json:
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
        if exists:
            print()
            write_templates(open_templates(policy))
        return 0


class PruneCommand(Command):
    """Remove leftovers of sandboxes whose owner has exited and whose lease has expired. Others are never touched.

    Also remove outdated templates, and incomplete files of killed processes.
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
                removed.append(f"removed outdated template {item.id} of profile {item.meta.note}; changed: {why}")
        print("\n".join(map(printable, removed or ["nothing to remove"])))
        return 0
