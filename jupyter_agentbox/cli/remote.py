"""Commands that call a running server: exec, cp, logs, ps and stop."""

from __future__ import annotations

import base64
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from traitlets import Bool, Float, Unicode

from jupyter_agentbox.client import ApiError, Client, Output, Sandbox, find_server
from jupyter_agentbox.client.find import read_token
from jupyter_agentbox.errors import AgentboxError, InvalidRequest, NotAuthenticated
from jupyter_agentbox.models import AuditItem, ExitEvent
from jupyter_agentbox.storage.files import Copied, Folder, FolderView

from .base import Command, ProgramCommand, format_age, printable, read_input, write_out, write_table

#: Exit status after ``--timeout``, the same as that of ``timeout``.
TIMED_OUT = 124
_REMOTE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63}):(.+)", re.DOTALL)


class RemoteCommand(Command):
    """Connect to a running server; the base of the commands below."""

    url = Unicode(
        help="Base URL of the server. Default: JUPYTER_AGENTBOX_URL, or your newest server on this machine."
    ).tag(config=True)
    token_file = Unicode(
        help="Read the server's token from this file; - is standard input. Default: JUPYTER_AGENTBOX_TOKEN. There is "
        "no option for the token itself, because other users can see a command's options."
    ).tag(config=True)

    def run(self) -> int:
        """Connect to the server and run the command."""
        token = read_token(self.token_file) if self.token_file else None
        server = find_server(self.url or None, token)
        with Client(server.url, server.token) as client:
            try:
                return self.do(client)
            except ApiError as error:
                if str(error) == "Forbidden":  # Jupyter's own message
                    reason = "it does not permit this call"
                elif isinstance(error, NotAuthenticated):
                    reason = str(error)
                else:
                    raise
                raise AgentboxError(
                    f"{server.url} refused the token: {reason}. Set another token with --token-file "
                    "or JUPYTER_AGENTBOX_TOKEN"
                ) from None

    def do(self, client: Client) -> int:
        """Do the work and return the exit status."""
        raise NotImplementedError

    def sandbox(self, client: Client, name: str) -> Sandbox:
        """Return a sandbox by its id."""
        return client.sandbox(name)


class ExecCommand(ProgramCommand, RemoteCommand):
    """Run a command in a sandbox: `jupyter agentbox exec ID -- ls -l`.

    Put options before ID. A single argument is a shell command; several are a program and its arguments. Output
    appears as it is printed. The exit status is the command's, or 124 after --timeout. Ctrl-C ends the command.
    """

    name = "jupyter agentbox exec"
    description = __doc__ or ""
    examples = "jupyter agentbox exec demo -- python3 --version\njupyter agentbox exec demo 'ls | wc -l'"
    argument = "ID COMMAND..."
    wanted = "name a sandbox and a command: jupyter agentbox exec ID -- COMMAND"
    own_count = 1
    timeout = Float(3600.0, help="Kill the command after this many seconds.").tag(config=True)
    workdir = Unicode(help="Working directory. Default: the sandbox's.").tag(config=True)
    stdin = Bool(False, help="Pass standard input to the command; it is read to its end first.").tag(config=True)

    def do(self, client: Client) -> int:
        """Run the command and print its output."""
        name, *words = self.rest
        command: str | list[str] = words[0] if len(words) == 1 else words
        stdin = read_input() if self.stdin else b""
        box = self.sandbox(client, name)
        with box.stream(command, stdin=stdin, timeout=self.timeout, workdir=self.workdir or None) as events:
            for event in events:
                if isinstance(event, Output):
                    write_out(event.data, 2 if event.stream == "stderr" else 1)
        return self._end(event)

    def _end(self, event: Output | ExitEvent) -> int:
        assert isinstance(event, ExitEvent)  # the last event of a command
        for item in event.refused:
            print(f"{self.name}: {printable(item.message)}", file=sys.stderr)
        if event.timed_out:
            print(f"{self.name}: killed after {self.timeout:g} s", file=sys.stderr)
            return TIMED_OUT
        return event.exit_code


