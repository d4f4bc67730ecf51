"""Manage kernelspecs: our own, sandboxed copies of others, and a manager that offers only sandboxed kernels.

Installing the package hides nothing; it adds one kernel to the existing ones. To prevent kernels from running outside
of sandboxes by accident, configure servers to use :class:`AgentboxKernelSpecManager` only (:func:`enforce`). Our specs
name the provisioner in ``jupyter.provisioner``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager, NoSuchKernel
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from tornado.web import HTTPError
from traitlets import Set, Unicode

from jupyter_agentbox.errors import InvalidConfig, InvalidRequest, NotFound, PolicyRefused
from jupyter_agentbox.policy.configfiles import CONFIG_NAME
from jupyter_agentbox.storage.images import KernelEntry

PROVISIONER_NAME = "agentbox-provisioner"
OWN_NAME = "agentbox"
#: Names that clients request by default. A server that offers only sandboxed kernels starts its own kernel for them.
PYTHON_NAMES = ("python3", "python")
_MARK = "agentbox-command"
#: Command that fails with a message. It comes first in a kernelspec's command, so a program that runs the command
#: itself starts no kernel on the host. It imports nothing from the current directory, because a sandbox may write
#: there.
_REFUSAL = (
    "python",
    "-I",
    "-c",
    "raise SystemExit('jupyter_agentbox: kernel not started: the program or kernelspec manager that starts it ignores "
    "the kernel_provisioner in its kernel.json, so it would run on the host and not in a sandbox. Use one that keeps "
    "it (jupyter_client 7 or later, jupyter_agentbox.AgentboxKernelSpecManager)')",
    _MARK,
)


def guard_argv(argv: Sequence[str]) -> list[str]:
    """Return a kernelspec's command in a form that only our provisioner starts; if run directly, it fails."""
    return [*_REFUSAL, *argv]


def real_argv(argv: Sequence[str]) -> list[str]:
    """Return the original of a command from :func:`guard_argv`. Any other command is returned unchanged."""
    start = argv.index(_MARK) + 1 if _MARK in argv[: len(_REFUSAL)] else 0
    return list(argv[start:])


