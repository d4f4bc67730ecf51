"""``jupyter agentbox``: one command for each thing to do, in the modules of this package.

A command's module is imported when it runs. Every command takes settings as Jupyter's own commands do:
``jupyter agentbox doctor --Policy.state_dir=/srv/boxes``.
"""

from __future__ import annotations

import os
import sys

from .base import CommandGroup

_COMMANDS = {
    "setup": (f"{__name__}.machine.SetupCommand", "Get what sandboxes need: gVisor's runsc and a kernelspec."),
    "doctor": (
        f"{__name__}.machine.DoctorCommand",
        "Examine whether sandboxes start here, and say what mends what is wrong.",
    ),
    "kernelspec": (f"{__name__}.machine.KernelspecCommand", "Make a sandboxed twin of an installed kernelspec."),
    "image": (f"{__name__}.image.ImageCommand", "Build, list and move images, which sandboxes can have as their root."),
    "warm": (f"{__name__}.warm.WarmCommand", "Make the templates that kernels start off in a fraction of the time."),
    "run": (f"{__name__}.oneshot.RunCommand", "Run a script in a sandbox of its own."),
    "shell": (f"{__name__}.terminal.ShellCommand", "Open a shell in a sandbox of its own."),
    "serve": (f"{__name__}.serve.ServeCommand", "Serve sandboxes over REST, without JupyterLab or a browser."),
    "mcp": (f"{__name__}.mcp.MCPCommand", "Serve MCP on standard input and output, for AI clients."),
    "ps": (f"{__name__}.remote.PsCommand", "List a running server's sandboxes, or a sandbox's processes."),
    "exec": (f"{__name__}.remote.ExecCommand", "Run a command in a sandbox of a running server."),
    "cp": (f"{__name__}.remote.CopyCommand", "Copy files into or out of a sandbox of a running server."),
    "logs": (f"{__name__}.remote.LogsCommand", "Show what a sandbox did, or what a background process printed."),
    "snapshot": (f"{__name__}.snapshots.SnapshotCommand", "Save a sandbox of a running server as it is."),
    "snapshots": (f"{__name__}.snapshots.SnapshotsCommand", "List a running server's snapshots."),
    "restore": (f"{__name__}.snapshots.RestoreCommand", "Take a sandbox back to a snapshot: undo."),
    "fork": (f"{__name__}.snapshots.ForkCommand", "Start another sandbox that goes on where one is, or was saved."),
    "park": (f"{__name__}.snapshots.ParkCommand", "Save sandboxes to the disk and free their memory, until used."),
    "revive": (f"{__name__}.snapshots.ReviveCommand", "Start sandboxes again that ended by a fault, with their files."),
    "wake": (f"{__name__}.snapshots.WakeCommand", "Wake parked sandboxes before their next use."),
    "delete-snapshot": (f"{__name__}.snapshots.DeleteSnapshotCommand", "Remove snapshots of a running server."),
    "stop": (f"{__name__}.remote.StopCommand", "End sandboxes of a running server."),
    "list": (f"{__name__}.machine.ListCommand", "List the sandboxes."),
    "prune": (f"{__name__}.machine.PruneCommand", "Remove what is left of sandboxes whose owner is gone."),
    "token": (f"{__name__}.tokens.TokenCommand", "Make, list and revoke tokens for one sandbox."),
    "audit": (f"{__name__}.audit.AuditCommand", "Check the audit log, or write it out."),
}


class AgentboxCommand(CommandGroup):
    """Jupyter kernels in gVisor sandboxes, with egress allowed by host name."""

    name = "jupyter agentbox"
    description = __doc__ or ""
    examples = "jupyter agentbox setup\njupyter agentbox doctor\njupyter agentbox run script.py"
    subcommands = _COMMANDS
    headings = {  # noqa: RUF012  # as in traitlets' own class
        "setup": "This machine",
        "run": "Start something",
        "ps": "Sandboxes of a running server",
        "list": "All sandboxes of this user",
    }


def main(argv: list[str] | None = None) -> None:
    """Entry point of ``jupyter-agentbox``."""
    try:
        AgentboxCommand.launch_instance(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # `... --help | head`: whoever read has left, and what the interpreter flushes at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
