"""``jupyter agentbox warm``: create, list and remove the templates of warm starts."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from traitlets import Bool, Unicode

from jupyter_agentbox.errors import AgentboxError, InvalidRequest
from jupyter_agentbox.spec import format_size

from .base import Command, UsageError, format_age, printable, write_table

if TYPE_CHECKING:
    from jupyter_agentbox.kernels.warm.templates import Templates
    from jupyter_agentbox.policy.policy import Policy
    from jupyter_agentbox.storage.snapshots import Snapshot


class WarmCommand(Command):
    """Create templates, from which kernels start in a fraction of the time: `jupyter agentbox warm`.

    Create one for each named profile, or for the default profile. Up-to-date templates are kept.
    """

    name = "jupyter agentbox warm"
    description = __doc__ or ""
    examples = "jupyter agentbox warm\njupyter agentbox warm default large\njupyter agentbox warm --list"
    argument = "[PROFILE...]"
    kernel = Unicode("agentbox", help="A Python kernelspec to create them for. Default: agentbox.").tag(config=True)
    remove = Bool(False, help="Remove all templates.").tag(config=True)
    list = Bool(False, help="List the templates.").tag(config=True)
    json = Bool(False, help="With --list: print a JSON list instead of a table.").tag(config=True)

    def run(self) -> int:
        """Create, list or remove the templates."""
        from jupyter_agentbox.policy.policy import Policy

        policy = Policy(parent=self)
        templates = open_templates(policy)
        if self.json and not self.list:
            raise UsageError("--json requires --list")
        if self.json:
            print(json.dumps([_describe(templates, item) for item in templates.list()], indent=2))
            return 0
        if self.list:
            write_templates(templates)
            return 0
        if self.remove:
            for item in templates.list():
                templates.remove(item.id)
                print(f"removed {item.id}")
            return 0
        if not policy.templates:
            raise AgentboxError("Policy.templates is off", setting="Policy.templates")
        for profile in self.extra_args or [policy.default_profile]:
            began = time.monotonic()
            if (made := make_template(policy, templates, profile, self.kernel)) is None:
                print(f"{profile}: up to date")
            else:
                print(f"{profile}: created in {time.monotonic() - began:.1f} s, {format_size(made)}")
        return 0


def open_templates(policy: Policy) -> Templates:
    """Return the templates of this policy's state directory."""
    from jupyter_agentbox.kernels.warm.templates import Templates
    from jupyter_agentbox.sandbox.manager import SandboxManager

    return Templates(SandboxManager.shared(policy.state_path, policy.runtime, config=policy.config), policy)


def make_template(policy: Policy, templates: Templates, profile: str, kernel: str) -> int | None:
    """Create a template and return its size in bytes, or None if a current one exists. Raises AgentboxError."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    from jupyter_agentbox.jupyter.kernelspecs import real_argv
    from jupyter_agentbox.jupyter.provisioner import resolve_program
    from jupyter_agentbox.kernels.warm.template_key import make_key
    from jupyter_agentbox.sandbox.link.thread import LinkThread

    try:
        found = KernelSpecManager().get_kernel_spec(kernel)
    except NoSuchKernel:
        raise InvalidRequest(
            f"kernelspec {kernel!r} is not installed; `jupyter kernelspec list` shows the installed ones",
            field="kernel",
        ) from None
    command = real_argv(found.argv)
    executable = resolve_program(command[0])
    spec = policy.resolve(
        {"profile": profile}, executable=executable, resource_dir=found.resource_dir or None, kernelspec_env=found.env
    )
    argv: Sequence[str] = [executable if spec.root is None else command[0], *command[1:]]
    inputs = templates.inputs(spec, argv)
    if inputs is not None and templates.find(make_key(inputs)) is not None:
        return None

    return LinkThread.instance().submit(templates.make(spec, argv)).result().size


def set_up_template(policy: Policy, kernel: str, *, is_dry: bool) -> None:
    """Create the template of the default profile, and print the result. A failure is printed, not raised."""
    profile = policy.default_profile
    if not policy.templates:
        print("template: skipped, because Policy.templates is off")
    elif is_dry:
        print(f"template: would create the one of profile {profile} if it is missing")
    else:
        began = time.monotonic()
        print(f"template: creating the one of profile {profile}, for warm starts", flush=True)
        try:
            made = make_template(policy, open_templates(policy), profile, kernel)
        except AgentboxError as error:
            print(f"  failed: {printable(str(error))}")
        else:
            done = f"created in {time.monotonic() - began:.1f} s, {format_size(made)}" if made else "up to date"
            print(f"  {done}")


def write_templates(templates: Templates) -> None:
    """Print a table of the templates, if any exist."""
    found = templates.list()
    if found:
        rows = [
            (
                item.id,
                item.meta.note,
                format_age(time.time() - item.meta.created),
                format_size(item.size),
                _describe_fit(templates, item),
            )
            for item in found
        ]
        write_table([("TEMPLATE", "PROFILE", "AGE", "SIZE", "FITS"), *rows])


def _describe(templates: Templates, item: Snapshot) -> dict[str, object]:
    meta = item.meta
    fit = _describe_fit(templates, item)
    return {"id": item.id, "profile": meta.note, "created": meta.created, "size": item.size, "fits": fit}


def _describe_fit(templates: Templates, item: Snapshot) -> str:
    try:
        changes = templates.find_changes(item)
    except AgentboxError as error:
        return printable(f"unknown: {error}")
    if changes is None:
        return "another environment"
    return "yes" if not changes else f"no, changed: {', '.join(changes)}"
