"""Commands on images: build, list, remove, export, import and verify."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import msgspec
from traitlets import Bool, Unicode

from jupyter_agentbox.errors import InvalidRequest, NotFound
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.spec import format_size
from jupyter_agentbox.storage.images import Image, ImageStore, archive, values

from .base import ALIASES, FLAGS, Command, CommandGroup, format_age, printable, write_table

_NO_KERNELSPEC = "Install no kernelspecs for its kernels."
_BUILD_ALIASES = {**ALIASES, "cache": "BuildCommand.cache", "name": "BuildCommand.title"}
_BUILD_FLAGS = {
    **FLAGS,
    "docker": ({"BuildCommand": {"is_docker": True}}, "Build with Docker, from the recipe's `docker` image."),
    "no-kernelspec": ({"BuildCommand": {"is_plain": True}}, _NO_KERNELSPEC),
}
_LIST_FLAGS = {
    **FLAGS,
    "json": ({"ListImagesCommand": {"is_json": True}}, "Print a JSON list instead of a table."),
}
_IMPORT_ALIASES = {**ALIASES, "name": "ImportImageCommand.title", "recipe": "ImportImageCommand.recipe"}
_IMPORT_FLAGS = {**FLAGS, "no-kernelspec": ({"ImportImageCommand": {"is_plain": True}}, _NO_KERNELSPEC)}


class _ImageCommand(Command):
    """What they share: the store of the state directory."""

    def store(self) -> ImageStore:
        """Return it."""
        return ImageStore(Policy(parent=self).state_path)

    def offer(self, image: Image) -> None:
        """Install kernelspecs for the image's kernels, and say so."""
        from jupyter_agentbox.jupyter import kernelspecs

        for entry in image.kernels:
            taken_by = kernelspecs.find_image_of(f"agentbox-{entry.name}")
            if taken_by not in (None, image.name):
                again = f"jupyter agentbox kernelspec --image={image.name} {entry.name}"
                print(f"kernelspec agentbox-{entry.name} stays with image {taken_by}; `{again}` takes it over")
            else:
                print(f"kernelspec {kernelspecs.install_for_image(image.name, entry)}")


class BuildCommand(_ImageCommand):
    """Build an image from a recipe, the name of one that comes with agentbox or a file of your own, or a Dockerfile.

    A recipe from the packages that apt is set up with on this machine, or with Docker. A Dockerfile, which is a file
    whose name begins so, takes --name and builds with Docker. The steps are told on standard error.
    """

    name = "jupyter agentbox image build"
    description = __doc__ or ""
    examples = (
        "jupyter agentbox image build datascience\njupyter agentbox image build ./mine.toml\n"
        "jupyter agentbox image build ./Dockerfile --name=mine"
    )
    argument = "RECIPE"
    wanted = "name one recipe; `jupyter agentbox image list` lists those that come with agentbox"
    aliases = _BUILD_ALIASES
    flags = _BUILD_FLAGS
    cache = Unicode(help="Where downloads are kept; agentbox/images in your cache directory unless given.").tag(
        config=True
    )
    is_docker = Bool(False, help="Build with Docker.").tag(config=True)
    title = Unicode(help="What to call the image of a Dockerfile.").tag(config=True)
    is_plain = Bool(False, help=_NO_KERNELSPEC).tag(config=True)

    def run(self) -> int:
        """Build it."""
        from jupyter_agentbox.egress import presets
        from jupyter_agentbox.storage.images import build, docker

        wanted = self.extra_args[0]
        store = self.store()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)  # so that what builds ends as well, and takes its mounts away
        began = time.monotonic()

        def tell(line: str) -> None:
            self.log.info("%6.1f s  %s", time.monotonic() - began, printable(line))

        self.log.setLevel("INFO")
        cache = Path(self.cache).expanduser() if self.cache else None
        file = Path(wanted).expanduser()
        if file.name.startswith("Dockerfile"):
            if not file.is_file():
                raise NotFound(f"there is no file {file}")
            if not self.title:
                raise InvalidRequest("give the image a name: --name=mine", field="name")
            image = docker.build_file(store, file, values.make_recipe(self.title), tell)
        else:
            recipe = values.read_recipe(values.find_recipe(wanted))
            make = docker.build if self.is_docker else build.build
            image = make(store, recipe, tell, pip_environment=presets.pip_environment(), cache=cache)
        print(f"{image.short}  {format_size(image.size)}  in {time.monotonic() - began:.0f} s")
        if not self.is_plain:
            self.offer(image)
        return 0


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


