"""Add to a tree what is not a package of the distribution: packages of pip and npm, files, links, bytecode.

Programs of the tree run in their own namespaces, under an id without rights outside the tree. Only wheels are taken
from pip, and scripts of npm packages do not run, so no code of these packages runs while an image is built.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from jupyter_agentbox.errors import InvalidRequest, RuntimeFailed
from jupyter_agentbox.linux import remove_tree

from . import tree
from .chroot_exec import SHARED
from .commands import OnProgress, find_program, make_environment, run
from .values import Recipe

_ENTER = Path(__file__).with_name("chroot_exec.py")
_PYTHON = "/usr/bin/python3"


def customize(
    root: Path,
    recipe: Recipe,
    on_progress: OnProgress,
    *,
    pip_environment: Mapping[str, str],
    cache: Path,
    timeout: float,
) -> None:
    """Add to a tree everything in a recipe except the distribution's packages.

    Raises
    ------
    RuntimeUnavailable
        A required program is missing.
    RuntimeFailed
        A part failed or timed out.
    InvalidRequest
        A file or link of the recipe cannot be created.
    """
    if recipe.pip:
        _install_pip(root, recipe.pip, on_progress, pip_environment, cache / "pip", timeout)
    if recipe.npm:
        _install_npm(root, recipe.npm, on_progress, cache / "npm", timeout)
    for name, text in recipe.files.items():
        write_file(root, name, text)
    for name, target in recipe.links.items():
        make_link(root, name, target)
    if recipe.pip or any(package.split("=")[0] == "python3" for package in recipe.debian):
        _compile(root, on_progress, cache, timeout)


def _install_pip(
    root: Path,
    pins: Sequence[str],
    on_progress: OnProgress,
    pip_environment: Mapping[str, str],
    cache: Path,
    timeout: float,
) -> None:
    on_progress(f"pip: {', '.join(pins)}")
    # The tree's Python belongs to the image, and the distribution's tools do not upgrade it.
    for path in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        if tree.is_inner_folder(root, path.parent):
            path.unlink()
    shared = cache / "lent"
    (shared / "cache").mkdir(parents=True, exist_ok=True)
    env = {
        "HOME": SHARED,
        "PIP_CACHE_DIR": f"{SHARED}/cache",
        "PIP_ROOT_USER_ACTION": "ignore",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        **pip_environment,
        "PIP_RETRIES": "5",
    }
    env.update((name, value) for name, value in make_environment().items() if name.lower().endswith("_proxy"))
    bundle = next((path for path in _bundles() if os.path.isfile(path)), None)
    if bundle is not None:
        shutil.copyfile(bundle, shared / "certificates.pem")
        env["PIP_CERT"] = f"{SHARED}/certificates.pem"
    for name in ("/etc/resolv.conf", "/etc/hosts"):
        write_file(root, name, Path(name).read_text())
    command = [
        _PYTHON,
        "-m",
        "pip",
        "install",
        "--no-input",
        "--no-compile",
        "--only-binary=:all:",
        "--no-warn-conflicts",
    ]
    enter(root, [*command, "--progress-bar=off", *pins], lambda line: _pass_on(line, on_progress), shared=shared,
          env=env, timeout=timeout, has_network=True)  # fmt: skip


def _pass_on(line: str, on_progress: OnProgress) -> None:
    if line.startswith(("Downloading ", "Successfully installed ", "ERROR", "error")):
        on_progress(re.sub(r"https?://\S+/", "", line)[:300])


def _bundles() -> list[str]:
    names = ("PIP_CERT", "SSL_CERT_FILE")
    return [*(os.environ[name] for name in names if os.environ.get(name)), "/etc/ssl/certs/ca-certificates.crt",
            "/etc/pki/tls/certs/ca-bundle.crt"]  # fmt: skip


def _install_npm(root: Path, pins: Sequence[str], on_progress: OnProgress, cache: Path, timeout: float) -> None:
    """Install in a folder beside the tree, because npm would follow the tree's own links, and move the result in."""
    on_progress(f"npm: {', '.join(pins)}")
    npm = find_program("npm", "apt-get install npm")
    npm_root = root.with_name("npm")
    command = [
        npm,
        "install",
        "--global",
        f"--prefix={npm_root}",
        f"--cache={cache}",
        "--ignore-scripts",
        "--install-links",
    ]
    options = ["--install-links", "--no-audit", "--no-fund", "--no-progress", "--no-update-notifier"]
    run([*command, *options, "--", *pins], on_progress, timeout=timeout, what="npm")
    for path in (npm_root / "lib/node_modules").rglob(".package-lock.json"):
        path.unlink()  # records where each package came from
    found = [path for path in sorted((npm_root / "lib/node_modules").iterdir()) if not path.name.startswith(".")]
    for path in (*found, *sorted((npm_root / "bin").iterdir())):
        place = _place(root, f"/usr/local/{path.relative_to(npm_root)}")
        remove(place)
        path.rename(place)
    remove(npm_root)


