"""Test what sandboxes do on any runtime and image. Derive from :class:`SandboxContract` or :class:`ImageContract`.

The suite uses a real server only through the public client, so it tests what users get.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from jupyter_agentbox.client import (
    ApiError,
    Client,
    CommandFailed,
    NotFound,
    RuntimeUnavailable,
    Sandbox,
    SandboxEnded,
)
from jupyter_agentbox.models.outputs import DoneEvent, StreamEvent
from jupyter_agentbox.spec import MIB

from .serving import OTHER, SITE, Serving, wait_until

MakeSandbox = Callable[..., Sandbox]

#: For each language: code that stores a value, code that prints it plus one, and code that runs forever.
_CODE = {
    "python": ("x = 41", "print(x + 1)", "print('begun', flush=True)\nwhile True: pass"),
    # Without programs: an interactive shell loses a SIGINT that arrives while it starts one.
    "bash": ("x=41", "echo $((x + 1))", "echo begun; while :; do :; done"),
    "r": ("x <- 41", "cat(x + 1)", "cat('begun'); flush.console(); while (TRUE) Sys.sleep(0.1)"),
    "typescript": ("const x: number = 41;", "console.log(x + 1)", None),
    "javascript": ("let y = 41", "console.log(y + 1)", None),
}
_BOMB = """
import os, time
made = []
try:
    while len(made) < 500:
        made.append(os.fork())
        if not made[-1]: time.sleep(300); os._exit(0)
except OSError as error: print(len(made), error.errno)
for pid in made: os.kill(pid, 9); os.waitpid(pid, 0)
"""
#: Shell line that fills memory which belongs to no program, so that killing a program does not free it.
FILL_MEMORY = """/usr/bin/python3 -c '
import os
files = []
while True: files.append(os.memfd_create("x")); os.write(files[-1], bytes(1 << 22))'"""
#: Allocates about 40 MB/s, slow enough to be noticed by the memory watch even on a busy machine.
_ALLOCATE = """
import time
kept = []
while True:
    kept.append(bytearray(b"x" * 4_000_000))
    time.sleep(0.1)
"""
#: Tries to allocate more than the sandbox has, then to reserve as much, and to map a file.
_ABSURD = """
import array, mmap
def attempt(action):
    try:
        action()
        print("fine")
    except MemoryError:
        print("MemoryError")
    except OSError as error:
        print("OSError", error.errno)
def map_memory(size, **options):
    mmap.mmap(-1, size, **options).close()
GIB, PRIVATE, NORESERVE = 1 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0x4000
attempt(lambda: bytes(500 * GIB))
attempt(lambda: array.array("d", [0.0]) * (100 * GIB))
attempt(lambda: bytearray(GIB))
attempt(lambda: map_memory(500 * GIB, flags=PRIVATE))
attempt(lambda: map_memory(GIB))
attempt(lambda: map_memory(500 * GIB, flags=PRIVATE, prot=0))
attempt(lambda: map_memory(500 * GIB, flags=PRIVATE | NORESERVE))
attempt(lambda: map_memory(300 << 20, flags=PRIVATE))
with open("sparse", "w+b") as file:
    file.truncate(60 << 20)
    attempt(lambda: mmap.mmap(file.fileno(), 60 << 20).close())
"""
#: Longer than a server needs to restart.
_LEASE = 300.0
_PROFILES = {"brief": {"lease_timeout": 3.0}}


