"""Commands for images: build, list, remove, export, import and verify."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import msgspec
from traitlets import Bool, Unicode

from jupyter_agentbox.errors import InvalidRequest, NotFound
from jupyter_agentbox.linux import remove_tree
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.spec import format_size
from jupyter_agentbox.storage.images import Image, ImageStore, archive, values

from .base import Command, CommandGroup, format_age, printable, write_table

_NO_KERNELSPEC = "Do not install kernelspecs for the image's kernels."


class _ImageCommand(Command):
    """Base of the image commands, with the image store of the state directory."""

    def store(self) -> ImageStore:
        """Return the store."""
        return ImageStore(Policy(parent=self).state_path)

    def offer(self, image: Image) -> None:
        """Install kernelspecs for the image's kernels, and print each."""
        from jupyter_agentbox.jupyter import kernelspecs

        for entry in image.kernels:
            taken_by = kernelspecs.find_image_of(f"agentbox-{entry.name}")
            if taken_by not in (None, image.name):
                again = f"jupyter agentbox kernelspec --image={image.name} {entry.name}"
                print(f"kernelspec agentbox-{entry.name} belongs to image {taken_by}; to replace it, run `{again}`")
            else:
                print(f"kernelspec {kernelspecs.install_for_image(image.name, entry)}")

    def withdraw(self, image: Image) -> None:
        """Remove the kernelspecs of an image's kernels, and print each."""
        from jupyter_agentbox.jupyter import kernelspecs

        for name, path in kernelspecs.find_all_of_image(image.name).items():
            try:
                remove_tree(path)
            except OSError as error:
                print(f"kernelspec {path} cannot be removed: {error.strerror}; run `jupyter kernelspec remove {name}`")
            else:
                print(f"removed kernelspec {path}")


class BuildCommand(_ImageCommand):
    """Build an image from a recipe or a Dockerfile.

    RECIPE is the name of a recipe that comes with agentbox, your own .toml file, or a file whose name begins with
    "Dockerfile". Recipes are built from the package sources of this machine's apt. Dockerfiles are built with the
    engine of DockerRuntime.host, and need --name. Progress goes to standard error.
    """

    name = "jupyter agentbox image build"
    description = __doc__ or ""
    examples = (
        "jupyter agentbox image build datascience\njupyter agentbox image build ./mine.toml\n"
        "jupyter agentbox image build ./Dockerfile --name=mine"
    )
    argument = "RECIPE"
    wanted = "name one recipe or Dockerfile; `jupyter agentbox image list` lists the recipes that come with agentbox"
    cache = Unicode(help="Cache for downloads; by default agentbox/images in your cache directory.").tag(config=True)
    title = Unicode(help="Name of the image, if it is built from a Dockerfile.").tag(config=True, option="name")
    no_kernelspec = Bool(False, help=_NO_KERNELSPEC).tag(config=True)

    def run(self) -> int:
        """Build the image."""
        from jupyter_agentbox.egress import presets
        from jupyter_agentbox.storage.images import build, dockerfile

        wanted = self.extra_args[0]
        store = self.store()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)  # so that the programs of the build end too, and remove their mounts
        began = time.monotonic()

        def on_progress(line: str) -> None:
            self.log.info("%6.1f s  %s", time.monotonic() - began, printable(line))

        self.log.setLevel("INFO")
        cache = Path(self.cache).expanduser() if self.cache else None
        file = Path(wanted).expanduser()
        if file.name.startswith("Dockerfile"):
            if not file.is_file():
                raise NotFound(f"Cannot build {file}: no such file. Check the path")
            from jupyter_agentbox.runtimes.docker.runtime import DockerRuntime

            if not self.title:
                raise InvalidRequest(
                    "Cannot build from a Dockerfile: the image has no name. Add --name=NAME", field="name"
                )
            host = DockerRuntime(config=Policy(parent=self).config).host
            image = dockerfile.build_file(store, file, values.make_recipe(self.title), on_progress, host=host)
        else:
            recipe = values.read_recipe(values.find_recipe(wanted))
            image = build.build(store, recipe, on_progress, pip_environment=presets.pip_environment(), cache=cache)
        print(f"{image.short}  {format_size(image.size)}  in {time.monotonic() - began:.0f} s")
        if not self.no_kernelspec:
            self.offer(image)
        return 0


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