#: Contents of ``share/jupyter/kernels/agentbox/kernel.json`` in the wheel.
OWN_SPEC: Mapping[str, Any] = {
    "argv": guard_argv(["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]),
    "display_name": "Python (sandboxed)",
    "language": "python",
    "metadata": {"debugger": True, "kernel_provisioner": {"provisioner_name": PROVISIONER_NAME, "config": {}}},
}


class UnknownKernel(NoSuchKernel, HTTPError):
    """Error for a kernel name that a server does not offer. Over REST it is a 404 that lists the offered kernels."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        NoSuchKernel.__init__(self, name)
        listed = ", ".join(known) or "none"
        HTTPError.__init__(
            self,
            404,
            f"This server offers no kernel named {name[:100]!r}. Offered kernels: {listed}. To offer another one, "
            "create a sandboxed copy of its kernelspec with `jupyter agentbox kernelspec`",
        )

    def __str__(self) -> str:
        return str(self.log_message)


def is_sandboxed(spec: KernelSpec, parent: Any = None) -> bool:
    """Return whether kernels with this spec run in a sandbox, by the spec or by Jupyter's default provisioner."""
    stanza = spec.metadata.get("kernel_provisioner") or {}
    name = stanza.get("provisioner_name") if isinstance(stanza, dict) else None
    name = name or KernelProvisionerFactory.instance(parent=parent).default_provisioner_name
    return bool(name == PROVISIONER_NAME)


class AgentboxKernelSpecManager(KernelSpecManager):
    """Kernelspec manager that lists and starts only kernels that run in a sandbox.

    Clients that know no other name request ``python3`` or ``python``. If no kernel with that name is offered, they get
    the sandboxed Python. Servers use this class where :func:`enforce` was called.
    """

    unsandboxed_kernelspecs = Set(
        Unicode(),
        help="Names of kernels that may run outside of sandboxes, with the permissions of the server.",
    ).tag(config=True)

    def find_kernel_specs(self) -> dict[str, str]:
        """Return the names and directories of the sandboxed kernels."""
        found = super().find_kernel_specs()
        return {name: directory for name, directory in found.items() if self._find(name) is not None}

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """Return a sandboxed kernel's spec.

        Raises
        ------
        UnknownKernel
            The server offers no such kernel, or it would run outside of a sandbox.
        """
        spec = self._find(kernel_name)
        if spec is None and kernel_name.lower() in PYTHON_NAMES:
            spec = self._find(OWN_NAME)
        if spec is None:
            raise UnknownKernel(kernel_name, sorted(self.find_kernel_specs()))
        return spec

    def _find(self, name: str) -> KernelSpec | None:
        """Return the spec with exactly this name, if it exists and is allowed and sandboxed."""
        if self.allowed_kernelspecs and name not in self.allowed_kernelspecs:
            return None
        try:
            spec = super().get_kernel_spec(name)
        except NoSuchKernel:
            return None
        except Exception as error:
            self.log.warning("kernelspec %s cannot be read: %s", name, error)
            return None
        if name.lower() in self.unsandboxed_kernelspecs or is_sandboxed(spec, self.parent):
            return spec
        self.log.info(
            "kernelspec %s is hidden because it is not sandboxed. Create a sandboxed copy with `jupyter agentbox "
            "kernelspec %s`, or add it to AgentboxKernelSpecManager.unsandboxed_kernelspecs",
            name,
            name,
        )
        return None


def check_folder(kernel: Any, folder: Path) -> None:
    """Check that a kernel's folder is in its server's root directory, if the server offers only sandboxed kernels.

    Links are resolved. The check is needed because Jupyter accepts any path of the host, and because code inside can
    create links in folders that it may write.

    Parameters
    ----------
    kernel : KernelManager
        Checked only if its kernelspec manager is an :class:`AgentboxKernelSpecManager`.
    folder : Path
        Absolute path.

    Raises
    ------
    PolicyRefused
        The folder is not in the root directory.
    """
    root = getattr(kernel.parent, "root_dir", None)
    if root and isinstance(kernel.kernel_spec_manager, AgentboxKernelSpecManager):
        real = os.path.realpath(root)
        if not Path(os.path.realpath(folder)).is_relative_to(real):
            raise PolicyRefused(
                f"{folder} is not in the server's root directory, {real}",
                field="cwd",
                setting="Policy.allowed_workspaces",
            )


@dataclass(frozen=True)
class Shadowed:
    """A kernelspec name that exists in several directories.

    Parameters
    ----------
    name : str
        The kernel's name.
    winner : Path
        Directory of the spec that Jupyter uses.
    losers : tuple of Path
        Directories of the other specs, in order.
    is_unboxed : bool
        Whether the spec that Jupyter uses runs outside of any sandbox, while another one would run in a sandbox.
    """

    name: str
    winner: Path
    losers: tuple[Path, ...]
    is_unboxed: bool


def find_shadowed(kernel_dirs: Sequence[str] | None = None) -> list[Shadowed]:
    """Return names that exist in several of Jupyter's kernel directories and have at least one sandboxed spec."""
    places: dict[str, list[Path]] = {}
    for kernel_dir in kernel_dirs if kernel_dirs is not None else KernelSpecManager().kernel_dirs:
        for path in sorted(Path(kernel_dir).glob("*/kernel.json")):
            places.setdefault(path.parent.name.lower(), []).append(path.parent)
    found = []
    for name, (winner, *losers) in sorted(places.items()):
        is_boxed = [_is_boxed_directory(place) for place in (winner, *losers)]
        if losers and any(is_boxed):
            found.append(Shadowed(name, winner, tuple(losers), not is_boxed[0]))
    return found


def _is_boxed_directory(directory: Path) -> bool:
    try:
        return is_sandboxed(KernelSpec.from_resource_dir(str(directory)))
    except Exception:  # any unreadable spec starts no sandbox
        return False


def install_own(*, prefix: str | None = None) -> Path:
    """Install our own kernelspec for this user or below a prefix, and return its directory."""
    with tempfile.TemporaryDirectory() as staging:
        return _install(Path(staging), OWN_NAME, OWN_SPEC, prefix)


def ensure_installed() -> Path:
    """Install our own kernelspec, unless the wheel's data files contain it, and return its directory.

    It is installed in the environment, or for this user if the environment is not writable.
    """
    found = KernelSpecManager().find_kernel_specs().get(OWN_NAME)
    if found is not None:
        return Path(found)
    try:
        return install_own(prefix=sys.prefix)
    except OSError:
        return install_own()


def install_copy(
    original_name: str,
    *,
    name: str | None = None,
    display_name: str | None = None,
    profile: str | None = None,
    prefix: str | None = None,
) -> Path:
    """Install a kernelspec that runs an installed kernel of any language in a sandbox.

    Parameters
    ----------
    original_name : str
        The kernel to copy.
    name : str, optional
        Name of the copy; by default the original's with ``-agentbox`` appended. If it is the original's own name,
        the copy shadows the original where the directory of the copy comes first.
    display_name : str, optional
        By default the original's with " (sandboxed)" appended.
    profile : str, optional
        The profile to run it with.
    prefix : str, optional
        Prefix below which to install. By default it is installed for this user.

    Returns
    -------
    Path
        The new spec's directory.

    Raises
    ------
    NotFound
        The kernel is not installed.
    InvalidRequest
        The kernel is already sandboxed, or a name is malformed.
    """
    try:
        original = KernelSpecManager().get_kernel_spec(original_name)
    except NoSuchKernel:
        known = ", ".join(sorted(KernelSpecManager().find_kernel_specs()))
        raise NotFound(f"kernelspec {original_name!r} is not installed; installed: {known}", field="name") from None
    stanza = original.metadata.get("kernel_provisioner") or {}
    if stanza.get("provisioner_name") == PROVISIONER_NAME:
        raise InvalidRequest(f"kernelspec {original_name!r} is already sandboxed", field="name")
    spec = original.to_dict()
    directory = original.resource_dir
    # The original's files are copied too, so that the copy does not depend on the original.
    spec["argv"] = guard_argv(
        [argument.replace(directory, "{resource_dir}") if directory else argument for argument in spec["argv"]]
    )
    spec["display_name"] = display_name or f"{original.display_name} (sandboxed)"
    config = {"profile": profile} if profile else {}
    spec["metadata"] = {
        **spec["metadata"],
        "kernel_provisioner": {"provisioner_name": PROVISIONER_NAME, "config": config},
    }
    with tempfile.TemporaryDirectory() as staging:
        target = Path(staging, "spec")
        if directory and os.path.isdir(directory):
            shutil.copytree(directory, target, ignore=lambda folder, names: {"kernel.json"} & {*names})
        else:
            target.mkdir()
        return _install(target, name or f"{original_name}-agentbox", spec, prefix)


def install_for_image(image: str, entry: KernelEntry, *, name: str | None = None, prefix: str | None = None) -> Path:
    """Install a kernelspec for one of an image's kernels.

    Parameters
    ----------
    image : str
        The image's name. If several images have this name, a start uses the newest.
    entry : KernelEntry
    name : str, optional
        By default ``agentbox-`` and the kernel's name.
    prefix : str, optional
        Prefix below which to install. By default it is installed for this user.
    """
    spec = {
        "argv": guard_argv(entry.argv),
        "display_name": f"{entry.display_name} (sandboxed)",
        "language": entry.languages[0],
        "interrupt_mode": entry.interrupt_mode,
        "metadata": {"kernel_provisioner": {"provisioner_name": PROVISIONER_NAME, "config": {"image": image}}},
    }
    with tempfile.TemporaryDirectory() as staging:
        return _install(Path(staging), name or f"{OWN_NAME}-{entry.name}", spec, prefix)


def find_all_of_image(image: str) -> dict[str, Path]:
    """Return the kernelspecs that :func:`install_for_image` installed for an image, by name.

    Kernelspecs that were changed to request more than the image are not among them.
    """
    found = {}
    for name, directory in KernelSpecManager().find_kernel_specs().items():
        try:
            spec = KernelSpec.from_resource_dir(directory)
        except Exception:  # any unreadable spec is not one of ours
            continue
        stanza = spec.metadata.get("kernel_provisioner")
        is_ours = stanza == {"provisioner_name": PROVISIONER_NAME, "config": {"image": image}}
        if is_ours and real_argv(spec.argv) != spec.argv:
            found[name] = Path(directory)
    return found


def find_image_of(name: str) -> str | None:
    """Return the image of an installed kernelspec, or None if it is not installed or names no image."""
    try:
        spec = KernelSpecManager().get_kernel_spec(name)
    except NoSuchKernel:
        return None
    stanza = spec.metadata.get("kernel_provisioner") or {}
    found = stanza.get("config", {}).get("image") if isinstance(stanza, dict) else None
    return found if isinstance(found, str) else None


def _install(staging: Path, name: str, spec: Mapping[str, Any], prefix: str | None) -> Path:
    (staging / "kernel.json").write_text(json.dumps(spec, indent=1) + "\n")
    try:
        installed = KernelSpecManager().install_kernel_spec(str(staging), name, user=prefix is None, prefix=prefix)
    except ValueError as error:
        raise InvalidRequest(str(error), field="name") from None
    path = Path(installed)
    path.chmod(0o755)  # the staging directory's mode is private
    return path


def enforce(directory: Path | None = None) -> Path:
    """Configure Jupyter servers to offer, start and default to sandboxed kernels only, terminals included.

    Parameters
    ----------
    directory : Path, optional
        One of Jupyter's configuration directories; by default the environment's own.

    Returns
    -------
    Path
        The configuration file. Removing the setting from it undoes the change.

    Raises
    ------
    InvalidConfig
        The file exists and is not a JSON object.
    """
    folder = directory or Path(sys.prefix, "etc", "jupyter")
    path = folder / f"{CONFIG_NAME}.json"
    try:
        config: Any = json.loads(path.read_text()) if path.exists() else {}
        config.setdefault("AgentboxExtension", {})["enforce"] = True
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidConfig(f"cannot add AgentboxExtension.enforce to {path}: {error}. Correct that file") from None
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=1) + "\n")
    return path
