"""The command that makes templates ahead, and shows and removes them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from traitlets import Bool, Unicode

from jupyter_agentbox.errors import AgentboxError, InvalidRequest
from jupyter_agentbox.spec import format_size

from .base import ALIASES, FLAGS, Command, UsageError, format_age, printable, write_table

if TYPE_CHECKING:
    from jupyter_agentbox.kernels.warm.templates import Templates
    from jupyter_agentbox.policy.policy import Policy
    from jupyter_agentbox.storage.snapshots import Snapshot

_ALIASES = {**ALIASES, "kernel": "WarmCommand.kernel"}
_FLAGS = {
    **FLAGS,
    "remove": ({"WarmCommand": {"is_removing": True}}, "Remove all templates instead of making any."),
    "list": ({"WarmCommand": {"is_listing": True}}, "List the templates that there are."),
    "json": ({"WarmCommand": {"is_json": True}}, "With --list: print a JSON list instead of a table."),
}


class WarmCommand(Command):
    """Make the templates that kernels start off in a fraction of the time: `jupyter agentbox warm`.

    One for each profile named, or for the default one. One that is up to date is left as it is.
    """

    name = "jupyter agentbox warm"
    description = __doc__ or ""
    examples = "jupyter agentbox warm\njupyter agentbox warm default large\njupyter agentbox warm --list"
    argument = "[PROFILE...]"
    aliases = _ALIASES
    flags = _FLAGS
    kernel = Unicode("agentbox", help="Kernelspec whose kernels they are for; one of Python's.").tag(config=True)
    is_removing = Bool(False, help="Remove all.").tag(config=True)
    is_listing = Bool(False, help="List them.").tag(config=True)
    is_json = Bool(False, help="Print a JSON list.").tag(config=True)

    def run(self) -> int:
        """Make them."""
        from jupyter_agentbox.policy.policy import Policy

        policy = Policy(parent=self)
        templates = open_templates(policy)
        if self.is_json and not self.is_listing:
            raise UsageError("--json goes with --list")
        if self.is_json:
            print(json.dumps([_describe(templates, item) for item in templates.list()], indent=2))
            return 0
        if self.is_listing:
            write_templates(templates)
            return 0
        if self.is_removing:
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
                print(f"{profile}: made in {time.monotonic() - began:.1f} s, {format_size(made)}")
        return 0


def open_templates(policy: Policy) -> Templates:
    """Return the templates of this policy's state directory."""
    from jupyter_agentbox.kernels.warm.templates import Templates
    from jupyter_agentbox.sandbox.manager import SandboxManager

    return Templates(SandboxManager.shared(policy.state_path, policy.runtime, config=policy.config), policy)


def make_template(policy: Policy, templates: Templates, profile: str, kernel: str) -> int | None:
    """Make one, and return its size in bytes; None where there is one that fits. Raises AgentboxError."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    from jupyter_agentbox.jupyter.kernelspecs import real_argv
    from jupyter_agentbox.jupyter.provisioner import resolve_program
    from jupyter_agentbox.kernels.warm.template_key import make_key
    from jupyter_agentbox.sandbox.link.thread import LinkThread

    try:
        found = KernelSpecManager().get_kernel_spec(kernel)
    except NoSuchKernel:
        raise InvalidRequest(f"there is no kernelspec {kernel!r}", field="kernel") from None
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
    """Make that of the default profile, if kernels can start off it here, and say so; what fails is said, too."""
    profile = policy.default_profile
    if not policy.templates:
        print("template: Policy.templates is off, so none is made")
    elif is_dry:
        print(f"template: would make that of profile {profile}, off which kernels start, unless there is one")
    else:
        began = time.monotonic()
        print(f"template: that of profile {profile}, off which kernels start in a fraction of the time", flush=True)
        try:
            made = make_template(policy, open_templates(policy), profile, kernel)
        except AgentboxError as error:
            print(f"  not made: {printable(str(error))}")
        else:
            done = f"made in {time.monotonic() - began:.1f} s, {format_size(made)}" if made else "up to date"
            print(f"  {done}")


def write_templates(templates: Templates) -> None:
    """Print a table of them; nothing where there are none."""
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
        return printable(f"can't be told: {error}")
    if changes is None:
        return "another environment"
    return "yes" if not changes else f"no, changed since: {', '.join(changes)}"
