"""Read recipes (TOML) and image descriptions (JSON) into validated values."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from jupyter_core.paths import jupyter_path
from msgspec import Meta

from jupyter_agentbox.errors import InvalidRequest, NotFound
from jupyter_agentbox.linux import PACKAGE

#: Pattern for the names of images, recipes, kernels and services.
NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
ADDRESS = r"^[0-9a-f]{64}$"
_NAME = re.compile(NAME)
#: Directory of the wheel's recipes, beneath ``share/jupyter``.
_RECIPES = "agentbox-recipes"
#: How a value of a recipe must look, by the name of its field.
_FORMS = {
    "pip": "one package with its exact version, such as duckdb==1.1.3",
    "npm": "one package with its exact version, such as typescript@5.6.3",
    "debian": "the name of a package, such as jq, with a version if needed: git=1:2.39.*",
    "name": "lower-case letters, digits, and . _ -, such as mine",
    "from": "the name of a recipe, such as python",
    "env": "the name of a variable, such as TZ",
    "files": "an absolute path, such as /usr/local/bin/hello",
    "links": "an absolute path, such as /usr/local/bin/hello",
    "interrupt_mode": "signal or message",
}
_PATTERN_ERROR = re.compile(r"matching regex .* - at (?:`key` in )?`(?P<path>\$[^`]*)`$")
#: Maximum bytes of a recipe and of a description.
MAX_TEXT = 1 << 20
#: Maximum length of a chain of recipes, each based on the next.
MAX_PARENTS = 16

Name = Annotated[str, Meta(pattern=NAME)]
Line = Annotated[str, Meta(min_length=1, max_length=10_000, pattern=r"^[^\0]*$")]
Variable = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
Environment = dict[Variable, Annotated[str, Meta(max_length=100_000, pattern=r"^[^\0]*$")]]
InnerPath = Annotated[str, Meta(pattern=r"^/[^\0]+$", max_length=4096)]
Debian = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9+.-]+(=[A-Za-z0-9.+:~*-]+)?$", max_length=200)]
Pip = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._,-]+\])?==[A-Za-z0-9.!+_-]+$", max_length=200)
]
Npm = Annotated[
    str, Meta(pattern=r"^(@[a-z0-9][a-z0-9._-]*/)?[a-z0-9][a-z0-9._-]*@[0-9][0-9A-Za-z.+-]*$", max_length=200)
]


class Service(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A program that runs beside a sandbox's kernels, from before the first of them until the sandbox ends.

    Parameters
    ----------
    name : str
    line : str
        Shell command that runs the program.
    ready : str, optional
        Shell command that succeeds once the service is usable. It is repeated until then.
    timeout : float
        Seconds within which the service must become ready.
    """

    name: Name
    line: Line
    ready: Line | None = None
    timeout: Annotated[float, Meta(gt=0, le=600)] = 30.0


class KernelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Jupyter kernel of an image.

    Parameters
    ----------
    name : str
        Name; the kernelspec is called ``agentbox-<name>``.
    argv : list of str
        Command line, in which ``{connection_file}`` is replaced.
    display_name : str
        Name that people see, without " (sandboxed)".
    languages : list of str
        Languages that it runs. The kernelspec names the first.
    interrupt_mode : str
        ``signal``, or ``message`` for a kernel that a signal would end.
    """

    name: Name
    argv: Annotated[list[Line], Meta(min_length=1, max_length=100)]
    display_name: Annotated[str, Meta(min_length=1, max_length=100)]
    languages: Annotated[list[Annotated[str, Meta(min_length=1, max_length=64)]], Meta(min_length=1, max_length=10)]
    interrupt_mode: Annotated[str, Meta(pattern="^(signal|message)$")] = "signal"


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"parents": "from"}):
    """The contents of an image. Lists are appended to those of the recipes that it is based on.

    Parameters
    ----------
    name : str
    parents : str or list of str
        ``from`` in the file: the recipes that this one is based on.
    debian : list of str
        Packages of the distribution, such as ``git`` or ``git=1:2.39.*``. The release determines all other versions.
    pip : list of str
        Python packages with an exact version: ``pandas==2.2.3``. Only wheels are installed.
    npm : list of str
        Packages of the npm registry with an exact version: ``npm@10.9.2``. Their scripts do not run.
    files : dict of str to str
        Files to write, by path inside. A file that begins with ``#!`` is made executable.
    links : dict of str to str
        Symbolic links, from path to target. A target with ``*`` stands for the one file that matches.
    env : dict of str to str
        Environment variables of everything that runs inside.
    init : list of str
        Shell commands that run before the first kernel, in order. If one fails, the sandbox does not start.
    services : list of Service
    kernels : list of KernelEntry
    """

    name: Name
    parents: Name | Annotated[list[Name], Meta(max_length=16)] = []
    debian: Annotated[list[Debian], Meta(max_length=500)] = []
    pip: Annotated[list[Pip], Meta(max_length=500)] = []
    npm: Annotated[list[Npm], Meta(max_length=100)] = []
    files: dict[InnerPath, str] = {}
    links: dict[InnerPath, Annotated[str, Meta(pattern=r"^[^\0]+$", max_length=4096)]] = {}
    env: Environment = {}
    init: Annotated[list[Line], Meta(max_length=100)] = []
    services: Annotated[list[Service], Meta(max_length=50)] = []
    kernels: Annotated[list[KernelEntry], Meta(max_length=50)] = []


class Image(msgspec.Struct, frozen=True):
    """An image as described by its ``image.json``.

    Parameters
    ----------
    address : str
        Hash over its tree, its name and its :attr:`setup`.
    name : str
    recipe : dict
        The recipe that it was built from; for an image from a Dockerfile, the name of that file.
    created : float
        Seconds since the epoch.
    size : int
        Bytes of its files.
    env, init, services, kernels
        As in :class:`Recipe`.
    packages : dict of str to str
        Packages of the distribution, with their versions.
    """

    address: Annotated[str, Meta(pattern=ADDRESS)]
    name: Name
    recipe: dict[str, Any]
    created: float
    size: Annotated[int, Meta(ge=0)]
    env: Environment = {}
    init: Annotated[list[Line], Meta(max_length=100)] = []
    services: Annotated[list[Service], Meta(max_length=50)] = []
    kernels: Annotated[list[KernelEntry], Meta(max_length=50)] = []
    packages: dict[str, str] = {}

    @property
    def short(self) -> str:
        """The name and the beginning of the address, for people."""
        return f"{self.name}@{self.address[:12]}"

    @property
    def setup(self) -> bytes:
        """The data, other than the tree, that distinguishes the image from others."""
        return msgspec.json.encode((self.name, self.env, self.init, self.services, self.kernels), order="sorted")

    def to_bytes(self) -> bytes:
        """Return the description as JSON."""
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=1)

    @classmethod
    def from_bytes(cls, data: bytes) -> Image:
        """Parse a description. Raises InvalidRequest."""
        try:
            return msgspec.json.decode(data[: MAX_TEXT + 1], type=cls)
        except ValueError as error:
            raise InvalidRequest(f"the image's description is malformed: {error}", field="image") from None


def recipe_directory() -> Path:
    """Return the directory of the package's recipes, in its source tree or installed by its wheel."""
    source = PACKAGE.parent / "images"
    places = [source, Path(sys.prefix, "share", "jupyter", _RECIPES), *map(Path, jupyter_path(_RECIPES))]
    return next((place for place in places if (place / "base.toml").is_file()), source)


def list_recipes() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return sorted(path.stem for path in recipe_directory().glob("*.toml"))


def find_recipe(name: str) -> Path:
    """Return the file of a recipe, given a path that ends with ``.toml`` or the name of a recipe of the package.

    Raises NotFound, or InvalidRequest for an invalid name.
    """
    if name.endswith(".toml"):
        path = Path(name).expanduser()
    elif _NAME.fullmatch(name):
        path = recipe_directory() / f"{name}.toml"
    else:
        raise InvalidRequest(f"{name[:100]!r} is not a valid recipe name", field="recipe")
    if not path.is_file():
        raise NotFound(
            f"recipe {name!r} does not exist; use the path of a .toml file, or one of: {', '.join(list_recipes())}"
        )
    return path


