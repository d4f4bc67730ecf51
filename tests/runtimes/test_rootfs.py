"""What of the host is shown, and which folders may be work folders."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from jupyter_agentbox.errors import InvalidRequest
from jupyter_agentbox.guest import covers
from jupyter_agentbox.names import HIDDEN_FILES, READ_ONLY_FILES, Names
from jupyter_agentbox.runtimes import launcher
from jupyter_agentbox.runtimes.rootfs import Step, check_workspace, compile_guest, make_plan
from jupyter_agentbox.spec import Mount, SandboxSpec


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host of a few files."""
    base = tmp_path / "host"
    for name in ("usr/bin", "usr/lib", "etc/ssl/certs", "etc/ssl/private", "root", "home/me", "var/lib/dpkg", "opt/x"):
        (base / name).mkdir(parents=True)
    for name, mode in (("ld.so.cache", 0o644), ("shadow", 0o640), ("services", 0o600), ("passwd", 0o644)):
        (base / "etc" / name).write_text("x")
        (base / "etc" / name).chmod(mode)
    (base / "bin").symlink_to("usr/bin")
    (base / "lib").mkdir()
    (base / "etc/localtime").symlink_to("/usr/share/zoneinfo/Etc/UTC")
    return base


PATTERNS = (list(HIDDEN_FILES), list(READ_ONLY_FILES))


def plan(host: Path, spec: SandboxSpec, **more: object) -> list[Step]:
    workspace = host.parent / "ws"
    workspace.mkdir(exist_ok=True)
    options = {"guest": Path("/pkg/guest"), "workspace": workspace, "is_private": False, "user": 1000, **more}
    return make_plan(spec, host=host, **options)  # type: ignore[arg-type]


def test_the_view_of_the_host_is_short(host: Path) -> None:
    steps = plan(host, SandboxSpec())
    assert [step[1:] for step in steps if step[0] == "bind"] == [
        ("root/usr", f"{host}/usr", False),
        ("root/lib", f"{host}/lib", False),
        ("root/etc/ld.so.cache", f"{host}/etc/ld.so.cache", False),
        ("root/etc/ssl/certs", f"{host}/etc/ssl/certs", False),
        ("root/run/agentbox/guest", "/pkg/guest", False),
    ]
    links = [step[1:] for step in steps if step[0] == "link"]
    assert links == [("root/bin", "usr/bin"), ("root/etc/localtime", "/usr/share/zoneinfo/Etc/UTC")]
    found = (host.parent / "ws").stat()
    assert steps[-1] == ("workspace", "workspace", f"{host.parent}/ws", found.st_dev, found.st_ino, PATTERNS, True)


def test_what_is_made_up_names_nobody(host: Path) -> None:
    files = {step[1]: step[2] for step in plan(host, SandboxSpec()) if step[0] == "file"}
    assert files["root/etc/resolv.conf"].startswith("nameserver 127.0.0.1\n")
    assert "user:x:1000:1000:user:/home/user:/bin/bash\n" in files["root/etc/passwd"]
    assert files["root/etc/hostname"] == "agentbox\n"
    folders = {step[1]: step[2:] for step in plan(host, SandboxSpec()) if step[0] == "folder"}
    assert folders["root/run/agentbox"] == (0o700, 0)
    assert folders["root/home/user"] == (0o755, 1000)
    assert folders["root/tmp"] == (0o1777, 0)


def test_package_managers_get_their_state_where_user_code_is_root(host: Path) -> None:
    targets = [step[1] for step in plan(host, SandboxSpec(is_root=True), user=0)]
    (host / "etc/passwd").write_text(
        "root:x:0:0::/:/x\n_apt:x:42:65534:me:/n:/no\nme:x:1000:1000:Me:/home/me:/x\nbad\n"
    )
    files = {step[1]: step[2] for step in plan(host, SandboxSpec(is_root=True), user=0) if step[0] == "file"}
    assert "_apt:x:42:65534::/n:/no\n" in files["root/etc/passwd"]
    assert "/home/me" not in files["root/etc/passwd"]
    assert "root/var/lib/dpkg" in targets
    assert "root/etc/shadow" not in targets