class ListImagesCommand(_ImageCommand):
    """List the images, newest first, and the recipes that come with agentbox."""

    name = "jupyter agentbox image list"
    description = __doc__ or ""
    json = Bool(False, help="Print a JSON list instead of a table.").tag(config=True)

    def run(self) -> int:
        """Print the list."""
        found = self.store().list()
        if self.json:
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
    """Remove images, by name or address, and the kernelspecs of the last image of a name.

    Snapshots taken on a removed image cannot be restored.
    """

    name = "jupyter agentbox image remove"
    description = __doc__ or ""
    examples = "jupyter agentbox image remove datascience"
    argument = "IMAGE..."
    wanted = "name the images to remove; `jupyter agentbox image list` lists them"

    def run(self) -> int:
        """Remove the images."""
        store = self.store()
        for reference in self.extra_args:
            image = store.get(reference)
            store.remove(image)
            print(f"removed {image.short}")
            if all(other.name != image.name for other in store.list()):
                self.withdraw(image)
        return 0


class ExportImageCommand(_ImageCommand):
    """Write an image to one file, compressed if its name ends with .gz."""

    name = "jupyter agentbox image export"
    description = __doc__ or ""
    examples = "jupyter agentbox image export datascience datascience.tar.gz"
    argument = "IMAGE FILE"
    wanted = "name an image and a new file; `jupyter agentbox image list` lists images"

    def run(self) -> int:
        """Write the image."""
        reference, file = self.extra_args
        store = self.store()
        image = store.get(reference)
        archive.export_image(store, image, Path(file).expanduser())
        print(f"exported {image.short} to {file}")
        return 0


class ImportImageCommand(_ImageCommand):
    """Read an image from a file that `image export` wrote."""

    name = "jupyter agentbox image import"
    description = __doc__ or ""
    examples = "jupyter agentbox image import datascience.tar.gz"
    argument = "FILE"
    no_kernelspec = Bool(False, help=_NO_KERNELSPEC).tag(config=True)

    def run(self) -> int:
        """Import the image."""
        image = archive.import_image(self.store(), Path(self.extra_args[0]).expanduser())
        print(f"imported {image.short}  {format_size(image.size)}")
        if not self.no_kernelspec:
            self.offer(image)
        return 0


class VerifyImageCommand(_ImageCommand):
    """Check that images are unchanged since they were built, by hashing all their files."""

    name = "jupyter agentbox image verify"
    description = __doc__ or ""
    argument = "[IMAGE...]"

    def run(self) -> int:
        """Check the named images, or all."""
        store = self.store()
        for image in [store.get(reference) for reference in self.extra_args] or store.list():
            store.verify(image)
            print(f"{image.short} is unchanged")
        return 0


_IMAGE_COMMANDS = {
    "build": (BuildCommand, "Build an image from a recipe or a Dockerfile."),
    "list": (ListImagesCommand, "List the images."),
    "remove": (RemoveImageCommand, "Remove images."),
    "export": (ExportImageCommand, "Write an image to a file."),
    "import": (ImportImageCommand, "Read an image from a file."),
    "verify": (VerifyImageCommand, "Check that images are unchanged."),
}


class ImageCommand(CommandGroup):
    """Manage images: root file systems for sandboxes, in place of the host's."""

    name = "jupyter agentbox image"
    description = __doc__ or ""
    examples = "jupyter agentbox image build r\njupyter agentbox image list"
    subcommands = _IMAGE_COMMANDS
