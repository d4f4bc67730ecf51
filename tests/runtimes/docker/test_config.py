"""What Docker is asked for, as whole results of pure functions."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_agentbox.errors import InvalidRequest, RuntimeUnavailable
from jupyter_agentbox.runtimes import oci
from jupyter_agentbox.runtimes.docker import config as config
from jupyter_agentbox.runtimes.namespaces import IdMaps
from jupyter_agentbox.spec import MIB, Limits, SandboxSpec

MAPS = IdMaps(((0, 65534, 1), (1000, 501, 1)), ((0, 65533, 1), (1000, 502, 1)), 1000, True, True)
LIMITS = Limits(memory=512 * MIB, cpus=1.5, processes=40, disk=64 * MIB)
SPEC = SandboxSpec(limits=LIMITS, owner="ada", lease_timeout=30.0)


def read(data: bytes) -> dict[str, tuple[bytes, int, int, int, str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {
            item.name: (item.type, item.mode, item.uid, item.gid, item.linkname,
                        file.read() if item.isreg() and (file := tar.extractfile(item)) else b"")
            for item in tar
        }  # fmt: skip


def test_an_image_is_the_folders_links_and_files_of_a_plan_and_never_what_is_bound() -> None:
    steps: list[Any] = [
        ("folder", "root/home/user", 0o700, 1000),
        ("file", "root/etc/hosts", "127.0.0.1 localhost\n"),
        ("link", "root/bin", "usr/bin"),
        ("bind", "root/usr", "/usr", False),
        ("bind", "root/etc/passwd", "/etc/passwd", False),
        ("folder", "root/run/agentbox", 0o700, 0),
        ("folder", "elsewhere", 0o700, 0),
        ("workspace", "root/workspace", "/somewhere", True),
    ]
    data = config.make_image(steps, MAPS)
    folder, made = (tarfile.DIRTYPE, 0o755, 65534, 65533, "", b""), tarfile.REGTYPE
    assert read(data) == {
        "home": folder,
        "home/user": (tarfile.DIRTYPE, 0o700, 501, 502, "", b""),
        "etc": folder,
        "etc/hosts": (made, 0o644, 65534, 65533, "", b"127.0.0.1 localhost\n"),
        "bin": (tarfile.SYMTYPE, 0o777, 65534, 65533, "usr/bin", b""),
        "usr": folder,
        "etc/passwd": (made, 0o755, 65534, 65533, "", b""),
    }
    assert data == config.make_image(steps, MAPS), "the same bytes, or the engine would fill up with images"


def test_mounts_are_read_only_and_private_but_for_the_work_folder_and_the_link() -> None:
    steps: list[Any] = [
        ("bind", "root/usr", "/usr", False),
        ("bind", "root/etc/hosts", "/etc/hosts", False),
        ("workspace", "root/workspace", "/home/ada/work", True),
    ]
    mounts = config.make_mounts(
        steps, [(".", "h"), (".vscode", "r"), (".git", "d"), (".env", "f")], Path("/own"), Path("/state/link")
    )
    assert [mount["Target"] for mount in mounts] == [
        "/etc/resolv.conf", "/etc/hosts", "/etc/hostname", "/usr", "/workspace", "/workspace/.vscode",
        "/workspace/.git", "/workspace/.env",
        "/run/agentbox/link",
    ]  # fmt: skip
    found = {mount["Target"]: mount for mount in mounts}
    assert found["/etc/hosts"]["Source"] == "/etc/hosts", "the last of a place is what is seen"
    assert [target for target, mount in found.items() if not mount["ReadOnly"]] == ["/workspace", "/run/agentbox/link"]
    assert found["/workspace/.git"] == {
        "Type": "tmpfs", "Target": "/workspace/.git", "ReadOnly": True,
        "TmpfsOptions": {"SizeBytes": 4096, "Mode": 0o555},
    }  # fmt: skip
    assert found["/workspace/.env"]["Source"] == "/own/nothing"
    assert found["/workspace/.vscode"]["Source"] == "/home/ada/work/.vscode"
    binds = [mount for mount in mounts if mount["Type"] == "bind"]
    assert all(mount["BindOptions"] == {"Propagation": "rprivate"} for mount in binds)


def test_more_entries_than_can_be_covered_are_refused_and_hidden_folders_are_not_counted() -> None:
    names = [f".{number}" for number in range(config.MAX_COVERS + 1)]

    def make(kind: str) -> int:
        return len(config.make_mounts([], [(name, kind) for name in names], Path("/own"), Path("/link")))

    assert make("d") == len(names) + 4
    for kind in "fr":
        with pytest.raises(InvalidRequest, match="more than 100 hidden files") as caught:
            make(kind)
        assert caught.value.field == "workspace"


def test_layers_lie_over_folders_that_nothing_is_mounted_in(tmp_path: Path) -> None:
    for name in ("lib", "env", "env/inner", "a,b"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    binds = {"/lib": "lib", "/env": "env", "/env/inner": "env/inner", "/a,b": "a,b", "/file": "file", "/etc/x": "lib",
             "/etc/file": "file", "/run/agentbox/guest": "lib"}  # fmt: skip
    steps: list[Any] = [("bind", f"root{place}", str(tmp_path / name), False) for place, name in binds.items()]
    steps.append(("bind", "root/work", str(tmp_path / "lib"), True))
    assert config.find_layers(steps) == ["/lib", "/env/inner"]
    folders, files = config.find_root_layers(steps)
    assert folders == ["/lib", "/env", "/env/inner", "/etc/x"]
    assert files == ["/etc/file", "/etc/resolv.conf", "/etc/hosts", "/etc/hostname"]


@pytest.mark.parametrize(
    ("uid", "more"),
    [(0, ((1, 2_000_000_000, 65534),)), (501, ((1, 2_000_000_000, 65533), (65534, 0, 1)))],
)
def test_root_inside_has_ids_that_nobody_has_outside(uid: int, more: tuple[tuple[int, int, int], ...]) -> None:
    wide = config.widen_maps(replace(MAPS, uids=MAPS.uids[:1], gids=MAPS.gids[:1]), uid)
    assert (wide.uids[1:], wide.gids[1:]) == (more, more)


def test_memory_holds_what_is_written_and_no_more_than_half_of_it() -> None:
    made = config.make_tmpfs(LIMITS, MAPS)
    sizes = {place: dict(item.partition("=")[::2] for item in text.split(","))["size"] for place, text in made.items()}
    disk, half = str(64 * MIB), str(256 * MIB)
    assert sizes == {
        "/tmp": disk, "/var/tmp": disk, "/home/user": disk, "/dev/shm": half, "/run": str(MIB),
        "/run/agentbox": str(MIB), "/sys/fs/cgroup": "4k",
    }  # fmt: skip
    assert all({"nosuid", "nodev"} <= set(text.split(",")) for text in made.values())
    assert {"uid=501", "gid=502"} <= set(made["/home/user"].split(","))
    assert {"mode=700", "uid=65534", "gid=65533"} <= set(made["/run/agentbox"].split(","))
    assert f"size={256 * MIB}" in config.make_tmpfs(replace(LIMITS, disk=4096 * MIB), MAPS)["/tmp"]
    assert config.NEW_ROOT not in made
    assert config.NEW_ROOT in config.make_tmpfs(LIMITS, MAPS, is_root=True)


def test_no_call_sets_a_file_user_id_and_plain_linux_serves_less() -> None:
    isolated, plain = (config.make_seccomp(is_isolated=value) for value in (True, False))
    assert isolated["defaultAction"] == "SCMP_ACT_ALLOW"

    def masked(index: int, bit: int) -> dict[str, Any]:
        return {"index": index, "value": bit, "valueTwo": bit, "op": "SCMP_CMP_MASKED_EQ"}

    rules = [rule for rule in isolated["syscalls"] if rule["names"] == ["openat"]]
    assert rules == [
        {"names": ["openat"], "action": "SCMP_ACT_ERRNO", "args": [masked(3, bit), masked(2, 0o100)]}
        for bit in (0o4000, 0o2000)
    ]  # fmt: skip
    names = {name for rule in isolated["syscalls"] for name in rule["names"]}
    assert {"chmod", "fchmod", "fchmodat", "mknod", "mknodat", "creat", "open", "openat"} <= names
    assert "mount" not in names
    more = plain["syscalls"][len(isolated["syscalls"]) :]
    assert [(rule["names"], rule["args"]) for rule in more] == [(list(config.REFUSED_CALLS), [])]


def run(program: bytes, audit: int, call: int, argument: int = 0) -> int:
    """Interpret a filter as Linux does: what it answers to a call."""
    steps = list(struct.iter_unpack("=HBBI", program))
    at = value = 0
    while True:
        code, yes, no, operand = steps[at]
        at += 1
        if code == 0x20:  # load a word of what the call is
            value = {0: call, 4: audit, 16: argument}[operand]
        elif code in (0x15, 0x45):  # equal, any bit set
            at += yes if (value == operand if code == 0x15 else value & operand) else no
        else:
            assert code == 0x06
            return int(operand)


@pytest.mark.parametrize(
    ("machine", "audit", "unshare", "clone"), [("x86_64", 0xC000003E, 272, 56), ("aarch64", 0xC00000B7, 97, 220)]
)
def test_the_filter_of_plain_linux_lets_nobody_make_a_user_namespace(
    machine: str, audit: int, unshare: int, clone: int
) -> None:
    program = config.make_namespace_filter(machine)
    allow, refused, unknown, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    assert run(program, audit, unshare) == refused
    assert run(program, audit, 435) == unknown
    assert run(program, audit, clone, 0x10000000 | 17) == refused
    assert run(program, audit, clone, 17) == allow
    assert run(program, audit, 1) == allow
    assert run(program, audit ^ 1, 1) == kill
    with pytest.raises(RuntimeUnavailable, match="riscv64"):
        config.make_namespace_filter("riscv64")


def test_labels_tell_whose_it_is() -> None:
    assert config.make_labels("abc", SPEC, "") == {
        "jupyter-agentbox": "sandbox",
        "jupyter-agentbox.sandbox": "abc",
        "jupyter-agentbox.owner": "ada",
        "jupyter-agentbox.lease": "30",
        "jupyter-agentbox.state-dir": "",
    }
    with_image = config.make_labels("abc", replace(SPEC, image="5" * 64), "/state")
    assert with_image["jupyter-agentbox.image"] == "5" * 64
    assert with_image["jupyter-agentbox.state-dir"]


def make(spec: SandboxSpec = SPEC, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"mounts": [], "labels": {"a": "b"}, "layers": ["/usr"], **options}
    return config.make_container(spec, image="image:1", runtime="gvisor", python="/usr/bin/python3", maps=MAPS, **given)


def test_a_container_is_confined_and_limited() -> None:
    made = make(mounts=[{"Target": "/x"}])
    host = made.pop("HostConfig")
    settings = json.loads(made["Cmd"][1])
    assert (made["Image"], made["User"], made["NetworkDisabled"], made["Labels"]) == (
        "image:1",
        "0:0",
        True,
        {"a": "b"},
    )
    assert made["Entrypoint"] == ["/usr/bin/python3", "-I", "-S", "-B", "-c", oci.START.read_text()]
    assert [item.partition("=")[0] for item in made["Env"]] == ["PATH", "AGENTBOX_GUEST"], "nothing of the server's"
    assert host["Runtime"] == "gvisor"
    assert (host["NetworkMode"], host["IpcMode"], host["ReadonlyRootfs"]) == ("none", "none", True)
    assert (host["Memory"], host["MemorySwap"]) == (512 * MIB, 512 * MIB)
    assert host["CpuQuota"] / host["CpuPeriod"] == 1.5
    assert host["PidsLimit"] > 40
    assert (host["CapDrop"], host["CapAdd"]) == (["ALL"], ["SETGID", "SETUID"])
    assert host["SecurityOpt"][0] == "no-new-privileges"
    assert json.loads(host["SecurityOpt"][1].removeprefix("seccomp=")) == config.make_seccomp(is_isolated=True)
    assert (host["MaskedPaths"], host["ReadonlyPaths"]) == (list(oci.MASKED), list(oci.READ_ONLY))
    assert host["Mounts"] == [{"Target": "/x"}]
    assert (host["RestartPolicy"], host["AutoRemove"]) == ({"Name": "no"}, False)
    assert not host.get("Privileged")
    assert settings["uid_map"] == "0 65534 1\n1000 501 1\n"
    assert settings["gid_map"].startswith("0 65533 1\n1000 502 1\n")
    assert len(settings["gid_map"].splitlines()) == 3, "and the groups by which the guest finds what it has started"
    assert settings["capabilities"] == [oci.CAPABILITIES[name] for name in oci.GUEST_CAPABILITIES]
    assert (settings["layers"], settings["layer_size"], settings["new_root"]) == (["/usr"], 64 * MIB, "")


def test_the_least_share_of_a_processor_is_what_docker_takes() -> None:
    assert make(replace(SPEC, limits=replace(LIMITS, cpus=0.001)))["HostConfig"]["CpuQuota"] == 1000


def test_root_inside_has_what_package_managers_need() -> None:
    made = make(replace(SPEC, is_root=True), files=["/etc/passwd"])
    settings = json.loads(made["Cmd"][1])
    assert settings["capabilities"] == [oci.CAPABILITIES[name] for name in oci.ROOT_CAPABILITIES]
    assert (settings["new_root"], settings["files"]) == (config.NEW_ROOT, ["/etc/passwd"])
    assert config.NEW_ROOT in made["HostConfig"]["Tmpfs"]
    assert made["HostConfig"]["CapAdd"] == ["SETGID", "SETUID"], "that is inside of gVisor only"


def test_plain_linux_counts_by_itself_and_has_no_layers() -> None:
    made = make(is_isolated=False, filter_steps=b"\1\2")
    host, settings = made["HostConfig"], json.loads(made["Cmd"][1])
    assert host["PidsLimit"] == 40
    assert host["CapAdd"] == ["SETGID", "SETUID", "SETFCAP"]
    assert (settings["layers"], settings["filter"]) == ([], "0102")
    files = next(item for item in host["Ulimits"] if item["Name"] == "nofile")
    assert files == {"Name": "nofile", "Soft": config.MAX_PLAIN_FILES, "Hard": config.MAX_PLAIN_FILES}
    assert "ptrace" in host["SecurityOpt"][1]
