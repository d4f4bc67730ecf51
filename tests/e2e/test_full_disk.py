"""A full disk is a failed write, not the end of a kernel."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from support.environments import make_wheel
from support.harness import Env, wait_until

pytestmark = pytest.mark.timeout(600)

FILL = """
import errno, os
made = []
try:
    for n in range(3000):
        made.append(f"{0}/part-{n}")
        with open(made[-1], "wb") as file:
            file.write(os.urandom(1 << 20))
except OSError as error:
    print(len(made), errno.errorcode[error.errno])
"""
DELETE = "for name in made: os.unlink(name)"


def test_a_notebook_whose_disk_is_full_keeps_its_variables(make_env: Callable[..., Env]) -> None:
    # One kernel starts cold, one from a template that was made with the profile's limits.
    config = {"Policy": {"profiles": {"default": {"disk": "64 MiB"}, "private": {"workspace": "private"}}}}
    env = make_env(config=config)
    wheel = make_wheel(env.work, "toolarge", os.urandom(80 << 20))
    with env.server("server") as server:
        for _ in range(2):
            kernel = server.kernel(path="book.ipynb")
            kernel.check("x = 1")
            count, name = kernel.check(FILL.replace("{0}", "/tmp")).split()
            assert name == "ENOSPC"
            assert 40 <= int(count) <= 65
            wait_until(lambda: "disk full: " in server.log.read_text(), 60, "the log says so")
            kernel.check(DELETE)
            installed = kernel.execute(f"!python -m pip install --no-index --no-deps ./{wheel}")
            assert "No space left on device" in installed.text, installed
            assert "The disk of this sandbox is full (limit 64 MiB). " in installed.notices, installed
            # What pip leaves of a package that did not fit takes room until it is deleted.
            kernel.check("import shutil, sysconfig; shutil.rmtree(sysconfig.get_path('purelib') + '/toolarge')")
            kernel.check("open('/tmp/small', 'wb').write(bytes(4 << 20))")
            # The notebook's folder is not limited.
            kernel.check("for n in range(3): open(f'beside-{n}.bin', 'wb').write(bytes(40 << 20))")
            assert kernel.check("print(x)") == "1\n"
            kernel.shutdown()
    env.assert_clean()


def test_the_limit_holds_after_a_restore(make_env: Callable[..., Env]) -> None:
    env = make_env(config={"Policy": {"profiles": {"default": {"disk": "64 MiB"}}}})
    with env.server("server") as server:
        path = "api/agentbox/sandboxes/a"
        server.call("POST", "api/agentbox/sandboxes", {"id": "a"})

        def run(code: str) -> str:
            ran = server.call("POST", f"{path}/code", {"code": code})
            assert ran["status"] == "ok", ran
            return str(ran["stdout"])

        run("import os; open('/tmp/kept', 'wb').write(os.urandom(40 << 20))")
        snapshot = server.call("POST", f"{path}/snapshots", {})["id"]
        run("os.unlink('/tmp/kept')")
        server.call("POST", f"{path}/restore", {"snapshot": snapshot})
        count, name = run(FILL.replace("{0}", "/tmp")).split()
        assert name == "ENOSPC"
        assert 10 <= int(count) <= 26
        run(DELETE + "\nos.unlink('/tmp/kept')")
        assert int(run(FILL.replace("{0}", "/tmp")).split()[0]) >= 50
        server.call("DELETE", path)
    env.assert_clean()
