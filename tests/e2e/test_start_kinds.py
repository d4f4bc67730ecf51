"""A kernel is the same, whether it started cold, from a template or from the pool, was restored, forked or woken."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.harness import Env, KernelClient, Server, wait_until

API = "api/agentbox"
#: How the audit log says that a kernel of each profile started.
PROFILES: dict[str, dict[str, Any]] = {
    "default": {},
    "cold": {"init": ["true"]},  # lines that run first cannot have run in a template
    "pooled": {"pool_size": 1},
    "loaded": {"preload": ["pandas", "matplotlib.pyplot"]},
}
HOW = {"default": "template", "cold": "cold", "pooled": "pool", "loaded": "template"}
#: The first kernel after the server's start, and one that follows at once; a restart then finds all caches warm.
ROUNDS = 2
EXTENSION = "--ServerApp.jpserver_extensions={'jupyter_agentbox': True}"
FIGURE = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"
#: All that a process has of its own and that code may depend on. Run after FIGURE.
STATE = """
import ctypes, json, locale, logging, matplotlib, os, resource, signal, subprocess, sys, time, warnings
libc = ctypes.CDLL(None)
rows, names = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ"), []
while rows[len(names)] is not None:
    names.append(rows[len(names)])
libc.getenv.restype = ctypes.c_char_p
print(json.dumps({
    "env": dict(os.environ),
    "environ of C": dict(os.fsdecode(name).split("=", 1) for name in names),
    "getenv": {name: os.fsdecode(libc.getenv(os.fsencode(name)) or b"") for name in os.environ},
    "env of a command": dict(
        row.split("=", 1) for row in subprocess.check_output(["env", "-0"], text=True).split("\\0") if row
    ),
    "cwd": os.getcwd(),
    "path": sys.path,
    "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(), sys.stdout.encoding],
    "time zone": [time.tzname, time.timezone, time.daylight],
    "warnings": [repr(item) for item in warnings.filters],
    "matplotlib": [
        matplotlib.get_backend(), matplotlib.rcParams["backend"], plt.isinteractive(), plt.get_fignums()
    ],
    "umask": [os.umask(0o22), os.umask(0o22)],
    "signals": {item.name: getattr(signal.getsignal(item), "__qualname__", str(signal.getsignal(item)))
                for item in signal.valid_signals() if isinstance(item, signal.Signals)},
    "flags": [repr(sys.flags), sys.argv[:2], sys.getrecursionlimit(), sys.getswitchinterval()],
    "limits": [resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in ("NPROC", "NOFILE", "FSIZE")],
    "session": globals().get("__session__"),
    "shell": [get_ipython().colors, get_ipython().user_module.__name__, sorted(logging.getLogger().handlers)],
}))
"""


def differing(state: dict[str, Any], cold: dict[str, Any]) -> dict[str, Any]:
    """Return in what two kernels differ, without what differs between any two."""
    found = {name: (state[name], cold[name]) for name in cold if state[name] != cold[name]}
    # The folder of `pip install --user`: in a template it is made before anything is installed there.
    path = [entry for entry in state["path"] if not entry.startswith("/home/user/.local/lib/")]
    if path == cold["path"]:
        found.pop("path", None)
    return found


def read_state(kernel: KernelClient) -> dict[str, Any]:
    """Return the state of a kernel, in which all ways to its environment agree."""
    state: dict[str, Any] = json.loads(kernel.check(STATE).splitlines()[-1])
    for name in ("environ of C", "getenv", "env of a command"):
        assert state[name] == state["env"], name
    return state


def draw(kernel: KernelClient) -> None:
    """Run the cell that most notebooks begin with: no magic, and a figure is shown."""
    result = kernel.execute(FIGURE)
    assert result.reply["status"] == "ok", result
    assert [sorted(data) for data in result.data] == [["image/png", "text/plain"]], result


@pytest.fixture(scope="module")
def server(make_env: Callable[..., Env]) -> Iterator[Server]:
    config = {"Policy": {"templates": True, "profiles": PROFILES, "lease_timeout": 30.0}}
    env = make_env(config=config, imports=None)  # the first kernels read each module from its own file
    for profile in PROFILES:
        folder = env.data / "kernels" / f"agentbox-{profile}"
        folder.mkdir(parents=True)
        provisioner = {"provisioner_name": "agentbox-provisioner", "config": {"profile": profile}}
        spec = {
            "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": profile,
            "language": "python",
            "metadata": {"kernel_provisioner": provisioner},
        }
        (folder / "kernel.json").write_text(json.dumps(spec))
    for profile in set(PROFILES) - {"cold"}:
        env.run("jupyter", "agentbox", "warm", f"--kernel=agentbox-{profile}", profile, timeout=280)
    with env.server("server", EXTENSION, "--AgentboxExtension.keep_sandboxes=False") as running:
        yield running


def start(server: Server, profile: str, book: str = "book.ipynb") -> KernelClient:
    """Start a kernel of a notebook's, in the way that its profile is for."""
    pool = server.env.state_dir / "sandboxes"
    if profile == "pooled" and not list(pool.glob("*/pooled")):
        server.notebook("first.ipynb", f"agentbox-{profile}").shutdown()  # has the server keep a pool
        wait_until(lambda: list(pool.glob("*/pooled")), 150, "a kernel waits in the pool")
    kernel = server.notebook(book, f"agentbox-{profile}")
    return kernel