def read_recipe(path: Path) -> Recipe:
    """Read a recipe and merge in all recipes that it is based on.

    Raises
    ------
    InvalidRequest
        It is malformed, or based on itself.
    NotFound
    """
    return _read_whole(path, ())


def _read_whole(path: Path, below: tuple[Path, ...]) -> Recipe:
    recipe = _read(path)
    if path.resolve() in below or len(below) >= MAX_PARENTS:
        raise InvalidRequest(f"recipe {recipe.name!r} is based on itself, or on too many others", field="from")
    names = [recipe.parents] if isinstance(recipe.parents, str) else recipe.parents
    below = (*below, path.resolve())
    whole: Recipe | None = None
    for name in names:
        beside = path.with_name(f"{name}.toml")
        # A user's recipe may have the same name as the package's recipe that it is based on.
        is_own = beside.is_file() and beside.resolve() != path.resolve()
        parent = _read_whole(beside if is_own else find_recipe(name), below)
        whole = parent if whole is None else _join(whole, parent)
    return recipe if whole is None else _join(whole, recipe)


def explain(error: msgspec.ValidationError, data: Any) -> str:
    """Return the message of a validation error of `data`, with an example in place of a regular expression."""
    found = _PATTERN_ERROR.search(str(error))
    if found is None:
        return str(error)
    keys = re.findall(r"[A-Za-z_]+|\d+", found["path"])
    form = next((_FORMS[key] for key in reversed(keys) if key in _FORMS), "text without NUL characters")
    place = found["path"].removeprefix("$").removeprefix(".")
    if place.endswith("[...]"):  # which of the values is unknown
        return f"a value in {place.removesuffix('[...]')} is empty or contains a NUL character"
    value = data
    for key in keys:
        value = value[int(key)] if isinstance(value, list) else value[key]
    if isinstance(value, dict):  # the error is about one of its keys
        return f"a name in {place} is not valid: it must be {form}"
    return f"{place} is {value!r:.100}, but must be {form}"


def _read(path: Path) -> Recipe:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT + 1)
        if len(data) > MAX_TEXT:
            raise InvalidRequest(f"{path} is larger than the maximum size of a recipe", field="recipe")
        return msgspec.toml.decode(data, type=Recipe)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"recipe {path}: {explain(error, msgspec.toml.decode(data))}", field="recipe") from None
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidRequest(f"recipe {path}: {error}", field="recipe") from None


def _join(first: Recipe, then: Recipe) -> Recipe:
    """Merge two recipes. Where they differ, the second takes precedence."""
    return Recipe(
        name=then.name,
        debian=list(dict.fromkeys((*first.debian, *then.debian))),
        pip=list({_package(pin): pin for pin in (*first.pip, *then.pip)}.values()),
        npm=list({pin.rpartition("@")[0]: pin for pin in (*first.npm, *then.npm)}.values()),
        files={**first.files, **then.files},
        links={**first.links, **then.links},
        env={**first.env, **then.env},
        init=list(dict.fromkeys((*first.init, *then.init))),
        services=list({item.name: item for item in (*first.services, *then.services)}.values()),
        kernels=list({item.name: item for item in (*first.kernels, *then.kernels)}.values()),
    )


def _package(pin: str) -> str:
    return re.split(r"[\[=]", pin, maxsplit=1)[0].lower().replace("_", "-")


def read_environment(lines: Iterable[str]) -> Environment:
    """Parse variables of the form ``NAME=value``. Raises InvalidRequest."""
    try:
        return msgspec.convert(dict(line.partition("=")[::2] for line in lines), Environment)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"a variable of the image is malformed: {error}", field="env") from None


def make_recipe(name: str) -> Recipe:
    """Return an empty recipe with this name. Raises InvalidRequest."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name[:100]!r} is not a valid image name: use lower-case letters, digits, and . _ -", field="name"
        )
    return Recipe(name=name)