def _compile(root: Path, on_progress: OnProgress, cache: Path, timeout: float) -> None:
    """Compile all Python modules, identically in every build, so that sandboxes do not compile them at each start."""
    on_progress("compiling Python modules")
    for folder in ("usr/lib", "usr/local/lib", "usr/share"):
        for path, info in list(tree.walk(root / folder)) if tree.is_inner_folder(root, root / folder) else ():
            if stat.S_ISDIR(info.st_mode) and path.name == "__pycache__":
                remove(path)
    shared = cache / "empty"
    shared.mkdir(parents=True, exist_ok=True)
    folders = sorted(str(PurePosixPath("/", path.relative_to(root))) for path in root.glob("usr/lib/python3*"))
    folders += sorted(str(PurePosixPath("/", path.relative_to(root))) for path in root.glob("usr/local/lib/python3*"))
    # Some packages contain templates or modules for another Python. These stay uncompiled.
    code = (
        "import compileall, py_compile, sys\n"
        "for folder in sys.argv[1:]:\n"
        "    compileall.compile_dir(folder, quiet=2, maxlevels=50, force=True,\n"
        "        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)\n"
    )
    env = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    enter(
        root,
        [_PYTHON, "-I", "-W", "ignore", "-c", code, *folders],
        on_progress,
        shared=shared,
        env=env,
        timeout=timeout,
    )


def enter(
    root: Path,
    command: Sequence[str],
    on_progress: OnProgress,
    *,
    shared: Path,
    env: Mapping[str, str],
    timeout: float,
    has_network: bool = False,
) -> None:
    """Run a program of a tree inside the tree. Raises RuntimeFailed."""
    for name in ("dev", "proc", "tmp"):
        remove(root / name)
        (root / name).mkdir()
    unshare = find_program("unshare", "apt-get install util-linux")
    kinds = ["--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts"]
    inner = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8", **env}
    run(
        [unshare, *kinds, *(() if has_network else ("--net",)), sys.executable, "-I", "-S", "-B", str(_ENTER),
         str(root), str(shared), *command],
        on_progress,
        env=inner,
        timeout=timeout,
        what=" ".join(command[:3]),
    )  # fmt: skip


def _place(root: Path, name: str) -> Path:
    """Return the host path for a file of a recipe, after creating its folder. Raises InvalidRequest."""
    parts = PurePosixPath(name).parts[1:]
    if ".." in parts or not parts:
        raise InvalidRequest(f"{name!r} is not a valid path in an image", field="files")
    place = root
    for part in parts[:-1]:
        inner = tree.find_inside(root, str(PurePosixPath("/", place.relative_to(root), part)))
        if inner is None and os.path.lexists(place / part):
            raise InvalidRequest(f"{name!r} goes through a broken link in the image", field="files")
        place = inner if inner is not None else place / part
        place.mkdir(mode=0o755, exist_ok=True)
    return place / parts[-1]


def write_file(root: Path, name: str, text: str) -> None:
    """Write a file of a recipe. A file that begins with ``#!`` is made executable."""
    place = _place(root, name)
    remove(place)
    place.write_text(text)
    place.chmod(0o755 if text.startswith("#!") else 0o644)


def make_link(root: Path, name: str, target: str) -> None:
    """Create a link of a recipe. A target with ``*`` is replaced by the one file that matches."""
    if "*" in target:
        first = target.split("*")[0].rpartition("/")[0]
        folder = tree.find_inside(root, first)
        paths = [] if folder is None else [f"/{path.relative_to(root)}" for path, _ in tree.walk(folder)]
        found = fnmatch.filter(paths, target)
        if len(found) != 1:
            raise RuntimeFailed(f"the target {target} of {name} must match one file, but matches {len(found)}")
        target = found[0]
    place = _place(root, name)
    remove(place)
    os.symlink(target, place)


def remove(place: Path) -> None:
    """Remove a file, a link, or a folder with its contents. Does nothing if the path does not exist."""
    if os.path.lexists(place):
        remove_tree(place)
