"""Apply an image to a profile, and check a Python environment of the host.

An image changes what is visible inside, and never what a sandbox may do. Every image in the state directory may
therefore be chosen unless the administrator restricts it: only users who may write there can add one.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace

from jupyter_agentbox.errors import InvalidRequest, NotFound, PolicyRefused
from jupyter_agentbox.spec import KernelCommand, Service
from jupyter_agentbox.storage.images import ImageStore

from .folders import SYSTEM_DIRS, is_beneath
from .languages import find_module, has_module
from .profiles import Profile


def use_image(profile: Profile, reference: str, store: ImageStore, allowed: Sequence[str]) -> Profile:
    """Return a profile completed with an image's values. Raises NotFound, PolicyRefused."""

    def is_allowed(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed)

    try:
        image = store.get(reference, lambda image: is_allowed(image.name))
    except NotFound:
        if is_allowed(reference.partition("@")[0]):
            raise
        # Do not reveal whether the image exists to a caller who may not use it.
        raise PolicyRefused(
            f"image {reference!r} is not in Policy.allowed_images",
            field="image",
            setting="Policy.allowed_images",
        ) from None
    services = (Service(item.name, item.line, item.ready or "", item.timeout) for item in image.services)
    kernels = (
        KernelCommand(item.name, tuple(item.argv), tuple(item.languages), item.interrupt_mode) for item in image.kernels
    )
    return replace(
        profile,
        image=image.address,
        root=store.root(image),
        python="python3",
        env={**image.env, **profile.env},
        init=(*image.init, *profile.init),
        services=(*services, *profile.services),
        kernels=tuple(kernels),
    )


def check_python(path: str) -> None:
    """Check that a sandbox can use a Python environment of the host. Blocks briefly. Raises InvalidRequest."""
    if shutil.which(path) is None:
        raise InvalidRequest(f"{path} is not a Python interpreter on this machine", field="python")
    environment = os.path.dirname(os.path.dirname(path))
    shown = [os.path.realpath(environment), *SYSTEM_DIRS]
    if any(not is_beneath(os.path.realpath(file), shown) for file in find_module(environment, "ipykernel")):
        raise InvalidRequest(
            f"Cannot use the environment {environment}: its packages are links to files outside it, which are not "
            "visible in a sandbox. Install them as copies or hard links (uv: --link-mode=copy)",
            field="python",
        )
    if not has_module(path, "ipykernel"):
        raise InvalidRequest(
            f"Cannot use the environment {environment}: it has no ipykernel. Install ipykernel there", field="python"
        )
