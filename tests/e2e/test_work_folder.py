"""What code makes in a notebook's folder goes on working. Secrets, and what runs on the host, stay as they were."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from support.environments import make_wheel
from support.harness import CANARY, Env, KernelClient, Server
from support.parking import park

from jupyter_agentbox.guest.covers import NOTE

pytestmark = pytest.mark.timeout(600)

GIT = "git -c user.name=me -c user.email=me@host.example"
RUN = """
import json
import subprocess
import sys
def run(line):
    done = subprocess.run(line, shell=True, stdout=-1, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, end="")
"""
MAKE = f"""
run('''{GIT} init -q --bare origin.git && git clone -q origin.git r 2>/dev/null && cd r && touch one && git add one &&
    {GIT} commit -qm one && git push -q origin HEAD''')
run('''mkdir -p node_modules/.bin target/debug/.fingerprint p/.venv/bin
    printf '#!/bin/sh\\necho hi\\n' > node_modules/.bin/hi; chmod +x node_modules/.bin/hi''')
open('test_x.py', 'w').write('def test(): pass\\n')
open('.coverage', 'w').write('1')
open('p/.venv/pyvenv.cfg', 'w').write('home = /usr/bin\\n')
"""
USE = f"""
run("node_modules/.bin/hi; cat p/.venv/pyvenv.cfg .coverage; echo 2 > .coverage; touch target/debug/.fingerprint/x")
run("git -C r status -s -b | head -1 | cut -c1-5; cd r && echo more >> one && {GIT} commit -qam more")
run("cd r && git pull -q --rebase && git push -q origin HEAD && git log -1 --format=%s && git gc -q && git branch b")
run("mkdir -p .pytest_cache/v && echo x > .pytest_cache/v/x && rm -r .pytest_cache && mv p q && mv q p && echo done")
"""
USED = "hi\nhome = /usr/bin\n1## ma\nmore\ndone\n"


@pytest.fixture(scope="module")
def server(make_env: Callable[..., Env]) -> Iterator[Server]:
    """A server of an ordinary user."""
    env = make_env()
    with env.server("server") as server:
        yield server


def open_notebook(server: Server, name: str) -> KernelClient:
    (server.env.work / name).mkdir(exist_ok=True)
    return server.notebook(f"{name}/book.ipynb")


@pytest.mark.parametrize("how", ["restarted", "parked", "forked", "restarted and parked"])
def test_what_code_inside_made_goes_on_working(server: Server, how: str) -> None:
    kernel = open_notebook(server, how)
    assert kernel.check(RUN + MAKE) == ""
    if how.startswith("restarted"):
        kernel.restart()
        kernel.check(RUN)
    if how.endswith("parked"):
        park(kernel)
    elif how == "forked":
        fork = server.call("POST", f"api/agentbox/sandboxes/{kernel.id}/fork", {"as_kernel": True})
        kernel = KernelClient(server, fork["kernels"][0]["id"])
    assert kernel.check(USE).replace("## HE", "## ma") == USED
    folder = server.env.work / how
    assert (folder / ".coverage").read_text() == "2\n"
    subprocess.run(["git", "-C", folder / "r", "fsck"], check=True, timeout=60, capture_output=True)
    assert not (folder / "r" / ".git" / "commondir").exists()
    if not how.startswith("restarted"):
        return
    # From the second start on, what Git runs on the host cannot be changed, also in a repository that code inside made.
    said = kernel.check("run('cd r; git config core.fsmonitor evil; echo evil > .git/hooks/pre-commit; mv .git git')")
    assert said.count("busy") + said.count("Read-only") == 3, said


def test_errors_about_hidden_and_read_only_files_say_so_once(server: Server) -> None:
    folder = server.env.work / "covered"
    (folder / ".ssh").mkdir(parents=True)
    (folder / ".ssh" / "id_rsa").write_text(CANARY)
    (folder / ".env").write_text(f"TOKEN={CANARY}")
    (folder / ".envrc").write_text("layout python")
    kernel = open_notebook(server, "covered")
    read = kernel.execute("open('.ssh/id_rsa')")
    assert read.error == "FileNotFoundError"
    assert read.notices == (
        "agentbox: `.ssh` is hidden in sandboxes (Policy.hidden_files). To pass a value on, set it as a variable where"
        ' you start Jupyter, and add c.Policy.env_passthrough = ["NAME"] to'
        f" {server.env.config_dir / 'jupyter_agentbox_config.py'}.\n"
    )
    assert kernel.execute("open('.ssh/id_rsa')").notices == ""
    write = kernel.execute("open('/workspace/.envrc', 'w')")
    assert write.error == "OSError"
    assert "`.envrc` is read-only in sandboxes (Policy.read_only_files)" in write.notices
    assert kernel.check("!cat .env; cat .envrc") == NOTE.replace("\n", "\r\n") + "layout python"
    assert kernel.execute("open('none')").notices == ""
    assert (folder / ".envrc").read_text() == "layout python"
    assert CANARY not in kernel.check("import subprocess; print(subprocess.getoutput('grep -r . . .ssh'))")
    kernel.shutdown()


def test_what_runs_on_the_host_cannot_be_changed(server: Server) -> None:
    """Git on the host runs nothing that code inside has made, whichever way it was made."""
    folder = server.env.work / "repository"
    folder.mkdir()
    git = ["git", "-C", str(folder), "-c", "user.name=me", "-c", "user.email=me@host.example"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    (folder / ".git" / "hooks" / "pre-commit.sample").unlink()
    kernel = open_notebook(server, "repository")
    kernel.restart()
    ran = folder / "ran"
    kernel.check(f"""
