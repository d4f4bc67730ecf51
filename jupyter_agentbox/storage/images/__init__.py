"""Build, keep and move images: folder trees that serve as a sandbox's root in place of the host's file system.

An *image* is a folder ``images/<address>/`` in the state directory, with the tree in ``rootfs`` and its description in
``image.json``. Its *address* is a hash over the whole tree, so the same recipe produces the same address wherever it is
built, and a copied image can be verified. A *recipe* is a short TOML file that lists what an image contains.

:mod:`.values` reads recipes and descriptions. :mod:`.tree` unpacks, cleans and hashes trees. :mod:`.store` keeps
images. :mod:`.build` builds them from Debian packages, and :mod:`.customize` adds everything else. :mod:`.dockerfile`
builds them from Dockerfiles. :mod:`.archive` exports and imports them. This package depends on neither sandboxes nor
Jupyter.
"""

from .store import ImageStore
from .values import Image, KernelEntry, Recipe, Service

__all__ = ["Image", "ImageStore", "KernelEntry", "Recipe", "Service"]