def test_an_image_takes_the_hosts_place(host: Path) -> None:
    image = host
    (image / "dev").mkdir()
    steps = plan(Path("/nowhere").parent / host.name, SandboxSpec(root=image), workspace=image)
    targets = {step[1] for step in steps if step[0] in ("bind", "link")}
    assert {"root/usr", "root/opt", "root/root", "root/var", "root/etc/shadow", "root/bin"} <= targets
    assert not targets & {"root/dev", "root/etc", "root/etc/passwd", "root/home"}


def test_environments_keep_their_path_and_are_bound_once(host: Path, tmp_path: Path) -> None:
    env = tmp_path / "env"
    env.mkdir()
    mounts = (Mount(env, str(env)), Mount(env, str(env)), Mount(Path("/usr/lib"), "/usr/lib"))
    steps = plan(Path("/"), SandboxSpec(mounts=mounts), workspace=env, python=Path("/usr"))
    binds = [step[1] for step in steps if step[0] == "bind"]
    assert binds.count(f"root{env}") == 1
    assert binds.count("root/usr") == 1
    assert "root/usr/lib" not in binds


def test_private_work_folders_hide_nothing(host: Path) -> None:
    assert plan(host, SandboxSpec(), is_private=True)[-1][5] == ([], [])


def test_work_folders_are_judged_by_their_real_path(tmp_path: Path) -> None:
    state = tmp_path / "home" / ".local" / "state"
    state.mkdir(parents=True)
    good = tmp_path / "good"
    good.mkdir()
    (tmp_path / "link").symlink_to(good)
    assert check_workspace(tmp_path / "link", (), (state,)) == good
    assert check_workspace(tmp_path / "home", (".*",), (state,)) == tmp_path / "home"
    (tmp_path / "to-etc").symlink_to("/etc")
    (good / "file").touch()
    for folder, hidden in (
        (tmp_path / "home", ()),
        (tmp_path / "home", ("*.key",)),
        (state, (".*",)),
        (tmp_path / "to-etc", (".*",)),
        (tmp_path / "missing", (".*",)),
        (good / "file", (".*",)),
    ):
        with pytest.raises(InvalidRequest) as caught:
            check_workspace(folder, hidden, (state,))
        assert caught.value.field == "workspace"


def find(top: Path, hidden: Sequence[str] = (".*",), read_only: Sequence[str] = ()) -> list[tuple[str, str]]:
    return launcher.find_entries(str(top), Names(hidden, read_only))


def test_read_only_entries_are_found_with_the_folders_that_hold_them(tmp_path: Path) -> None:
    for name in (
        "app/.git/hooks",
        "app/.git/refs",
        ".git/modules/lib/deep/hooks",
        ".git/worktrees/w",
        "node_modules/x/.vscode",
    ):
        (tmp_path / name).mkdir(parents=True)
    for name in ("app/.git/HEAD", "app/.git/config", ".git/modules/lib/deep/HEAD", ".git/worktrees/w/HEAD",
                 ".git/worktrees/w/commondir", "sub/deep/.envrc", "node_modules/x/.env", "tree/.git"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "hooks").mkdir()
    (tmp_path / ".husky").symlink_to("hooks")
    (tmp_path / ".claude").symlink_to("/etc")
    found = find(tmp_path, HIDDEN_FILES, READ_ONLY_FILES)
    by_kind = {kind: [path for path, each in found if each == kind] for kind in "dfrhb"}
    assert by_kind["d"] == []
    assert by_kind["f"] == ["node_modules/x/.env"]
    assert by_kind["r"] == [
        "hooks", "tree/.git", "app/.git/config", "app/.git/hooks", "sub/deep/.envrc", ".git/worktrees/w/commondir",
        ".git/modules/lib/deep/hooks",
    ]  # fmt: skip
    assert by_kind["b"] == [
        *(f"app/.git/{name}" for name in ("commondir", "config.worktree")),
        *(f".git/worktrees/w/{name}" for name in ("config", "config.worktree", "hooks")),
        *(f".git/modules/lib/deep/{name}" for name in ("commondir", "config", "config.worktree")),
    ]
    assert by_kind["h"] == [
        ".git", "app", "sub", "tree", ".git/modules", ".git/worktrees", "app/.git", "sub/deep", ".git/modules/lib",
        ".git/worktrees/w", ".git/modules/lib/deep",
    ]  # fmt: skip
    order = [path for path, _ in found]
    assert all(order.index(path) > order.index(os.path.dirname(path)) for path in by_kind["h"] if "/" in path)