import os, shutil, subprocess
evil = "#!/bin/sh\\ntouch {ran}\\n"
os.makedirs("evil/hooks")
for name in ("pre-commit", "post-commit"):
    open(f"evil/hooks/{{name}}", "w").write(evil)
    os.chmod(f"evil/hooks/{{name}}", 0o755)
open("evil/config", "w").write("[core]\\n\\tfsmonitor = touch {ran}\\n\\thooksPath = evil/hooks\\n")
for line in (
    "cp evil/hooks/* .git/hooks/", "cp evil/config .git/config", "mv evil/config .git/config", "rm -rf .git/hooks",
    "ln -s ../evil/hooks .git/hooks", "echo ../evil > .git/commondir", "mv .git old", "rm -rf .git/config",
    "git config core.fsmonitor evil", "ln -sf evil/config .git/config.worktree", "cp -r evil/hooks h; mv h .git/hooks",
    "unshare -Urm sh -c 'umount -l .git/hooks; mount -o remount,rw .git/hooks; cp evil/hooks/* .git/hooks/'",
):
    subprocess.run(line, shell=True, capture_output=True)
open("made", "w").close()
""")
    kernel.shutdown()
    for command in (["status"], ["add", "made"], ["commit", "-q", "-m", "second"], ["gc", "-q"]):
        subprocess.run([*git, *command], check=True, timeout=60, stdout=subprocess.DEVNULL)
    assert not ran.exists()
    assert (folder / "made").exists()


def test_a_projects_environment_is_the_kernels_python(make_env: Callable[..., Env]) -> None:
    """By a request, a profile or its path, and without an ipykernel of its own. Nothing of it runs on the host."""
    env = make_env(config={"Policy": {"profiles": {"project": {"python": ".venv"}}}})
    folder = env.work / "project"
    folder.mkdir()
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", folder / ".venv"], check=True, timeout=120)
    packages = next((folder / ".venv" / "lib").iterdir()) / "site-packages"
    (packages / "mine.py").write_text("answer = 42\n")
    # What a hostile environment would run on the host, if anything did.
    (packages / "sitecustomize.py").write_text(
        f"import os\nif os.path.isdir({str(env.home)!r}): open({str(env.base / 'ran')!r}, 'w').close()\n"
    )
    before = set((folder / ".venv").rglob("*"))
    for name, argv, request in (
        ("by-request", "python", {"python": ".venv"}),
        ("by-profile", "python", {"profile": "project"}),
        ("by-path", str(folder / ".venv" / "bin" / "python"), {}),
    ):
        spec = env.data / "kernels" / name
        spec.mkdir(parents=True)
        (spec / "kernel.json").write_text(
            json.dumps(
                {
                    "argv": [argv, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
                    "display_name": name,
                    "language": "python",
                    "metadata": {"kernel_provisioner": {"provisioner_name": "agentbox-provisioner", "config": request}},
                }
            )
        )
    with env.server("server") as server:
        for name in ("by-request", "by-profile", "by-path"):
            kernel = server.notebook("project/book.ipynb", name)
            assert kernel.check("import sys, mine; print(sys.prefix, mine.answer)") == "/workspace/.venv 42\n"
            seen = "import subprocess; print(subprocess.getoutput('python -c \"import sys, mine; print(sys.prefix)\"'))"
            assert kernel.check(seen) == "/workspace/.venv\n"
            missing = kernel.execute("import jupyter_server")
            assert missing.error == "ModuleNotFoundError", "only what ipykernel needs comes from the server"
            kernel.restart()
            assert kernel.check("import mine; print(mine.answer)") == "42\n"
            kernel.shutdown()
        added = {path for path in (folder / ".venv").rglob("*") if "__pycache__" not in path.parts} - before
        assert not added, "the guest writes nothing into the user's own environment"
        # It has no pip, as those that uv makes. What is installed goes into it, as outside.
        wheels = [make_wheel(folder, name) for name in ("byhand", "bymagic")]
        kernel = server.notebook("project/book.ipynb", "by-request")
        kernel.check(f"!pip install -q --no-index ./{wheels[0]}")
        kernel.check(f"%pip install -q --no-index ./{wheels[1]}")
        assert kernel.check("import byhand, bymagic; print(bymagic.__path__[0])").startswith("/workspace/.venv/lib/")
        kernel.restart()
        kernel.check("import byhand, bymagic")
        kernel.shutdown()
        names = {path.name for path in packages.iterdir()}
        assert {"byhand", "bymagic"} <= names
        assert not [name for name in names if name.startswith("pip")]
        (folder / ".venv" / "pyvenv.cfg").write_text(f"home = {env.home}\n")
        answer = server.http.post(
            server.url("api/sessions"),
            json={"path": "project/b.ipynb", "name": "b", "type": "notebook", "kernel": {"name": "by-request"}},
            timeout=150,
        )
        assert not answer.ok
        assert "which sandboxes cannot see" in answer.text
    assert not (env.base / "ran").exists()
