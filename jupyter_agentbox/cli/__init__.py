"""``jupyter agentbox``: the command line.

A command's module is imported when it runs. Every command accepts settings as options, like Jupyter's own commands:
``jupyter agentbox doctor --Policy.state_dir=/srv/boxes``.
"""

from __future__ import annotations

import os
import sys

from .base import CommandGroup

_COMMANDS = {
    "setup": (f"{__name__}.machine.SetupCommand", "Install what sandboxes need: gVisor's runsc and a kernelspec."),
    "doctor": (f"{__name__}.machine.DoctorCommand", "Check this machine and print a fix for each problem."),
    "kernelspec": (f"{__name__}.machine.KernelspecCommand", "Create a sandboxed copy of an installed kernelspec."),
    "image": (
        f"{__name__}.image.ImageCommand",
        "Build, list, export and import images, the root file systems of sandboxes.",
    ),
    "warm": (f"{__name__}.warm.WarmCommand", "Create templates, from which kernels start in a fraction of the time."),
    "run": (f"{__name__}.oneshot.RunCommand", "Run a script in a new sandbox."),
    "shell": (f"{__name__}.terminal.ShellCommand", "Open a shell in a new sandbox."),
    "serve": (f"{__name__}.serve.ServeCommand", "Serve sandboxes over REST, without JupyterLab or a browser."),
    "mcp": (f"{__name__}.mcp.MCPCommand", "Serve MCP on standard input and output, for AI clients."),
    "ps": (f"{__name__}.remote.PsCommand", "List the sandboxes of a running server, or a sandbox's processes."),
    "exec": (f"{__name__}.remote.ExecCommand", "Run a command in a sandbox of a running server."),
    "cp": (f"{__name__}.remote.CopyCommand", "Copy files into or out of a sandbox of a running server."),
    "logs": (f"{__name__}.remote.LogsCommand", "Show a sandbox's audit log, or a background process's output."),
    "snapshot": (f"{__name__}.snapshots.SnapshotCommand", "Take a snapshot of a sandbox of a running server."),
    "snapshots": (f"{__name__}.snapshots.SnapshotsCommand", "List the snapshots of a running server."),
    "restore": (f"{__name__}.snapshots.RestoreCommand", "Restore a sandbox to a snapshot."),
    "fork": (f"{__name__}.snapshots.ForkCommand", "Start a copy of a sandbox or of a snapshot."),
    "park": (f"{__name__}.snapshots.ParkCommand", "Save sandboxes to disk and free their memory until their next use."),
    "revive": (f"{__name__}.snapshots.ReviveCommand", "Restart failed sandboxes with their files."),
    "wake": (f"{__name__}.snapshots.WakeCommand", "Wake parked sandboxes before their next use."),
    "delete-snapshot": (f"{__name__}.snapshots.DeleteSnapshotCommand", "Delete snapshots of a running server."),
    "stop": (f"{__name__}.remote.StopCommand", "Stop sandboxes of a running server."),
    "list": (f"{__name__}.machine.ListCommand", "List all sandboxes of this user."),
    "prune": (f"{__name__}.machine.PruneCommand", "Remove leftovers of sandboxes whose owner has exited."),
    "token": (f"{__name__}.tokens.TokenCommand", "Create, list and revoke tokens for one sandbox."),
    "egress": (f"{__name__}.egress.EgressCommand", "List, allow and revoke hosts that sandboxes may reach."),
    "folder": (f"{__name__}.folder.FolderCommand", "List, add and remove host folders that notebooks see."),
    "audit": (f"{__name__}.audit.AuditCommand", "Verify or export the audit log."),
}


class AgentboxCommand(CommandGroup):
    """Jupyter kernels in gVisor sandboxes, with egress allowed by host name."""

    name = "jupyter agentbox"
    description = __doc__ or ""
    examples = "jupyter agentbox setup\njupyter agentbox doctor\njupyter agentbox run script.py"
    subcommands = _COMMANDS
    headings = {  # noqa: RUF012  # as in traitlets' own class
        "setup": "This machine",
        "run": "Start a sandbox or server",
        "ps": "Sandboxes of a running server",
        "list": "All sandboxes of this user",
    }


def main(argv: list[str] | None = None) -> None:
    """Run ``jupyter-agentbox``."""
    try:
        AgentboxCommand.launch_instance(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # `... --help | head`: the reader has closed the pipe. Discard what the interpreter flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
