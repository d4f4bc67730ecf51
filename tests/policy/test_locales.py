"""The locales of a root, by its files."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from jupyter_agentbox.policy.environment import kernel_environment
from jupyter_agentbox.policy.locales import has_locale
from jupyter_agentbox.spec import Limits


def archive(*names: str) -> bytes:
    text = b"".join(name.encode() + b"\0" for name in names)
    return struct.pack("<7I", 0xDE020109, 0, 0, 0, 0, 100, len(text)).ljust(100, b"x") + text


def test_locales_are_found_in_directories_and_in_the_archive(tmp_path: Path) -> None:
    assert has_locale("C.UTF-8", tmp_path)
    assert not has_locale("de_DE.UTF-8", tmp_path)
    folder = tmp_path / "usr/lib/locale"
    (folder / "de_DE.utf8").mkdir(parents=True)
    assert has_locale("de_DE.UTF-8", tmp_path)
    assert not has_locale("de_DE", tmp_path)
    (folder / "locale-archive").write_bytes(archive("fr_FR.utf8", "ca_ES.utf8@valencia"))
    assert has_locale("fr_FR.UTF-8", tmp_path)
    assert has_locale("ca_ES.UTF-8@valencia", tmp_path)
    assert not has_locale("it_IT.UTF-8", tmp_path)


def test_a_hostile_archive_is_no_archive(tmp_path: Path) -> None:
    folder = tmp_path / "usr/lib/locale"
    folder.mkdir(parents=True)
    for content in (b"", b"x" * 5, struct.pack("<7I", 0xDE020109, 0, 0, 0, 0, 2**32 - 1, 2**32 - 1), b"\0" * 100):
        (folder / "locale-archive").write_bytes(content)
        assert not has_locale("de_DE.UTF-8", tmp_path)
    (folder / "locale-archive").unlink()
    os.mkfifo(folder / "locale-archive")
    assert not has_locale("de_DE.UTF-8", tmp_path)


def test_a_locale_that_is_not_there_becomes_a_plain_one() -> None:
    host = {"LANG": "de_DE.UTF-8", "LC_ALL": "en_US.UTF-8", "LC_TIME": "", "LANGUAGE": "de:en", "TZ": "Europe/Berlin"}
    env = kernel_environment(host, limits=Limits(), has_locale=lambda name: name.startswith("en"))
    assert {name: env[name] for name in host} == {**host, "LANG": "C.UTF-8"}
