"""Build images from the distribution's packages, without Docker, a registry, or (given user namespaces) root.

``mmdebstrap`` builds the tree from the package sources that are configured for this machine's ``apt``, in its own
namespace. :mod:`.customize` adds everything that is not a package of the distribution. Downloads are cached, so that
several images share them.
"""

from __future__ import annotations

import fnmatch
import os
import platform
import re
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from jupyter_agentbox.errors import InvalidRequest, RuntimeFailed, RuntimeUnavailable

from . import customize, tree
from .commands import OnProgress, find_program, make_environment, piped
from .kernelspecs import add_kernels
from .store import ImageStore, describe
from .values import Image, Recipe

#: Vendors whose packages are used. The machine may have other sources, whose packages do not suit a bare system.
_VENDORS = ("Debian", "Ubuntu")
#: Folders that are not unpacked, because no one reads them in a sandbox.
_LEFT_OUT = ("man", "doc", "info", "locale", "lintian", "linda", "gnome", "help")
#: Settings of the program that installed the packages, by folder. They do not belong to the system.
_SETTINGS = {
    "etc": ("mtab",),
    "etc/dpkg/dpkg.cfg.d": ("99mmdebstrap",),
    "etc/apt/apt.conf.d": ("99mmdebstrap",),
    "etc/apt": ("sources.list",),
    "etc/apt/sources.list.d": ("debian.sources", "ubuntu.sources", "0000sources.list"),
}
#: What apt prints about a package or a version that its sources do not have.
_NOT_FOUND = re.compile(
    r"E: (?:Unable to locate package (?P<package>\S+)|Package '(?P<empty>[^']+)' has no installation candidate"
    r"|Version '(?P<version>[^']+)' for '(?P<of>[^']+)' was not found)"
)
_APT_SETTINGS = 'Acquire::Languages "none";\nAPT::Install-Recommends "false";\n'
#: Seconds that each part of a build may take.
TIMEOUT = 3600.0
_APT_TIMEOUT = 300.0


def default_cache() -> Path:
    """Return the directory for downloads: ``agentbox/images`` in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "agentbox", "images")


def build(
    store: ImageStore,
    recipe: Recipe,
    on_progress: OnProgress,
    *,
    pip_environment: Mapping[str, str],
    cache: Path | None = None,
    timeout: float = TIMEOUT,
) -> Image:
    """Build an image and store it.

    Parameters
    ----------
    store : ImageStore
    recipe : Recipe
    on_progress : callable
        Called with each line of progress.
    pip_environment : mapping of str to str
        Variables that select pip's package index; see :func:`jupyter_agentbox.egress.presets.pip_environment`.
    cache : Path, optional
        Directory for downloads.
    timeout : float
        Seconds for each part.

    Raises
    ------
    RuntimeUnavailable
        A required program is missing; the message says how to get it.
    RuntimeFailed
        A part failed or timed out. Nothing is left.
    InvalidRequest
        The distribution does not have a package of the recipe.
    """
    program = find_program("mmdebstrap", "apt-get install mmdebstrap")
    release = find_release()
    cache = cache or default_cache()
    archives = cache / f"{release}-{platform.machine()}"
    archives.mkdir(mode=0o755, parents=True, exist_ok=True)
    with store.staging() as folder, tempfile.TemporaryDirectory(prefix="agentbox-image-") as scratch:
        os.chmod(scratch, 0o755)  # for ordinary users, mmdebstrap works under another id
        sources = Path(scratch, "sources.list")
        sources.write_text("".join(f"{line}\n" for line in find_sources(release)))
        on_progress(f"{recipe.name}: {len(recipe.debian)} packages of {release}, and their dependencies")
        root = folder / "rootfs"
        root.mkdir()
        unpacker = tree.Unpacker(root)
        command = make_command(program, recipe, release, sources, archives)
        not_found: list[str] = []

        def on_line(line: str) -> None:
            not_found.extend(_find_missing(line))
            _pass_on(line, on_progress)

        try:
            with piped(command, on_line, timeout=timeout, what="mmdebstrap") as (archive, _):
                unpacker.add(archive)
                archive.read()  # data after the end of the archive
        except RuntimeFailed:
            if not not_found:
                raise
            raise InvalidRequest(
                f"Cannot build image {recipe.name}: the package sources of {release} on this machine have no "
                f"{' and no '.join(dict.fromkeys(not_found))}. Correct `debian` in the recipe; `apt-cache search` and "
                "`apt-cache policy` list names and versions",
                field="debian",
            ) from None
        unpacker.finish()
        settle(root, release)
        packages = read_packages(root)
        customize.customize(root, recipe, on_progress, pip_environment=pip_environment, cache=cache, timeout=timeout)
        on_progress("hashing")
        image = store.add(folder, add_kernels(recipe, root), origin=describe(recipe), packages=packages)
    on_progress(f"image {image.short}")
    return image


def make_command(program: str, recipe: Recipe, release: str, sources: Path, archives: Path) -> list[str]:
    """Return the command that writes the tree to its standard output."""
    keep = "/var/cache/apt/archives"
    return [
        program,
        f"--mode={'root' if os.geteuid() == 0 else 'unshare'}",
        "--variant=minbase",
        "--format=tar",
        "--skip=download/empty",
        "--skip=essential/unlink",
        f'--setup-hook=mkdir -p "$1"{keep}/',
        f"--setup-hook=sync-in {archives} {keep}",
        f"--customize-hook=sync-out {keep} {archives}",
        '--aptopt=Acquire::Languages "none"',
        '--aptopt=APT::Install-Recommends "false"',
        '--aptopt=Acquire::Retries "3"',
        # Folders are unpacked, because packages such as those of Java fail without the one for their links.
        *(f"--dpkgopt=path-exclude=/usr/share/{name}/*/*" for name in _LEFT_OUT),
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        "--dpkgopt=force-unsafe-io",
        *((f"--include={','.join(recipe.debian)}",) if recipe.debian else ()),
        release,
        "-",
        str(sources),
    ]


def _pass_on(line: str, on_progress: OnProgress) -> None:
    """Report steps and errors, but not what each package prints during its setup."""
    if re.match(r"[IWE]: |dpkg: error|[\w-]+: error: ", line) and "hook" not in line and "skipping" not in line:
        on_progress(line[3:] if line.startswith("I: ") else line)


def _find_missing(line: str) -> list[str]:
    found = _NOT_FOUND.match(line)
    if found is None:
        return []
    name = found["package"] or found["empty"]
    return [f"package {name}" if name else f"version {found['version']} of package {found['of']}"]


def find_release() -> str:
    """Return the code name of this machine's release of Debian or Ubuntu. Raises RuntimeUnavailable."""
    try:
        found = platform.freedesktop_os_release()
    except OSError:
        found = {}
    if "debian" not in (found.get("ID", ""), *found.get("ID_LIKE", "").split()) or "VERSION_CODENAME" not in found:
        raise RuntimeUnavailable(
            "Cannot build from a recipe: its packages are Debian's or Ubuntu's, and this machine runs neither. Build "
            "from a Dockerfile, or import an image that was built elsewhere"
        )
    return found["VERSION_CODENAME"]