def how_it_started(server: Server, kernel: KernelClient) -> list[str]:
    """Return how each of a kernel's sandboxes started, by the audit log."""
    rows = [row["detail"] for row in server.call("GET", f"{API}/audit?kind=lifecycle&limit=1000")["rows"]]
    return [row["how"] for row in rows if row.get("kernel_id") == kernel.id and "how" in row]


@pytest.fixture(scope="module")
def cold(server: Server) -> dict[str, Any]:
    """Return the state of a kernel that started cold."""
    kernel = start(server, "cold")
    draw(kernel)
    state = read_state(kernel)
    kernel.shutdown()
    env = state["env"]
    assert env["MPLBACKEND"] == "module://matplotlib_inline.backend_inline"
    assert (env["PAGER"], env["GIT_PAGER"], env["JPY_SESSION_NAME"]) == ("cat", "cat", "/workspace/book.ipynb")
    return state


@pytest.mark.timeout(900)
@pytest.mark.parametrize("profile", HOW)
def test_kernels_in_a_row_are_as_one_that_started_cold(server: Server, cold: dict[str, Any], profile: str) -> None:
    # One that started cold is there already.
    rounds = 1 if profile == "cold" else ROUNDS
    for number in range(rounds):
        kernel = start(server, profile)
        draw(kernel)
        state = read_state(kernel)
        if profile == "loaded":  # its modules were imported in another order
            state["warnings"] = cold["warnings"]
        assert not differing(state, cold), f"kernel {number} of profile {profile}"
        wait_until(lambda: how_it_started(server, kernel), 60, "the audit log has it")  # noqa: B023
        assert HOW[profile] in how_it_started(server, kernel)
        if number == rounds - 1:
            kernel.restart()
            draw(kernel)
            assert not differing({**read_state(kernel), "warnings": cold["warnings"]}, cold), "after a restart"
            check_pager(kernel)
        kernel.shutdown()


def check_pager(kernel: KernelClient) -> None:
    """Check that a command that shows its output in a pager ends."""
    kernel.check(
        "import os, subprocess\nos.mkdir('/tmp/repository'); os.chdir('/tmp/repository')\n"
        "subprocess.run(['git', 'init', '-q', '.'], check=True)\n"
        "commit = 'commit HEAD\\ncommitter me <me@example.org> {0} +0000\\ndata <<.\\ncommit {0}\\n.\\n'\n"
        "commits = ''.join(commit.format(number) for number in range(40))\n"
        "subprocess.run(['git', 'fast-import', '--quiet'], input=commits, text=True, check=True)"
    )
    said = kernel.check("!git log --format=%s\n!git -p log --format=%s | tail -1\n!echo $PAGER", timeout=60)
    assert said.count("commit ") == 41
    assert said.split()[-1] == "cat"


CHANGE = """
import os
os.environ["MINE"] = "set by a cell"
os.environ["PAGER"] = "less"
os.environ["TERM"] = "dumb"
del os.environ["CLICOLOR"]
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("profile", ["cold", "default", "pooled"])
def test_what_a_cell_set_is_there_after_a_restore_a_fork_and_a_wake(
    server: Server, cold: dict[str, Any], profile: str
) -> None:
    changed = {**cold["env"], "MINE": "set by a cell", "PAGER": "less", "TERM": "dumb"}
    del changed["CLICOLOR"]
    kernel = start(server, profile)
    path = f"{API}/sandboxes/{kernel.id}"
    untouched = server.call("POST", f"{path}/snapshots", {})["id"]
    kernel.check(CHANGE)
    saved = server.call("POST", f"{path}/snapshots", {})["id"]
    kernel.check("os.environ['MINE'] = 'set later'; os.environ['CLICOLOR'] = '1'")

    server.call("POST", f"{path}/restore", {"snapshot": saved})
    draw(kernel)
    assert read_state(kernel)["env"] == changed, "restored"

    fork = server.call("POST", f"{path}/fork", {"as_kernel": True, "snapshot": saved})
    other = KernelClient(server, fork["kernels"][0]["id"])
    draw(other)
    assert read_state(other)["env"] == changed, "forked"
    other.shutdown()

    server.call("POST", f"{path}/park")
    assert server.call("GET", path)["state"] == "parked"
    draw(kernel)
    assert read_state(kernel)["env"] == changed, "woken"

    server.call("POST", f"{path}/restore", {"snapshot": untouched})
    draw(kernel)
    assert not differing(read_state(kernel), cold), "restored to before it was changed"
    kernel.shutdown()


@pytest.mark.timeout(300)
def test_a_kernel_by_the_relay_has_the_same_environment(make_env: Callable[..., Env], cold: dict[str, Any]) -> None:
    env = make_env(config={"Policy": {"kernel_driver": "relay"}})
    with env.server("server") as server:
        kernel = server.notebook("book.ipynb")
        draw(kernel)
        # It loads the debugger at its start, as a bare one does; what speaks to the host itself, when somebody debugs.
        assert read_state(kernel)["env"] == {**cold["env"], "PYDEVD_USE_FRAME_EVAL": "NO"}
        kernel.shutdown()
