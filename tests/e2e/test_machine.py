"""The machine that programs in a notebook see is the sandbox, with real clients: its processors, memory and disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.harness import Env, KernelClient, Server

API = "api/agentbox"
LIMITS = {"cpus": 1, "memory": "512 MiB"}
MIB = 1 << 20
#: Prints what a kernel, a command and libraries find.
LOOK = """
import json, os, psutil, subprocess
memory = psutil.virtual_memory()
print(json.dumps({
    "processors": [
        os.cpu_count(), len(os.sched_getaffinity(0)), psutil.cpu_count(), psutil.cpu_count(logical=False) or 1,
        int(subprocess.check_output(["nproc"])), open("/proc/cpuinfo").read().count("processor\\t"),
    ],
    "memory": [memory.total, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")],
    "available": memory.available,
}))
"""
#: Fills 80 % of the memory that is shown, as programs do that choose the size of a cache by it.
FILL = """
import numpy, os
size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 8 // 10
filled = numpy.ones(size, dtype="u1")
print(int(filled[::4096].sum()) == -(-size // 4096))
"""


@pytest.fixture(scope="module")
def server(make_env: Callable[..., Env]) -> Iterator[Server]:
    profiles = {"small": LIMITS}
    env = make_env(config={"Policy": {"templates": True, "profiles": profiles, "lease_timeout": 30.0}})
    for profile in profiles:
        folder = env.data / "kernels" / f"agentbox-{profile}"
        folder.mkdir(parents=True)
        spec = {
            "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": profile,
            "language": "python",
            "metadata": {
                "kernel_provisioner": {"provisioner_name": "agentbox-provisioner", "config": {"profile": profile}}
            },
        }
        (folder / "kernel.json").write_text(json.dumps(spec))
    with env.server("server", "--ServerApp.jpserver_extensions={'jupyter_agentbox': True}") as running:
        yield running


def look(kernel: KernelClient) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kernel.check(LOOK))
    assert set(found["processors"]) == {1}, found
    assert all(380 * MIB < size < 512 * MIB for size in found["memory"]), found
    assert 0 < found["available"] < found["memory"][0], found
    return found


@pytest.mark.timeout(600)
def test_a_notebook_sees_a_machine_as_large_as_its_limits(server: Server) -> None:
    kernel = server.notebook("cold.ipynb", "agentbox-small")
    seen = look(kernel)
    assert kernel.check(FILL, timeout=120).strip() == "True"
    assert kernel.check("print(filled[0])").strip() == "1"
    kernel.shutdown()

    server.env.run("jupyter", "agentbox", "warm", "--kernel=agentbox-small", "small", timeout=280)
    kernel = server.notebook("warm.ipynb", "agentbox-small")
    assert look(kernel)["memory"] == seen["memory"], "from a template"
    path = f"{API}/sandboxes/{kernel.id}"
    saved = server.call("POST", f"{path}/snapshots", {})["id"]
    server.call("POST", f"{path}/restore", {"snapshot": saved})
    assert look(kernel)["memory"] == seen["memory"], "restored"
    server.call("POST", f"{path}/park")
    assert look(kernel)["memory"] == seen["memory"], "woken"
    fork = KernelClient(server, server.call("POST", f"{path}/fork", {"as_kernel": True})["kernels"][0]["id"])
    assert look(fork)["memory"] == seen["memory"], "forked"
    fork.shutdown()
    kernel.restart()
    assert look(kernel)["memory"] == seen["memory"], "restarted"
    assert kernel.check(FILL, timeout=120).strip() == "True"
    kernel.shutdown()


def test_an_absurd_allocation_raises_memory_error_and_variables_live(server: Server) -> None:
    kernel = server.notebook("absurd.ipynb", "agentbox-small")
    kernel.check("import numpy; kept = numpy.arange(1000)")
    for line in ("numpy.ones((500 << 30) // 8)", "numpy.zeros(513 << 20, dtype='u1')", "bytearray(500 << 30)"):
        assert "MemoryError" in kernel.execute(line).error, line
    assert kernel.check("print(kept.sum())").strip() == "499500"
    kernel.shutdown()


def test_files_of_the_notebooks_folder_may_be_large(server: Server) -> None:
    kernel = server.notebook("large.ipynb", "agentbox-small")
    seen = kernel.check(
        "import mmap, numpy, os\n"
        "with open('sparse', 'wb') as file: file.seek(3 << 30); file.write(b'x')\n"
        "array = numpy.memmap('array', mode='w+', shape=(3 << 30,), dtype='u1')\n"
        "array[-1] = 7; array.flush(); del array\n"
        "with open('map', 'w+b') as file:\n"
        "    file.truncate(1 << 40)  # as LMDB does\n"
        "    view = mmap.mmap(file.fileno(), 1 << 40); view[900 << 30] = 8; view.flush()\n"
        "    file.seek(900 << 30); print(file.read(1))\n"
        "print(numpy.memmap('array', dtype='u1')[-1], [os.path.getsize(name) for name in ('sparse', 'array', 'map')])"
    )
    assert seen.split("\n")[:2] == ["b'\\x08'", f"7 [{(3 << 30) + 1}, {3 << 30}, {1 << 40}]"]
    kernel.shutdown()
    assert (server.env.work / "array").stat().st_size == 3 << 30
    for name in ("sparse", "array", "map"):
        (server.env.work / name).unlink()
