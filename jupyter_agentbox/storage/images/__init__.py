"""Images: folder trees that stand in for the host's own system as a sandbox's root.

An *image* is a folder ``images/<address>/`` beneath the state directory with the tree in ``rootfs`` and what is known
of it in ``image.json``. Its *address* is a hash over the whole tree, so the same recipe gives the same address
wherever it is built, and whoever moves an image can check it. A *recipe* is a short TOML file that says what goes in.

:mod:`.values` reads recipes and descriptions, :mod:`.tree` unpacks, cleans and hashes trees, :mod:`.store` keeps
images, :mod:`.build` builds them from Debian packages (:mod:`.customize` adds everything else), :mod:`.dockerfile`
builds them from Dockerfiles, :mod:`.archive` exports and imports them. Nothing here knows a sandbox or Jupyter.
"""

from .store import ImageStore
from .values import Image, KernelEntry, Recipe, Service

__all__ = ["Image", "ImageStore", "KernelEntry", "Recipe", "Service"]