def test_a_large_folder_is_searched_quickly(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / "node_modules" / f"p{number}").mkdir(parents=True)
        for file in range(100):
            os.close(os.open(tmp_path / "node_modules" / f"p{number}" / f"index{file}.js", os.O_CREAT | os.O_WRONLY))
    began = time.monotonic()
    assert find(tmp_path, HIDDEN_FILES, READ_ONLY_FILES) == []
    assert time.monotonic() - began < 1.0, "5,000 entries; 100,000 take a fraction of the 10 s that a search may take"


def test_the_search_for_hidden_entries_is_complete(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(200):
        (deep / ".env").touch()
        (deep / ".git").mkdir()
        (deep / ".git" / ".inner").touch()  # covered with its folder
        deep = deep / "d"
        deep.mkdir()
    (tmp_path / "outside").symlink_to("/etc")
    (tmp_path / ".link").symlink_to("/etc")
    for number in range(6000):
        (tmp_path / f"f{number}").touch()
    found = find(tmp_path)
    assert len(found) == 401
    assert (".link", "f") in found
    assert ("d/" * 199 + ".env", "f") in found
    assert ("d/" * 199 + ".git", "d") in found


def test_a_search_that_is_not_completed_refuses_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "many").mkdir()
    for number in range(300):
        (tmp_path / "many" / f".{number}").touch()
    cases: list[tuple[str, float, str]] = [
        ("MAX_COVERS", 299, r"300 were found, 300 of them in 'many'"),
        ("MAX_COVER_BYTES", 1000, r"too many hidden and read-only entries"),
        ("MAX_COVER_PATH", 8, r"is too long"),
        ("SEARCH_TIME", -1.0, r"saw 256 entries .* was at 'many/'"),
    ]
    for name, value, words in cases:
        with monkeypatch.context() as patch:
            patch.setattr(launcher, name, value)
            with pytest.raises(launcher.Refused, match=words) as caught:
                find(tmp_path)
        assert str(caught.value).startswith(f"Cannot use the work folder {tmp_path}: ")
        assert "hidden_files and read_only_files of the profile" in str(caught.value)


def test_folders_that_are_nested_deeper_than_can_be_searched_refuse_the_folder(tmp_path: Path) -> None:
    top = os.open(tmp_path, os.O_RDONLY)
    here = top
    for _ in range(2200):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.mkdir(".git", dir_fd=here)
    os.close(here)
    with pytest.raises(launcher.Refused, match=r"too long|cannot search"):
        find(tmp_path)
    subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True, timeout=60)


def test_a_folder_that_cannot_be_listed_is_covered_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / ".env").touch()
    real = os.open

    def refuse(path: object, *args: object, **kwargs: object) -> int:  # root, as tests may be, opens everything
        if path == "theirs":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(launcher.os, "open", refuse)
    assert find(tmp_path) == [("theirs", "d")]


def test_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.close(launcher.open_without_links(str(tmp_path / "real")))
    with pytest.raises(OSError, match="symbolic"):
        launcher.open_without_links(str(tmp_path / "link"))


def test_names_of_any_bytes_reach_the_program_that_covers() -> None:
    names = ("plain", 'qu"o\\te', "new\nline", "umlaut \u00e4", os.fsdecode(b"\xff\xfe"))
    data = b"".join(b"f" + os.fsencode(name) + b"\0" for name in names) + b"dfolder/.git\0"
    assert covers.parse(data) == [*((name, "f") for name in names), ("folder/.git", "d")]
    assert covers.pack(covers.parse(data)) == data


def test_a_plan_is_marshallable(host: Path) -> None:
    import marshal

    steps = plan(host, replace(SandboxSpec(), is_root=True))
    assert marshal.loads(marshal.dumps(steps)) == steps


def test_the_guest_is_compiled_once_where_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "pid1.py").write_text("x = 1\n")
    compile_guest.cache_clear()
    compile_guest(tmp_path)
    (made,) = (tmp_path / "__pycache__").iterdir()
    before = made.stat().st_mtime_ns
    compile_guest.cache_clear()  # as another process
    compile_guest(tmp_path)
    assert made.stat().st_mtime_ns == before