class CopyCommand(RemoteCommand):
    """Copy a file or directory into or out of a sandbox: `jupyter agentbox cp data.csv ID:data.csv`.

    Prefix the path in the sandbox with its id and a colon; paths are relative to /workspace. If the target is an
    existing directory, the copy goes into it. The other path can be - for standard input or output. A file appears at
    the target only when it is complete; uploads are verified by SHA-256.
    """

    name = "jupyter agentbox cp"
    description = __doc__ or ""
    examples = "jupyter agentbox cp model demo:model\njupyter agentbox cp demo:/workspace/out.csv ."
    argument = "SOURCE TARGET"
    wanted = "name a source and a target, one of them in a sandbox, such as demo:data.csv"

    def do(self, client: Client) -> int:
        """Copy."""
        source, target = (_REMOTE.fullmatch(text) for text in self.extra_args)
        if (source is None) == (target is None):
            raise InvalidRequest("exactly one of source and target must be in a sandbox, such as demo:data.csv")
        if target is not None:
            return self._put(self.sandbox(client, target[1]), self.extra_args[0], target[2])
        assert source is not None
        return self._get(self.sandbox(client, source[1]), source[2], self.extra_args[1])

    def _put(self, box: Sandbox, source: str, target: str) -> int:
        if source == "-":
            box.files.upload(target, sys.stdin.buffer)
            return 0
        path = Path(source)
        if box.files.exists(target) and box.files.stat(target).kind == "directory":
            target = f"{target.rstrip('/')}/{path.resolve().name}"
        if path.is_dir():
            with FolderView(path) as folder, folder.pack(".", "tar") as packed:
                self._report_skipped(box.files.unpack(packed, target))
        else:
            try:
                box.files.upload(target, path)
            except OSError as error:
                raise InvalidRequest(f"{source} cannot be read: {error.strerror or error}") from None
        return 0

    def _get(self, box: Sandbox, source: str, target: str) -> int:
        if target == "-":
            for chunk in box.files.download_chunks(source):
                write_out(chunk)
            return 0
        path, entry = Path(target), box.files.stat(source)
        if path.is_dir():
            path /= source.rstrip("/").rpartition("/")[2].strip(".") or "workspace"
        try:
            if entry.kind == "directory":
                path.mkdir(exist_ok=True)
                # The archive is hostile. It is unpacked with the same checks as any upload.
                with Folder(path) as folder:
                    assert isinstance(folder, Folder)
                    with folder.unpack(".") as upload:
                        for chunk in box.files.pack_chunks(source):
                            upload.write(chunk)
                        self._report_skipped(upload.finish())
            else:
                box.files.download(source, path)
        except OSError as error:
            raise InvalidRequest(f"{target} cannot be written: {error.strerror or error}") from None
        return 0

    def _report_skipped(self, copied: Copied) -> None:
        for sentence in copied.skipped:
            print(f"{self.name}: skipped: {printable(sentence)}", file=sys.stderr)
        if copied.skipped_count > len(copied.skipped):
            print(f"{self.name}: skipped: {copied.skipped_count} entries in total", file=sys.stderr)


class LogsCommand(RemoteCommand):
    """Show the audit log of a sandbox, or the output of one of its background processes.

    `jupyter agentbox ps ID` lists the processes.
    """

    name = "jupyter agentbox logs"
    description = __doc__ or ""
    examples = "jupyter agentbox logs demo\njupyter agentbox logs --follow demo 1f2e3d4c"
    argument = "ID [PROCESS]"
    wanted = "name a sandbox, and a process if you want its output"
    json = Bool(False, help="Print JSON lines.").tag(config=True)
    follow = Bool(False, help="Print a process's output until it ends.").tag(config=True)

    def do(self, client: Client) -> int:
        """Print the rows or the output."""
        box = self.sandbox(client, self.extra_args[0])
        if len(self.extra_args) == 1:
            for row in box.audit():
                print(json.dumps(msgspec.to_builtins(row)) if self.json else _line(row))
            return 0
        process = box.process(self.extra_args[1])
        if self.follow:
            with process.follow() as events:
                for event in events:
                    if isinstance(event, Output):
                        write_out(event.data, 2 if event.stream == "stderr" else 1)
            return 0
        for stream, descriptor in (("stdout", 1), ("stderr", 2)):
            offset, end = 0, process.info.stdout_bytes if descriptor == 1 else process.info.stderr_bytes
            while offset < end:
                chunk = process.read(offset, stream=stream, encoding="base64")
                write_out(base64.b64decode(chunk.data), descriptor)
                if chunk.next_offset <= offset:
                    break
                offset = chunk.next_offset
        return 0


class PsCommand(RemoteCommand):
    """List the sandboxes of a running server, or the background processes of one sandbox."""

    name = "jupyter agentbox ps"
    description = __doc__ or ""
    examples = "jupyter agentbox ps --json"
    argument = "[ID]"
    wanted = "name at most one sandbox"
    json = Bool(False, help="Print a JSON list instead of a table.").tag(config=True)

    def do(self, client: Client) -> int:
        """Print the list."""
        rows: list[tuple[str, ...]]
        items: list[Any]
        if self.extra_args:
            items = [process.info for process in self.sandbox(client, self.extra_args[0]).processes()]
            rows = [("PROCESS", "STATE", "EXIT", "AGE", "COMMAND")]
            for item in items:
                status = "-" if item.exit_code is None else str(item.exit_code)
                rows.append((item.id, item.state, status, format_age(time.time() - item.started), item.command))
        else:
            items = list(client.list())
            rows = [("ID", "KIND", "STATE", "PROFILE", "AGE", "OWNER")]
            for item in items:
                age = format_age(time.time() - item.created)
                rows.append((item.id, item.kind, item.state, item.profile, age, item.owner))
        if self.json:
            print(json.dumps(msgspec.to_builtins(items), indent=2))
        else:
            write_table(rows)
        return 0


class StopCommand(RemoteCommand):
    """Stop sandboxes of a running server, and everything that runs in them."""

    name = "jupyter agentbox stop"
    description = __doc__ or ""
    examples = "jupyter agentbox stop demo"
    argument = "ID..."
    wanted = "name the sandboxes to stop; `jupyter agentbox ps` lists them"

    def do(self, client: Client) -> int:
        """Stop the sandboxes."""
        for name in self.extra_args:
            self.sandbox(client, name).delete()
            print(f"stopped {name}")
        return 0


def _line(row: AuditItem) -> str:
    """Format a row of the log as text."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.time))
    verdict = "" if row.is_allowed is None else "allowed" if row.is_allowed else "REFUSED"
    place = "" if row.host is None else row.host if row.port is None else f"{row.host}:{row.port}"
    detail = json.dumps(row.detail, ensure_ascii=False) if row.detail else ""
    words = (when, row.kind, verdict, place, row.rule or "", row.reason or "", detail)
    return printable("  ".join(word for word in words if word))
