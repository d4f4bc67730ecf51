"""What a sandbox is made of by choice: an image or the host, and whose Python. Part of the policy.

An image changes what is seen inside and nothing of what a sandbox may do, so any image of the state directory may be
chosen unless the administrator says otherwise: it is there because somebody who may write there put it there.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traitlets import List, Unicode
from traitlets.config import LoggingConfigurable

from jupyter_agentbox.errors import InvalidConfig, InvalidRequest, NotFound, PolicyRefused
from jupyter_agentbox.spec import KernelCommand, Service
from jupyter_agentbox.storage.images import ImageStore

from .folders import SYSTEM_DIRS, is_beneath
from .languages import find_kernels, find_module, has_module
from .profiles import Profile


class ImageSettings(LoggingConfigurable):
    """Which images may be used."""

    allowed_images = List(
        Unicode(),
        ["*"],
        help="""Shell patterns of the names of images that profiles and requests may choose: of those that were built or
        imported here, see `jupyter agentbox image list`. ``[]`` for none.""",
    ).tag(config=True)

    if TYPE_CHECKING:  # of Policy

        @property
        def state_path(self) -> Path: ...

        def profile(self, name: str) -> Profile: ...

    def choose(self, profile: Profile, asked: Mapping[str, Any]) -> Profile:
        """Fill in what a sandbox of a profile is made of: root, Python, kernels, environment, and what runs before.

        Parameters
        ----------
        profile : Profile
        asked : mapping
            The request.

        Raises
        ------
        InvalidConfig, InvalidRequest, NotFound
            The image is not there, or the choice contradicts itself.
        PolicyRefused
            The image may not be used, whether or not it is there.
        """
        setting = f"Policy.profiles[{profile.name!r}]"
        if profile.image is not None and profile.root is not None:
            raise InvalidConfig(f"{setting} has both 'image' and 'root'; leave one out", setting=setting)
        image = asked.get("image", profile.image)
        if image not in (None, profile.image) and (profile.root is not None or profile.image is not None):
            raise PolicyRefused(
                f"profile {profile.name!r} has a root of its own, so image {image!r} can't be chosen",
                field="image",
                setting=f"{setting}['image']",
            )
        python = asked.get("python", profile.python)
        if python is not None and (image is not None or profile.root is not None):
            error: type[InvalidRequest | InvalidConfig] = InvalidRequest if "python" in asked else InvalidConfig
            raise error(
                "'python' is an environment of the host's, and an image has its own: choose one", field="python"
            )
        if image is not None:
            return _use_image(profile, image, ImageStore(self.state_path), self.allowed_images)
        if profile.root is not None:
            return replace(profile, python="python3")
        path = str(python) if python is not None else sys.executable
        if python is not None:
            _check_python(path)
        return replace(profile, python=path, kernels=find_kernels(path))

    def chosen_profile(self, name: str, image: str) -> Profile:
        """Return a profile as it is now, with the image that a sandbox of it has. Errors as for :meth:`choose`."""
        profile = self.profile(name)
        is_free = profile.image is None and profile.root is None
        return self.choose(profile, {"image": image} if image and is_free else {})


def _use_image(profile: Profile, reference: str, store: ImageStore, allowed: Sequence[str]) -> Profile:
    def is_allowed(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed)

    try:
        image = store.get(reference, lambda image: is_allowed(image.name))
    except NotFound:
        if is_allowed(reference.partition("@")[0]):
            raise
        # Whether there is one of that name is not for who may not use it.
        raise PolicyRefused(
            f"image {reference!r} is not among those that may be used",
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


def _check_python(path: str) -> None:
    if shutil.which(path) is None:
        raise InvalidRequest(f"{path} is no Python interpreter on this machine", field="python")
    environment = os.path.dirname(os.path.dirname(path))
    shown = [os.path.realpath(environment), *SYSTEM_DIRS]
    if any(not is_beneath(os.path.realpath(file), shown) for file in find_module(environment, "ipykernel")):
        raise InvalidRequest(
            f"the packages of {environment} are links to files outside of it, which a sandbox is not shown: install "
            "them as copies or hard links (uv: --link-mode=copy)",
            field="python",
        )
    if not has_module(path, "ipykernel"):
        raise InvalidRequest(
            f"the environment {environment} has no ipykernel, which its kernels need: install it there", field="python"
        )
