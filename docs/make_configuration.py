"""Write ``docs/configuration.md`` from the settings themselves: ``python docs/make_configuration.py``.

A test fails when the page is not what this makes.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

from traitlets import Enum, TraitType

from jupyter_agentbox.jupyter.contents import AgentboxContentsManager
from jupyter_agentbox.jupyter.extension import AgentboxExtension
from jupyter_agentbox.jupyter.kernelspecs import AgentboxKernelSpecManager
from jupyter_agentbox.jupyter.terminals import AgentboxTerminalManager
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.policy.profiles import PROFILE_KEYS, REQUEST_KEYS
from jupyter_agentbox.policy.traits import ByteSize
from jupyter_agentbox.runtimes.docker.runtime import DockerRuntime
from jupyter_agentbox.runtimes.runsc.runtime import RunscRuntime
from jupyter_agentbox.spec import format_size

PAGE = Path(__file__).with_name("configuration.md")

HEAD = """\
<!-- Made by docs/make_configuration.py: change the help texts of the settings, and run it. -->

# Configuration

The defaults are safe, and none of this is needed to begin. Settings are written as for every Jupyter program, in
`jupyter_agentbox_config.py`:

```python
c.Policy.allowed_hosts.append("example.org")  # presets stay allowed
c.Policy.max_memory = "8 GiB"
c.Policy.profiles = {
    "default": {"memory": "2 GiB"},
    "large": {"memory": "8 GiB", "cpus": 4},
    "offline": {"allowed_hosts": [], "workspace": "private"},
}
```

or in `jupyter_agentbox_config.json`:

```json
{"Policy": {"max_memory": "8 GiB"}}
```

`jupyter agentbox doctor` reads them as a kernel's start does, and tells what is wrong. A setting that is unknown,
malformed or wider than its ceiling is an error, and so is a file that cannot be read: nothing starts on a guess.

## Where settings come from

Later ones win:

1. the defaults;
2. `jupyter_agentbox_config.py`, then `.json`, in the configuration directories that `jupyter --paths` shows, from the
   last one (`/etc/jupyter`) to the first. The package reads them itself, so they hold in a plain Python program that
   uses nbclient or papermill too. The current directory is none of them, as a sandbox may write there;
3. the settings of the running application: its own configuration files, and its command line, as in
   `jupyter lab --Policy.max_memory='1 GiB'`.

## Ceilings, profiles, requests

*Policy* sets ceilings. A *profile* is a named set of values within them; it has from Policy what it leaves out, and
`default` always exists. A *request* chooses a profile and narrows it. It stands in a kernelspec, whose author may be
anybody:

```json
{"metadata": {"kernel_provisioner": {
  "provisioner_name": "agentbox-provisioner",
  "config": {"profile": "large", "memory": "4 GiB", "allowed_hosts": ["pypi"]}
}}}
```

A request for more than its profile has is refused, with the setting that would have to change. So is an unknown key.

"""

KEYS = {
    "profile": "name of the profile",
    "memory": "bytes, or text such as `512 MiB`; units are powers of 1024",
    "cpus": "processors' worth of time, such as `0.5`",
    "processes": "processes and threads",
    "disk": "like `memory`; for what is written outside of the notebook's own folder",
    "allowed_hosts": "patterns, presets; a request's within its profile's, a profile's within `Policy.allowed_hosts`",
    "hidden_files": "patterns of names; a request adds some, a profile replaces `Policy.hidden_files`",
    "workspace": "`folder`, the notebook's own, or `private`; a request can only make it private",
    "lease_timeout": "seconds",
    "freeze_after": "seconds of quiet after which it is frozen; 0 for never",
    "private_hosts": "patterns within `Policy.private_hosts`",
    "runtime": "one of `Policy.allowed_runtimes`",
    "root": "an image directory, absolute",
    "is_root": "`true` needs `Policy.allow_root`",
    "env": "variables for code inside; proxies always lead to the egress gate",
    "mounts": "paths inside to host paths, read-only",
    "image": "name of an image, or `name@address`; see [images](images.md)",
    "python": "a Python environment of the host's, absolute, shown read-only; needs ipykernel in it",
    "init": "lines for the shell that run before the first kernel",
    "services": 'name to a line for the shell, or to `{"line": ..., "ready": ..., "timeout": seconds}`',
    "preload": "modules that kernels started ahead have imported",
    "pool_size": "kernels of it that a server has waiting; see `Policy.pool_size`",
}


def make() -> str:
    """Return the page."""
    lines = ["| key | in a request | in a profile | value |", "|---|---|---|---|"]
    for key, text in KEYS.items():
        marks = ["yes" if key in keys else "" for keys in (REQUEST_KEYS, PROFILE_KEYS)]
        lines.append(f"| `{key}` | {marks[0]} | {marks[1]} | {text} |")
    assert set(KEYS) == {*REQUEST_KEYS, *PROFILE_KEYS}
    page = HEAD + "\n".join(lines) + "\n"
    jupyter = (AgentboxKernelSpecManager, AgentboxExtension, AgentboxTerminalManager, AgentboxContentsManager)
    for owner in (Policy, RunscRuntime, DockerRuntime, *jupyter):
        page += f"\n## {owner.__name__}\n"
        traits = {
            name: trait
            for name, trait in owner.class_traits(config=True).items()
            if trait.this_class is not None and trait.this_class.__module__.startswith("jupyter_agentbox.")
        }
        for name, trait in traits.items():
            text = inspect.cleandoc(trait.help).replace("::\n", ":\n")
            page += f"\n### {owner.__name__}.{name}\n\n*{kind_of(trait)}*\n\n{text}\n"
    return page


def kind_of(trait: TraitType[Any, Any]) -> str:
    """Write a trait's type and default in words."""
    default = trait.default_value if isinstance(trait, ByteSize) else trait.default()
    shown = f"'{format_size(default)}'" if isinstance(trait, ByteSize) and default is not None else repr(default)
    kind = " or ".join(f"`{value}`" for value in trait.values or ()) if isinstance(trait, Enum) else trait.info()
    return f"{kind.removeprefix('a ').removeprefix('an ')}; default: `{shown}`"


if __name__ == "__main__":
    PAGE.write_text(make())
    sys.exit(0)
