"""Kernels of other languages in an image: over REST, as kernelspecs, in notebooks, and with their own packages."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import nbformat
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from support import serving
from support.api import Api
from support.harness import BIN, Env, Server, wait_until
from support.images import Built, Mirror

# The first test to want the image may have to build it.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def box(api: Api, built: Built) -> Iterator[str]:
    """A sandbox on the image."""
    info = api.ok("POST", "/sandboxes", {"image": "languages", "tenant": "shared"})
    assert info["image"] == built.image.address
    assert {"python", "bash", "r", "typescript", "javascript"} == {*info["languages"]}
    yield f"/sandboxes/{info['id']}"
    api.ok("DELETE", f"/sandboxes/{info['id']}")


def run(api: Api, box: str, code: str, **options: Any) -> dict[str, Any]:
    result: dict[str, Any] = api.ok("POST", f"{box}/code", {"code": code, "timeout": 60, **options}, timeout=120)
    assert result["status"] == "ok", result
    return result


def test_code_of_each_language_has_a_kernel_that_persists(api: Api, box: str) -> None:
    assert run(api, box, "import sys; x = 1; print(sys.executable)")["stdout"] == "/usr/bin/python3\n"
    for language, first, then, printed in (
        ("bash", "x=41", "echo $((x + 1))", "42"),
        ("R", "x <- 41", "cat(x + 1)", "42"),
        ("typescript", "const x: number = 41;", "console.log(x + 1)", "42"),
        ("javascript", "let y = x + 2", "console.log(y)", "43"),
    ):
        run(api, box, first, language=language)
        assert run(api, box, then, language=language.upper())["stdout"].strip() == printed
    contexts = {item["name"]: item["language"] for item in api.ok("GET", f"{box}/contexts")["contexts"]}
    assert contexts == {"default": "python", "bash": "bash", "r": "r", "deno": "typescript"}
    made = api.ok("POST", f"{box}/contexts", {"name": "second", "language": "bash"})
    assert (made["name"], made["language"]) == ("second", "bash")
    assert run(api, box, "echo [$x]", context="second")["stdout"] == "[]\n"


#: For each language: code that seeds its generator, and code that draws from it.
DRAWS = {
    "R": ("set.seed(1); invisible(runif(1))", "cat(runif(3))"),
    "bash": ("RANDOM=1; : $RANDOM", "echo $RANDOM $RANDOM $RANDOM"),
    "python": ("import random; random.seed(1); _ = random.random()", "print([random.random() for _ in range(3)])"),
}


def test_forks_of_a_kernel_draw_different_random_numbers(api: Api, box: str) -> None:
    for language, (seed, _) in DRAWS.items():
        run(api, box, seed, language=language)
    forks = [f"/sandboxes/{api.ok('POST', f'{box}/fork', {})['id']}" for _ in range(2)]
    try:
        for language, (seed, draw) in DRAWS.items():
            drawn = [run(api, each, draw, language=language)["stdout"] for each in (box, *forks)]
            assert len(set(drawn)) == 3, (language, drawn)
            assert run(api, box, f"{seed}\n{draw}", language=language)["stdout"] == drawn[0], "the seed has no effect"
            # Once seeded, a fork draws the same numbers as the original.
            assert run(api, forks[0], f"{seed}\n{draw}", language=language)["stdout"] == drawn[0]
    finally:
        for each in forks:
            api.ok("DELETE", each)


def test_a_language_that_is_not_there_and_a_context_of_another(api: Api, box: str) -> None:
    error = api.fails(400, "POST", f"{box}/code", {"code": "1", "language": "cobol"})
    assert "available languages: python, bash" in error["message"]
    run(api, box, "1", context="python-only")
    error = api.fails(400, "POST", f"{box}/code", {"code": "1", "language": "r", "context": "python-only"})
    assert "runs python" in error["message"]


def is_busy(api: Api, box: str) -> bool:
    return any(item["state"] == "busy" for item in api.ok("GET", f"{box}/contexts")["contexts"])


def test_an_interrupt_and_an_error_in_each_language(api: Api, box: str) -> None:
    for language, slow, wrong, name in (
        ("R", "Sys.sleep(60)", "stop('no')", "ERROR"),
        ("bash", "sleep 60", "false", ""),
        ("javascript", "for (;;) {}", "throw new Error('no')", "Error"),
    ):
        late = api.ok("POST", f"{box}/code", {"code": slow, "language": language, "timeout": 2}, timeout=120)
        assert late["status"] == "timed_out", late
        wait_until(lambda: not is_busy(api, box), 60, f"the interrupt has ended the code: {late}")
        bad = api.ok("POST", f"{box}/code", {"code": wrong, "language": language}, timeout=120)
        assert bad["status"] == "error"
        assert bad["error"]["ename"] == name
    bad = api.ok("POST", f"{box}/code", {"code": "throw new Error('no')", "language": "typescript"}, timeout=120)
    assert "no" in json.dumps(bad["error"])


def test_the_image_is_all_that_is_seen_and_what_is_written_stays_inside(api: Api, box: str, built: Built) -> None:
    look = "import os; print(os.path.exists({0!r}), os.path.exists({1!r}))"
    assert run(api, box, look.format(str(BIN), "/usr/lib/R"))["stdout"] == "False True\n"
    code = "p = '/usr/lib/os-release'; open(p, 'a').write('theirs'); print(open(p).read().count('theirs'))"
    run(api, box, code)
    assert "theirs" not in (built.store.root(built.image) / "usr/lib/os-release").read_text()


def test_init_scripts_environment_and_services_of_the_image(api: Api, box: str) -> None:
    assert run(
        api, box, "import os; print(os.environ['FROM_THE_IMAGE'], os.path.getsize('/home/user/made/first') > 9)"
    )["stdout"].startswith("yes True")
    code = "import urllib.request as u\nwith u.urlopen('http://127.0.0.1:8765') as answer: print(answer.status)"
    assert run(api, box, code)["stdout"] == "200\n"


def test_files_go_from_r_to_python_in_a_sandbox_without_the_image_and_on_to_deno(api: Api, box: str) -> None:
    run(api, box, "write.csv(data.frame(a = 1:3, b = c('x', 'y', 'z')), 'table.csv', row.names = FALSE)", language="R")
    info = api.ok("POST", "/sandboxes", {"tenant": "shared"})
    assert info["image"] == ""
    other = f"/sandboxes/{info['id']}"
    code = "import csv; rows = list(csv.DictReader(open('table.csv'))); print(len(rows), rows[2]['b'])"
    assert run(api, other, code)["stdout"] == "3 z\n"
    run(api, other, "open('back.txt', 'w').write('from Python')")
    assert run(api, box, "cat(readLines('back.txt', warn = FALSE))", language="R")["stdout"] == "from Python"
    read = "console.log(Deno.readTextFileSync('back.txt').toUpperCase())"
    assert run(api, box, read, language="typescript")["stdout"] == "FROM PYTHON\n"
    api.ok("DELETE", other)


@pytest.mark.network
def test_packages_of_each_language_come_through_the_gate(api: Api, box: str) -> None:
    def install(manager: str, *names: str) -> dict[str, Any]:
        body = {"packages": names, "manager": manager, "timeout": 200}
        return dict(api.ok("POST", f"{box}/packages", body, timeout=240))

    done = install("pip", "six")
    assert done["is_ok"], done
    assert run(api, box, "import six; print(six.__file__)")["stdout"].startswith("/")
    done = install("npm", "left-pad@1.3.0")
    assert done["is_ok"], done
    node = "node -p \"require('left-pad')('x', 3)\""
    assert run(api, box, node, language="bash")["stdout"] == "  x\n"
    # R's own archive is no preset, so it is refused until an administrator allows it.
    done = install("R", "R6")
    assert not done["is_ok"]
    assert done["refused"] or "repository" in done["message"], done


@pytest.mark.network
def test_a_sandbox_is_created_with_packages_of_each_manager(api: Api, mirror: Mirror) -> None:
    make_r_repository(mirror.folder)
    names = ["npm:left-pad@1.3.0", "six", "R:made.here"]
    info = api.ok("POST", "/sandboxes", {"profile": "r", "packages": names}, timeout=300)
    made = f"/sandboxes/{info['id']}"
    assert run(api, made, "import six; print('six' in six.__file__)")["stdout"] == "True\n"
    assert run(api, made, "cat(made.here::where())", language="R")["stdout"] == "on this machine"
    assert run(api, made, "node -p \"require('left-pad')('x', 3)\"", language="bash")["stdout"] == "  x\n"
    api.ok("DELETE", made)
    error = api.fails(409, "POST", "/sandboxes", {"profile": "r", "packages": ["R:notThere"]}, timeout=300)
    assert "not installed: notThere" in error["message"]


R_PACKAGE = {
    "DESCRIPTION": (
        "Package: made.here\nVersion: 1.2\nTitle: Says Where\nDescription: Says where it was made.\n"
        "License: BSD_3_clause\nAuthor: We\nMaintainer: We <we@example.org>\n"
    ),
    "NAMESPACE": "export(where)\n",
    "R/where.R": "where <- function() 'on this machine'\n",
}


def make_r_repository(folder: Path) -> None:
    contrib = folder / "src" / "contrib"
    contrib.mkdir(parents=True, exist_ok=True)
    with tarfile.open(contrib / "made.here_1.2.tar.gz", "w:gz") as tar:
        for name, text in R_PACKAGE.items():
            member = tarfile.TarInfo(f"made.here/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    (contrib / "PACKAGES").write_text("Package: made.here\nVersion: 1.2\n")


def test_a_package_of_r_comes_from_a_mirror_that_policy_allows(api: Api, mirror: Mirror) -> None:
    make_r_repository(mirror.folder)
    info = api.ok("POST", "/sandboxes", {"profile": "r"}, timeout=120)
    other = f"/sandboxes/{info['id']}"
    body = {"packages": ["made.here"], "manager": "R", "timeout": 200}
    done = api.ok("POST", f"{other}/packages", body, timeout=240)
    assert (done["is_ok"], done["message"]) == (True, "Successfully installed made.here"), done
    assert run(api, other, "cat(made.here::where())", language="R")["stdout"] == "on this machine"
    missing = api.ok("POST", f"{other}/packages", {**body, "packages": ["notThere"]}, timeout=240)
    assert (missing["is_ok"], missing["message"]) == (False, "not installed: notThere"), missing
    api.ok("DELETE", other)


def test_an_agent_makes_a_sandbox_of_an_image_and_runs_its_languages(server: Server) -> None:
    async def call(client: Client, name: str, **arguments: object) -> str:
        answer = await client.call_tool(name, arguments)
        text = "".join(block.text for block in answer.content if block.type == "text")
        assert not answer.is_error, text
        return text

    async def work() -> None:
        headers = {"Authorization": f"Bearer {server.token}"}
        async with (
            httpx2.AsyncClient(headers=headers, trust_env=False, timeout=120) as http,
            Client(streamable_http_client(server.url("agentbox/mcp"), http_client=http), mode="legacy") as client,
        ):
            made = await client.call_tool("create_sandbox", {"id": "agents", "image": "languages"})
            assert "r" in made.structured_content["languages"], made
            said = await call(client, "run_code", sandbox="agents", language="R", code="x <- 6 * 7; cat(x)")
            assert said == "42"
            assert await call(client, "run_code", sandbox="agents", context="r", code="cat(x + 1)") == "43"
            assert "42" in await call(client, "run_code", sandbox="agents", code="6 * 7")
            await call(client, "stop_sandbox", sandbox="agents")
            none = await client.call_tool("create_sandbox", {"image": "nothing"})
            assert none.is_error
            assert none.structured_content["field"] == "image"

    asyncio.run(asyncio.wait_for(work(), 240))


def test_what_is_not_there_names_the_image_that_has_it(api: Api) -> None:
    info = api.ok("POST", "/sandboxes", {"env": {"PATH": "/nonexistent"}})
    bare = f"/sandboxes/{info['id']}"
    error = api.fails(400, "POST", f"{bare}/code", {"code": "1", "language": "R"})
    assert 'with image="r"; `jupyter agentbox image build r`' in error["message"]
    for manager, image in (("R", "r"), ("npm", "javascript")):
        done = api.ok("POST", f"{bare}/packages", {"packages": ["jsonlite"], "manager": manager})
        assert f'{manager} is not installed in this sandbox. Create the sandbox with image="{image}"' in done["message"]
    api.ok("DELETE", bare)
    error = api.fails(400, "POST", "/sandboxes", {"packages": ["cran:jsonlite"]})
    assert "prefixes are npm: and R:" in error["message"]


def test_output_for_programs_has_no_colours_unless_they_want_them(api: Api, box: str) -> None:
    for context in ("default", "second-python"):
        assert run(api, box, "import os; print(os.environ['NO_COLOR'])", context=context)["stdout"] == "1\n"
    info = api.ok("POST", "/sandboxes", {"env": {"NO_COLOR": ""}})
    ran = api.ok("POST", f"/sandboxes/{info['id']}/code", {"code": "import os; print([os.environ['NO_COLOR']])"})
    assert ran["stdout"] == "['']\n"
    api.ok("DELETE", f"/sandboxes/{info['id']}")


def test_an_image_may_be_refused_and_must_be_there(api: Api, env: Env) -> None:
    error = api.fails(404, "POST", "/sandboxes", {"image": "nothing"})
    assert "images are: languages" in error["message"]
    error = api.fails(403, "POST", "/sandboxes", {"image": "other", "profile": "own"})
    assert "its own root" in error["message"]


def test_the_kernelspecs_are_shown_with_name_and_language(api: Api, env: Env) -> None:
    specs = api.http.get(api.server.url("api/kernelspecs"), timeout=60).json()["kernelspecs"]
    shown = {name: (spec["spec"]["display_name"], spec["spec"]["language"]) for name, spec in specs.items()}
    assert shown["agentbox-r"] == ("R (sandboxed)", "R")
    assert shown["agentbox-deno"] == ("TypeScript and JavaScript (Deno) (sandboxed)", "typescript")
    assert shown["agentbox-bash"] == ("Bash (sandboxed)", "bash")


NOTEBOOKS = {
    "agentbox-r": (
        ["x <- seq(0, 1, 0.1)", "plot(x, x^2, type = 'l')", "summary(x)", "writeLines('made', 'made-by-r.txt')"],
        "image/png",
    ),
    "agentbox-deno": (
        [
            "const square = (x: number): number => x * x;",
            "const points = [0, 1, 2, 3].map((x) => `${x * 10},${square(x)}`).join(' ');",
            "Deno.jupyter.svg`<svg xmlns='http://www.w3.org/2000/svg'><polyline points='${points}'/></svg>`",
        ],
        "image/svg+xml",
    ),
}


@pytest.mark.parametrize("kernel", NOTEBOOKS)
def test_a_notebook_with_a_plot_runs(env: Env, kernel: str) -> None:
    cells, mime = NOTEBOOKS[kernel]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    book.metadata["kernelspec"] = {"name": kernel, "display_name": kernel}
    folder = env.work / kernel
    folder.mkdir()
    nbformat.write(book, folder / "book.ipynb")
    env.run("jupyter-nbconvert", "--to", "notebook", "--execute", "book.ipynb", "--output", "out.ipynb", cwd=folder)
    done = nbformat.read(folder / "out.ipynb", as_version=4)
    outputs = [output for cell in done.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    (plot,) = [output.data[mime] for output in outputs if mime in output.get("data", {})]
    if mime == "image/png":
        assert base64.b64decode(plot).startswith(b"\x89PNG")
        assert (folder / "made-by-r.txt").read_text() == "made\n", "the notebook's own folder"
    else:
        assert "0,0 10,1 20,4 30,9" in plot


def test_a_script_and_a_notebook_run_on_an_image_from_the_command_line(env: Env) -> None:
    (env.work / "a.R").write_text("cat(commandArgs(TRUE), 6 * 7)")
    (env.work / "a.ts").write_text("const x: number = 42; console.log(x, Deno.args[0])")
    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("x <- 6"), nbformat.v4.new_code_cell("cat(x * 7)")]
    )
    book.metadata["kernelspec"] = {"name": "ir", "display_name": "R", "language": "R"}
    nbformat.write(book, env.work / "r.ipynb")
    for arguments, printed in (
        (("a.R", "x"), "x 42"),
        (("a.ts", "x"), "42 x\n"),
        (("r.ipynb",), "42"),
        (("--language=R", "-c", "cat(43)"), "43"),
    ):
        ran = serving.run(env, "run", "--image=languages", "--offline", *arguments)
        assert (ran.status, ran.out) == (0, printed), ran


def test_nothing_of_the_image_was_changed(built: Built) -> None:
    built.store.verify(built.image)
    assert not list(Path(built.store.directory).glob(".*"))