class ImageContract:
    """The part of the suite that depends on the image.

    All tests share one server and, if they leave it unchanged, one sandbox: the *neighbour* of others.

    Attributes
    ----------
    image : str
        Name of the sandboxes' image; empty for the host's own system.
    keeps_snapshots : bool
        Whether the runtime can save and restore sandboxes. Otherwise it must refuse with a clear message.
    """

    image: ClassVar[str] = ""
    keeps_snapshots: ClassVar[bool] = True

    @pytest.fixture(scope="class")
    @classmethod
    def config(cls) -> Mapping[str, Mapping[str, Any]]:
        """Settings by class, including ``Policy.runtime``."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def images(cls) -> Path | None:
        """State directory that contains ``image``."""
        return None

    @pytest.fixture(scope="class")
    @classmethod
    def serving(
        cls, config: Mapping[str, Mapping[str, Any]], images: Path | None, site: tuple[int, list[str]]
    ) -> Iterator[Serving]:
        serving = Serving(config, images, site[0])
        try:
            serving.start(lease_timeout=_LEASE, profiles=_PROFILES)
            yield serving
        finally:
            serving.close()

    @pytest.fixture
    def client(self, serving: Serving) -> Client:
        return serving.client

    @pytest.fixture(scope="class")
    @classmethod
    def site(cls) -> Iterator[tuple[int, list[str]]]:
        """Port of a web site on this machine, and the host names of the requests that it received."""
        asked: list[str] = []

        class Hello(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.headers.get("Host", "").partition(":")[0])
                self.send_response(200)
                self.send_header("Content-Length", "5")
                self.end_headers()
                self.wfile.write(b"hello")

            def log_message(self, format: str, *args: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Hello) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield server.server_address[1], asked
            server.shutdown()
            thread.join()

    @pytest.fixture
    def box(self, client: Client, site: tuple[int, list[str]]) -> Sandbox:
        """Sandbox shared by all tests, with ``x`` in its Python kernel."""
        # A repeated identical request returns the existing sandbox.
        box = client.create(
            id="shared", image=self.image or None, allowed_hosts=[f"{SITE}:{site[0]}"], env={"SHARED": "1"}, keep=True
        )
        box.run_code("shared = globals().get('shared', 0) + 1")
        return box

    @pytest.fixture
    def make(self, client: Client) -> Iterator[MakeSandbox]:
        """Function that creates sandboxes, which are deleted at the end of the test."""
        with ExitStack() as stack:
            yield lambda **request: stack.enter_context(client.create(image=self.image or None, **request))

    # Lifecycle

    def test_it_is_what_was_asked_for(self, box: Sandbox, config: Mapping[str, Mapping[str, Any]]) -> None:
        info = box.refresh()
        assert (info.state, info.kind, info.workspace) == ("running", "session", "private")
        assert info.runtime == config["Policy"]["runtime"]
        assert bool(info.image) == bool(self.image)
        assert box.exec("echo $SHARED; id -u; id -g").stdout.split() == ["1", "1000", "1000"]
        if self.image and not Path(sys.prefix).is_relative_to("/usr"):
            assert box.exec(["test", "-e", sys.prefix]).exit_code == 1, "the host's own Python is not to be seen"

    def test_an_end_leaves_nothing(self, make: MakeSandbox, client: Client, serving: Serving) -> None:
        box = make(id="brief")
        assert box.info is not None
        sandbox_id = str(box.info.sandbox_id)
        directory = serving.state_dir / "sandboxes" / sandbox_id
        assert directory.is_dir()
        box.delete()
        assert not directory.exists()
        with pytest.raises(NotFound):
            client.get("brief")
        wait_until(lambda: not _find_processes(sandbox_id), "its processes are gone")

    # Commands, terminals, files

    def test_a_command_has_its_outputs_and_status(self, box: Sandbox) -> None:
        ran = box.exec('cat; echo "$A $(pwd)"; echo err >&2; exit 3', stdin="in\n", env={"A": "1"}, workdir="/tmp")
        assert (ran.stdout, ran.stderr, ran.exit_code) == ("in\n1 /tmp\n", "err\n", 3)
        assert box.exec("kill -SEGV $$").exit_code == 128 + 11
        assert box.exec(["/no/such/program"]).exit_code == 127
        late = box.exec("echo begun; sleep 600 & sleep 600", timeout=6)
        assert (late.stdout, late.timed_out) == ("begun\n", True)
        with pytest.raises(CommandFailed, match="no luck"):
            box.exec("echo no luck >&2; false", check=True)

    def test_a_process_goes_on_in_the_background(self, box: Sandbox) -> None:
        process = box.start("read line; echo got $line; read line; exit 4")
        process.write("one\n")
        assert process.read(wait=60).data == "got one\n"
        process.write("two\n")
        assert process.wait(60).exit_code == 4
        process.remove()

    def test_a_terminal_is_one(self, box: Sandbox) -> None:
        terminal = box.open_terminal(["/bin/sh"], rows=30, columns=90)
        terminal.write("stty size; test -t 0 && echo is a $((1 + 1))-way terminal\n")
        wait_until(lambda: "30 90" in (text := terminal.read().data) and "is a 2-way" in text, "it is a terminal")
        terminal.resize(40, 100)
        terminal.write("stty size; exit 5\n")
        assert terminal.wait(60).exit_code == 5
        wait_until(lambda: "40 100" in terminal.read().data, "it has the new size")
        terminal.remove()

    def test_files_are_the_same_from_both_sides(self, box: Sandbox) -> None:
        data = bytes(range(256)) * 4096
        box.files.write("deep/from-outside", data)
        box.exec("cp deep/from-outside deep/copy && ln -s /etc/passwd deep/link", check=True)
        assert box.files.read_bytes("deep/copy") == data
        assert box.exec("stat -c '%u %s' deep/from-outside deep/copy").stdout == f"1000 {len(data)}\n" * 2
        with pytest.raises(ApiError):
            box.files.read_bytes("deep/link")  # it leads out of the work folder
        box.files.delete("deep", recursive=True)
        assert box.exec("ls deep").exit_code != 0

    def test_a_list_with_links_has_no_errors(self, box: Sandbox) -> None:
        listed = box.exec("ln -s nowhere link && ls -l link /tmp/.. && rm link")
        assert listed.stderr == ""
        assert "link -> nowhere" in listed.stdout
        tried = box.exec(["python3", "-c", _ATTRIBUTES])
        assert tried.stdout == "kept\n", "attributes other than labels are not affected\n" + tried.stderr

    # Code

    def test_every_language_keeps_its_values(self, box: Sandbox) -> None:
        assert box.info is not None
        assert "python" in box.info.languages
        for language in [name for name in box.info.languages if name in _CODE]:
            first, then, _ = _CODE[language]
            assert box.run_code(first, language=language).status == "ok", language
            assert box.run_code(then, language=language).stdout.strip() == "42", language

    def test_an_interrupt_ends_the_code_and_not_the_kernel(self, box: Sandbox) -> None:
        assert box.info is not None
        for language in [name for name in box.info.languages if name in _CODE]:
            first, then, endless = _CODE[language]
            if endless is None:  # its kernel does not support interrupts
                continue
            box.run_code(first, language=language)
            interrupts = 0
            with box.stream_code(endless, language=language, timeout=120) as events:
                for event in events:
                    if isinstance(event, StreamEvent) and "begun" in event.text:
                        (context,) = [item.name for item in box.contexts() if item.state == "busy"]
                        box.interrupt_context(context)
                        interrupts += 1
            assert interrupts == 1
            assert isinstance(event, DoneEvent)
            assert event.result.status != "timed_out", language
            assert box.run_code(then, language=language).stdout.strip() == "42", language

    def test_a_restart_forgets_values_and_keeps_files(self, box: Sandbox) -> None:
        box.run_code("gone = 1; open('kept', 'w').write('kept')")
        before = box.restart_context()
        ran = box.run_code("print(open('kept').read()); gone")
        assert (ran.stdout, ran.error and ran.error.ename) == ("kept\n", "NameError")
        assert before.epoch > 0
        box.files.delete("kept")

    # Egress

    def test_only_what_was_granted_is_reached(self, box: Sandbox, site: tuple[int, list[str]]) -> None:
        port, asked = site

        def fetch(host: str) -> Any:
            code = f"import urllib.request as u; print(u.urlopen('http://{host}:{port}', timeout=60).read().decode())"
            return box.exec(["/usr/bin/python3", "-c", code], timeout=90)

        assert fetch(SITE).stdout == "hello\n"
        refused = fetch(OTHER)
        assert refused.exit_code != 0
        assert [item.host for item in refused.refused] == [OTHER]
        dial = f"import socket; socket.create_connection(('127.0.0.1', {port}), 20)"
        assert box.exec(["/usr/bin/python3", "-c", dial], timeout=60).exit_code != 0, (
            "the host is not the sandbox's own"
        )
        assert asked == [SITE]
        decided = {(row.host, row.is_allowed) for row in box.egress_log()}
        assert {(SITE, True), (OTHER, False)} <= decided

    # Snapshots

    def test_a_snapshot_is_gone_back_to_or_refused_in_words(self, make: MakeSandbox) -> None:
        box = make()
        box.run_code("x = 'then'; open('file', 'w').write(x)")
        if not self.keeps_snapshots:
            with pytest.raises(RuntimeUnavailable, match="does not support snapshots"):
                box.take_snapshot()
            assert box.run_code("print(x)").stdout == "then\n"
            return
        snapshot = box.take_snapshot("then")
        box.run_code("x = 'now'; open('file', 'w').write(x)")
        box.restore(snapshot.id)
        assert box.run_code("print(x, open('file').read())").stdout == "then then\n"
        assert box.exec("ln -s nowhere link && ls -l link").stderr == ""
        with box.fork() as copy:
            copy.run_code("x = 'copy'")
            assert box.run_code("print(x)").stdout == "then\n"

    # Last, because this test kills the server

    def test_a_server_that_was_killed_finds_its_sandboxes_and_what_has_no_lease_is_gone(
        self, box: Sandbox, client: Client, serving: Serving
    ) -> None:
        box.run_code("adopted = 41")
        counter = box.start("i=0; while :; do i=$((i + 1)); echo $i; sleep 0.2; done")
        brief = client.create(id="unowned", profile="brief", image=self.image or None, keep=True)
        assert brief.info is not None
        sandbox_id = str(brief.info.sandbox_id)
        serving.end()
        wait_until(lambda: not (serving.state_dir / "sandboxes" / sandbox_id).exists(), "its lease is over")
        wait_until(lambda: not _find_processes(sandbox_id), "its processes are gone")
        serving.start(lease_timeout=_LEASE, profiles=_PROFILES)
        again = serving.client.get(box.id)
        assert again.refresh().state == "running"
        assert again.run_code("print(adopted + 1)").stdout == "42\n"
        seen = again.process(counter.id).read()
        assert again.process(counter.id).read(seen.next_offset, wait=60).data, "what ran goes on"
        again.process(counter.id).remove()
        info = serving.client.get("unowned").refresh()
        assert (info.state, info.end and info.end.cause) == ("ended", "lease_over")


#: Sets an attribute of a file and reads it as ``lgetxattr`` does.
_ATTRIBUTES = """
import os
open("/tmp/file", "w").close()
os.setxattr("/tmp/file", "user.name", b"kept")
print(os.getxattr("/tmp/file", "user.name", follow_symlinks=False).decode())
"""


class SandboxContract(ImageContract):
    """The whole suite: also the limits, which do not depend on the image."""

    # Limits: the sandbox reports the reason, and its neighbour is not affected

    def test_a_fork_bomb_and_a_program_out_of_memory_end_alone(self, make: MakeSandbox, box: Sandbox) -> None:
        hog = make(memory="512 MiB", processes=60)
        hog.run_code("kept = 41")
        made, error = hog.exec(["/usr/bin/python3", "-c", _BOMB], timeout=120).stdout.split()
        assert int(made) <= 60
        assert int(error) == 11
        assert box.exec("for i in 1 2 3; do sh -c 'echo fine'; done").stdout == "fine\n" * 3
        done = hog.exec(["/usr/bin/python3", "-c", _ALLOCATE], timeout=120)
        assert done.exit_code == 137
        assert "agentbox: out of memory: killed python3" in done.stderr
        assert hog.run_code("print(kept + 1)").stdout == "42\n"

    def test_an_absurd_allocation_fails_and_the_kernel_lives(self, make: MakeSandbox) -> None:
        small = make(memory="400 MiB")
        small.run_code("kept = 41")
        said = small.run_code(_ABSURD, timeout=120)
        assert said.stdout.split("\n") == [*["MemoryError"] * 3, *["OSError 12"] * 2, *["fine"] * 4, ""], said
        assert small.run_code("print(kept + 1)").stdout == "42\n"

    def test_out_of_memory(self, make: MakeSandbox, box: Sandbox) -> None:
        box.run_code("kept = 41")
        hog = make(memory="300 MiB")
        hog.files.write("file", "precious")
        with pytest.raises(SandboxEnded, match=r"out of memory \(limit 300 MiB\)"):
            hog.exec(FILL_MEMORY, timeout=120)
        info = hog.refresh()
        assert info.end is not None
        assert (info.state, info.end.cause, info.end.exit_code) == ("ended", "out_of_memory", 137)
        assert info.end.kept_until is not None
        assert hog.revive().state == "running"
        assert hog.exec("cat file").stdout == "precious"
        assert box.run_code("print(kept + 1)").stdout == "42\n"

    def test_a_full_disk(self, make: MakeSandbox, box: Sandbox, serving: Serving) -> None:
        full = make(disk="64 MiB")
        full.run_code("x = 1")
        fill = "for i in 1 2 3 4 5 6 7 8; do head -c 30000000 /dev/zero > /workspace/$i || break; sleep 3; done"
        assert "disk full" in full.exec(fill, timeout=120).stderr
        assert full.refresh().state == "running"
        write = "rm -f 1 2 3 4 5 6 7 8; until head -c 1000000 /dev/zero > 1; do sleep .5; done; ls"
        assert full.exec(write, timeout=120).stdout == "1\n"
        assert full.run_code("print(x)").stdout == "1\n"
        assert box.exec("head -c 30000000 /dev/zero > big && rm big").exit_code == 0
        assert _measure(serving.state_dir / "sandboxes") < 200 * MIB

    def test_processor_time(self, make: MakeSandbox) -> None:
        small = make(cpus=0.5)
        small.start("while :; do :; done & while :; do :; done & wait")
        first = wait_until(lambda: small.refresh().usage, "it is measured")

        def is_later() -> Any:
            usage = small.refresh().usage
            return usage if usage is not None and usage.time >= first.time + 5 else None

        last = wait_until(is_later, "it is measured again")
        assert last.cpu > first.cpu
        assert (last.cpu - first.cpu) / (last.time - first.time) < 0.5 * 1.3


def _measure(folder: Path) -> int:
    """Return the size of all files in a folder, in bytes. Files may be created and removed meanwhile."""
    total = 0
    for top, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(top, name)).st_size
    return total


def _find_processes(text: str) -> list[str]:
    """Return the command lines of processes on this machine that contain a text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


__all__ = ["ImageContract", "SandboxContract"]