def find_sources(release: str) -> list[str]:
    """Return the machine's own package sources for its release, as lines of ``sources.list``.

    Raises
    ------
    RuntimeUnavailable
        There are none, or ``apt-get update`` has never run.
    """
    format = "$(ORIGIN)|$(CODENAME)|deb $(REPO_URI) $(RELEASE) $(COMPONENT)"
    command = [find_program("apt-get", "it comes with Debian"), "indextargets", "--format", format]
    try:
        answer = subprocess.run(
            [*command, "Created-By: Packages"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_APT_TIMEOUT,
            env=make_environment(),
        )
    except subprocess.TimeoutExpired:
        raise RuntimeFailed(f"apt-get did not list its package sources within {_APT_TIMEOUT:g} s") from None
    rows = [line.split("|", 2) for line in answer.stdout.splitlines() if line.count("|") >= 2]
    found = {
        line
        for origin, name, line in rows
        if origin in _VENDORS and (name == release or name.startswith(f"{release}-"))
    }
    if not found:
        raise RuntimeUnavailable(f"apt has no package lists for {release}: run `apt-get update`")
    return sorted(found)


def settle(root: Path, release: str) -> None:
    """Remove what mmdebstrap and packages leave but sandboxes do not need, and write apt's settings.

    Parameters
    ----------
    root : Path
    release : str
        Code name of this machine's release, whose package sources the tree gets.
    """
    for name in _LEFT_OUT:
        if tree.is_inner_folder(root, root / "usr/share" / name):
            _leave_out(root / "usr/share" / name)
    for folder, patterns in _SETTINGS.items():
        place = root / folder
        if tree.is_inner_folder(root, place):
            for path in sorted(place.iterdir()):
                if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in patterns):
                    customize.remove(path)
    if tree.is_inner_folder(root, root / "etc/apt"):
        customize.write_file(root, "/etc/apt/apt.conf.d/99agentbox", _APT_SETTINGS)
        customize.write_file(root, "/etc/apt/sources.list", "".join(f"{line}\n" for line in find_sources(release)))


def _leave_out(folder: Path) -> None:
    """Remove everything except copyright files, and then the empty folders."""
    for path, info in reversed(list(tree.walk(folder))):
        if not stat.S_ISDIR(info.st_mode):
            if path.name != "copyright" or folder.name != "doc":
                path.unlink()
        elif not os.listdir(path):
            path.rmdir()


def read_packages(root: Path) -> dict[str, str]:
    """Return the names and versions of the distribution's packages in a tree."""
    status = tree.find_inside(root, "/var/lib/dpkg/status")
    if status is None:
        return {}
    found = {}
    for paragraph in status.read_text(errors="replace").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " ")
        if fields.get("Status", "").endswith(" installed"):
            found[fields.get("Package", "")] = fields.get("Version", "")
    return found


__all__ = ["TIMEOUT", "build", "default_cache", "find_release", "find_sources", "read_packages", "settle"]