class ListImagesCommand(_ImageCommand):
    """List the images, the newest first, and the recipes that come with agentbox."""

    name = "jupyter agentbox image list"
    description = __doc__ or ""
    flags = _LIST_FLAGS
    is_json = Bool(False, help="Print a JSON list.").tag(config=True)

    def run(self) -> int:
        """Print the list."""
        found = self.store().list()
        if self.is_json:
            print(json.dumps(msgspec.to_builtins(found), indent=2))
            return 0
        rows: list[tuple[str, ...]] = [("NAME", "ADDRESS", "AGE", "SIZE", "KERNELS")]
        for image in found:
            kernels = ", ".join(kernel.name for kernel in image.kernels) or "-"
            age = format_age(time.time() - image.created)
            rows.append((image.name, image.address[:12], age, format_size(image.size), kernels))
        write_table(rows)
        print(f"recipes: {', '.join(values.list_recipes())}")
        return 0


class RemoveImageCommand(_ImageCommand):
    """Remove images, by name or address. Snapshots of sandboxes that ran on them can't be restored then."""

    name = "jupyter agentbox image remove"
    description = __doc__ or ""
    examples = "jupyter agentbox image remove datascience"
    argument = "IMAGE..."
    wanted = "name the images to remove; `jupyter agentbox image list` lists them"

    def run(self) -> int:
        """Remove them."""
        store = self.store()
        for reference in self.extra_args:
            image = store.get(reference)
            store.remove(image)
            print(f"removed {image.short}")
        return 0


class ExportImageCommand(_ImageCommand):
    """Write an image to one file, compressed if its name ends with .gz."""

    name = "jupyter agentbox image export"
    description = __doc__ or ""
    examples = "jupyter agentbox image export datascience datascience.tar.gz"
    argument = "IMAGE FILE"
    wanted = "name an image and a new file; `jupyter agentbox image list` lists images"

    def run(self) -> int:
        """Write it."""
        reference, file = self.extra_args
        store = self.store()
        image = store.get(reference)
        archive.export_image(store, image, Path(file).expanduser())
        print(f"exported {image.short} to {file}")
        return 0


class ImportImageCommand(_ImageCommand):
    """Read an image from a file: of `image export`, `docker export` or `docker save`.

    Those of Docker need a name, or a recipe of yours with name, environment and kernels (its packages are not
    installed).
    """

    name = "jupyter agentbox image import"
    description = __doc__ or ""
    examples = "jupyter agentbox image import datascience.tar.gz\njupyter agentbox image import saved.tar --name=mine"
    argument = "FILE"
    aliases = _IMPORT_ALIASES
    flags = _IMPORT_FLAGS
    title = Unicode(help="What to call one of Docker's.").tag(config=True)
    recipe = Unicode(help="Recipe whose name, environment, services and kernels one of Docker's has.").tag(config=True)
    is_plain = Bool(False, help=_NO_KERNELSPEC).tag(config=True)

    def run(self) -> int:
        """Read it."""
        recipe = values.read_recipe(values.find_recipe(self.recipe)) if self.recipe else None
        if recipe is None and self.title:
            recipe = values.make_recipe(self.title)
        image = archive.import_image(self.store(), Path(self.extra_args[0]).expanduser(), recipe)
        print(f"imported {image.short}  {format_size(image.size)}")
        if not self.is_plain:
            self.offer(image)
        return 0


class VerifyImageCommand(_ImageCommand):
    """Check that images are what they were when they were made, by hashing all of their files."""

    name = "jupyter agentbox image verify"
    description = __doc__ or ""
    argument = "[IMAGE...]"

    def run(self) -> int:
        """Check those named, or all."""
        store = self.store()
        for image in [store.get(reference) for reference in self.extra_args] or store.list():
            store.verify(image)
            print(f"{image.short} is unchanged")
        return 0


_IMAGE_COMMANDS = {
    "build": (BuildCommand, "Build an image from a recipe."),
    "list": (ListImagesCommand, "List the images."),
    "remove": (RemoveImageCommand, "Remove images."),
    "export": (ExportImageCommand, "Write an image to a file."),
    "import": (ImportImageCommand, "Read an image from a file."),
    "verify": (VerifyImageCommand, "Check that images are unchanged."),
}


class ImageCommand(CommandGroup):
    """Images: systems that sandboxes can have as their root instead of the host's own."""

    name = "jupyter agentbox image"
    description = __doc__ or ""
    examples = "jupyter agentbox image build r\njupyter agentbox image list"
    subcommands = _IMAGE_COMMANDS
