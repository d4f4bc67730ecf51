"""Define the administrator's limits and profiles, and decide what a sandbox may do.

:meth:`Policy.resolve` turns a request into a :class:`~jupyter_agentbox.spec.SandboxSpec`. All decisions are made here.
A request can come from a kernelspec. Its author controls it, and a user's own kernelspec can shadow it. A request
therefore only chooses a profile and *narrows* it; limits and profiles are never read from it. ``policy.profiles`` reads
values, and ``policy.environment`` and ``policy.folders`` decide which parts of the host are visible.

Settings come from these sources; later ones take precedence:

1. the defaults, which are safe;
2. ``jupyter_agentbox_config.py`` and ``.json`` in Jupyter's configuration directories (``jupyter --paths``), from
   ``/etc/jupyter`` up to the user's own. Policy reads these files itself, so they also apply in a plain Python program
   that uses nbclient or papermill. The current directory is not searched, because a sandbox may write there;
3. the configuration of the running application: its own files and its command line.

A file that cannot be read, an unknown setting or a malformed value is an error, so that no sandbox starts under a
guessed policy.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jupyter_core.paths import jupyter_data_dir
from traitlets import Bool, Dict, Enum, Float, Int, List, TraitError, Unicode
from traitlets.config import Config, LoggingConfigurable

from jupyter_agentbox.egress import PROXY_ENV, presets
from jupyter_agentbox.errors import AgentboxError, InvalidConfig, InvalidRequest, PolicyRefused
from jupyter_agentbox.names import HIDDEN_FILES, READ_ONLY_FILES
from jupyter_agentbox.spec import GIB, LIMIT_NAMES, OWN_HOSTS, Grant, Limits, Mount, SandboxSpec, WarmStart
from jupyter_agentbox.storage.images import ImageStore

from .configfiles import file_config, find_enforcing_files
from .consent import FolderRules, HostRules, notebook_path
from .environment import bin_dirs, environment_mounts, is_visible, kernel_environment, user_packages
from .folders import added_targets, check_added, check_mount, check_workspace, is_beneath, private_directories
from .images import check_python, use_image
from .languages import find_kernels, is_kernels_python
from .locales import has_locale
from .profiles import (
    PROFILE_KEYS,
    REQUEST_KEYS,
    Profile,
    did_you_mean,
    expand,
    find_uncovered,
    read,
    read_mounts,
    show,
)
from .project import ProjectPython, find_project_python, find_relative
from .traits import ByteSize, HostPatterns


class Policy(LoggingConfigurable):
    """The administrator's settings: the limits of all sandboxes, and the profiles to choose from.

    Parameters
    ----------
    parent : Configurable, optional
        Its configuration takes precedence over that of the files.
    config : Config, optional
        If given, it is the complete configuration, and no file is read.

    Attributes
    ----------
    is_attended : bool
        Whether a person uses this program, who can allow hosts and add folders. Otherwise callers can allow no more
        than profiles do.
    """

    is_attended = True
    max_memory = ByteSize(4 * GIB, help="Maximum memory of one sandbox, such as ``'8 GiB'``.").tag(config=True)
    max_cpus = Float(4.0, help="Maximum processor time of one sandbox, in processors.").tag(config=True)
    max_processes = Int(512, help="Maximum number of processes and threads in one sandbox.").tag(config=True)
    max_disk = ByteSize(
        20 * GIB,
        help="""Maximum disk space of one sandbox: what it writes outside the notebook's folder, and the contents of a
        private workspace. At the limit, writes fail with "No space left on device" and the kernel continues. The
        notebook's own folder has no such limit; see ``min_free_disk``. The default holds PyTorch with CUDA, which needs
        about 13 GB while pip installs it.""",
    ).tag(config=True)
    min_free_disk = ByteSize(
        None,
        allow_none=True,
        least=0,
        help="""Disk space that must stay free. If less is free on the file system of a sandbox's work folder, or of
        the state directory, a sandbox that fills it is stopped, and writes to sandboxes over REST and MCP are refused.
        The default, ``None``, is 1 GiB or 2 % of the file system, whichever is less. 0 disables the check.""",
    ).tag(config=True)

    allowed_hosts = HostPatterns(
        ("pypi", "npm", "debian", "github", "crates"),
        help="""Hosts that sandboxes may reach: names of presets, and patterns such as ``example.org``,
        ``*.example.org`` (all subdomains, not the name itself), ``example.org:8443``. The default ports are 80 and 443.
        To add to the default: ``c.Policy.allowed_hosts.append('example.org')``.""",
    ).tag(config=True)
    user_may_allow = HostPatterns(
        None,
        allow_none=True,
        has_any_port=True,
        help="""Hosts that a person may allow for a sandbox in addition, in JupyterLab or with
        ``jupyter agentbox egress allow``: names of presets, and patterns as in ``allowed_hosts``, whose port may be
        ``*`` for every port. Names that resolve to private addresses are refused in any case. The default, ``None``,
        is every host (``['*:*']``), and none if ``AgentboxExtension.enforce`` is set. ``[]``: no host. Agents and code
        inside can never allow a host.""",
    ).tag(config=True)
    private_hosts = HostPatterns(
        has_presets=False,
        help="""Patterns of allowed hosts whose names may resolve to private addresses, such as a database in the
        company's network. Include the port: ``db.example.org:5432``. A wildcard allows only ordinary private ranges,
        never this machine, metadata services or other special addresses.""",
    ).tag(config=True)

    profiles = Dict(
        value_trait=Dict(),
        key_trait=Unicode(),
        help="""Named sets of values that users choose from. Keys: ``memory``, ``cpus``, ``processes``, ``disk``,
        ``lease_timeout``, ``freeze_after``, ``allowed_hosts`` (within ``Policy.allowed_hosts``), ``private_hosts``,
        ``user_may_allow`` (within ``Policy.user_may_allow``),
        ``hidden_files`` (``[]`` shows all), ``read_only_files``, ``workspace`` (``'folder'`` or ``'private'``),
        ``env``, ``mounts``, ``root`` (an image directory), ``is_root``, ``runtime``, ``image`` (a name),
        ``python`` (a Python environment of the host, read-only, or ``'.venv'`` in the notebook's folder), ``init``
        (shell commands that run first),
        ``services`` (list of ``{"name": ..., "line": ..., "ready": ...}``), ``preload`` (modules that templates import
        in advance), ``pool_size``. A profile inherits all other values from Policy.
        Everyone who can start a kernel can choose any profile. Example::

            c.Policy.profiles = {
                "default": {"memory": "2 GiB"},
                "offline": {"allowed_hosts": [], "workspace": "private"},
            }""",
    ).tag(config=True)
    default_profile = Unicode("default", help="Profile of requests that do not name one.").tag(config=True)

    allow_root = Bool(
        False, help="Whether profiles may set ``is_root``: code is uid 0 inside, so that ``apt-get install`` works."
    ).tag(config=True)
    hidden_files = List(
        Unicode(),
        list(HIDDEN_FILES),
        help="""Names that are hidden inside, at any depth of the notebook's folder: secrets. A pattern is a name with
        ``*``, ``?`` and ``[...]``, or several separated by slashes (``.config/gcloud``), and is compared without regard
        to case. To add to the default: ``c.Policy.hidden_files.append('*.pem')``. ``['.*']`` hides all names with a
        leading dot.""",
    ).tag(config=True)
    read_only_files = List(
        Unicode(),
        list(READ_ONLY_FILES),
        help="""Names that are visible and cannot be changed inside, at any depth of the notebook's folder, because
        programs outside run them: hooks, start-up files, settings of editors and agents. Patterns as in
        ``hidden_files``, where ``**`` also stands for any number of names. They do not apply in ``node_modules`` and
        ``site-packages``.""",
    ).tag(config=True)
    allowed_workspaces = List(
        Unicode(),
        help="""Folders that may be mounted as work folders, including their subfolders. Empty: any folder except system
        directories, home directories themselves, and folders that other users can write to. The latter two are allowed
        if they are listed here exactly.""",
    ).tag(config=True)
    mounts = Dict(
        key_trait=Unicode(),
        value_trait=Unicode(),
        help="Additional host files or folders to mount read-only: ``{'/data': '/srv/datasets'}`` (inside: host).",
    ).tag(config=True)
    user_may_add_folders = List(
        Unicode(),
        None,
        allow_none=True,
        help="""Folders, including their subfolders, that a person may add to the sandboxes of notebooks, read-only, in
        JupyterLab or with ``jupyter agentbox folder add``. Files that ``hidden_files`` names are hidden in them too.
        The default, ``None``, is any folder except system directories and home directories themselves, and none if
        ``AgentboxExtension.enforce`` is set. ``[]``: no folder. Agents and code inside can never add one.""",
    ).tag(config=True)
    env = Dict(
        key_trait=Unicode(),
        value_trait=Unicode(),
        help="Variables for all sandboxes; a profile's ``env`` overrides them.",
    ).tag(config=True)
    env_passthrough = List(
        Unicode(),
        help="Names of variables to pass on from the server's environment. Code inside can read their values.",
    ).tag(config=True)

    runtime = Unicode("runsc", help="Runtime that isolates sandboxes. There is no fallback.").tag(config=True)
    allowed_runtimes = List(Unicode(), ["runsc"], help="Runtimes that ``runtime`` and profiles may select.").tag(
        config=True
    )
    accept_unenforced = List(
        Enum(LIMIT_NAMES),
        help="""Limits that may stay unenforced on a machine that cannot enforce them, such as ``['cpus']``. Without
        this setting, no sandbox starts on such a machine, and the error names the limit.""",
    ).tag(config=True)
    lease_timeout = Float(
        60.0,
        help="Seconds that a sandbox outlives the Jupyter process that owns it, so that the next process can adopt it.",
    ).tag(config=True)
    freeze_after = Float(
        60.0,
        help="""Seconds of inactivity after which a sandbox is frozen: it uses no processor time, and resumes when it
        is used. A sandbox is inactive if no cell, no command and no process except the kernel runs, nothing is printed,
        no connection is open and no processor time is used. A timer, a scheduled task or a sleeping thread of a Python
        kernel keeps it awake; those of other languages are frozen too. 0 never freezes.""",
    ).tag(config=True)
    park_kernels_after = Float(
        0.0,
        help="""Seconds of inactivity, as for ``freeze_after``, after which a notebook's kernel is parked: it is saved
        to disk, and its memory is freed. The next message to it wakes it. 0 parks only on request.""",
    ).tag(config=True)
    magics = Bool(
        True,
        help="Whether cells can use ``%snapshot``, ``%restore``, ``%snapshots`` and ``%fork``, each alone in its cell.",
    ).tag(config=True)
    kernel_driver = Enum(
        ("auto", "relay"),
        "auto",
        help="""How kernels are reached. With ``auto``, ipykernel communicates with the host directly, which is several
        times faster, and other kernels through a relay in the sandbox. With ``relay``, ipykernel uses the relay too,
        for programs that need its ZeroMQ sockets.""",
    ).tag(config=True)

    idle_timeout = Float(
        1800.0,
        help="""Seconds without use after which a sandbox that an agent or program created ends, unless it requests
        another value. A call counts as use from its start to its end. Reading the sandbox's state does not count, and
        neither does a background process. Notebooks' kernels are culled by Jupyter's own settings.""",
    ).tag(config=True)
    max_idle_timeout = Float(86_400.0, help="Maximum ``idle_timeout`` of a request, in seconds.").tag(config=True)
    max_life = Float(
        604_800.0, help="Maximum seconds that a sandbox of an agent or program may live; a request may set less."
    ).tag(config=True)
    keep_ended_for = Float(
        3600.0,
        help="""Seconds for which the files of a sandbox that ran out of memory or disk, or crashed, are kept, so that
        it can be revived with them. Such a sandbox counts toward its owner's ``max_sandboxes_per_owner``. 0 keeps
        nothing.""",
    ).tag(config=True)
    max_sandboxes = Int(
        50, help="Maximum number of sandboxes of one server, including notebooks. Only REST requests are refused."
    ).tag(config=True)
    max_sandboxes_per_owner = Int(20, help="Maximum number of sandboxes of one owner at a time.").tag(config=True)
    max_ports = Int(
        16,
        help="""Maximum number of TCP ports of one sandbox that are reachable through this server, for everyone who may
        use the sandbox; 0 for none.""",
    ).tag(config=True)
    max_tenant_disk = ByteSize(
        10 * GIB, help="Maximum disk space of one tenant's files. At the limit, its sandboxes can't write."
    ).tag(config=True)
    blocked_commands = List(
        Unicode(),
        help="""Shell patterns of commands that agents may not run, such as ``'git push*'``. This is a guardrail
        against accidents, not a security boundary: code can do the same in other ways.""",
    ).tag(config=True)
    import_folders = Dict(
        key_trait=Unicode(),
        value_trait=Unicode(),
        help="""Host folders from which users of sandboxes can copy files, by name:
        ``{'datasets': '/srv/datasets'}``. None by default.""",
    ).tag(config=True)
    export_folders = Dict(
        key_trait=Unicode(),
        value_trait=Unicode(),
        help="Host folders to which users of sandboxes can copy files, by name. None by default.",
    ).tag(config=True)
    admins = List(
        Unicode(), help="Names of users who can see and manage the sandboxes of all owners, and the whole audit log."
    ).tag(config=True)

    max_token_life = Float(
        86_400.0, help="Maximum lifetime in seconds of a token for one sandbox. The default of a request is one hour."
    ).tag(config=True)

    allowed_images = List(
        Unicode(),
        ["*"],
        help="""Shell patterns of the names of images that profiles and requests may choose. Images must be built or
        imported on this machine: see `jupyter agentbox image list`. ``[]`` allows none.""",
    ).tag(config=True)

    max_snapshots = Int(100, help="Maximum number of snapshots of one owner.").tag(config=True)
    max_snapshot_bytes = ByteSize(20 * GIB, help="Maximum disk space of one owner's snapshots.").tag(config=True)
    snapshot_max_age = Float(
        0.0,
        min=0,
        help="""Seconds after which a server removes a snapshot; 0 keeps all until they are deleted. Parked kernels and
        templates are not removed.""",
    ).tag(config=True)
    snapshot_key_file = Unicode(
        help="""File with a key of 32 bytes or more that encrypts snapshots. Only this user may have access to the file.
        Without it, snapshots are authenticated, but readable by this user."""
    ).tag(config=True)

    templates = Bool(
        True,
        help="""Whether to start Python kernels from templates. A template is a kernel of one environment and profile,
        saved right after its start, before any code runs in it. `jupyter agentbox warm` creates templates, and so does
        a server in the background, after the first start without one.""",
    ).tag(config=True)
    pool_size = Int(
        0,
        min=0,
        max=100,
        help="""Number of Python kernels of each profile in use that a server keeps ready for the next starts; profiles
        may set their own number. Each uses the memory of an idle kernel, and no processor time.""",
    ).tag(config=True)
    pool_max_memory = ByteSize(
        1 * GIB, help="Maximum memory of all kernels in one server's pool. No kernel is added beyond it."
    ).tag(config=True)

    state_dir = Unicode(
        help="""Directory for sandboxes, the audit log and downloaded programs; by default ``agentbox`` in Jupyter's
        data directory. Only this user can enter it, and no sandbox can see it."""
    ).tag(config=True)

    _host_rules: HostRules | None = None
    _folder_rules: FolderRules | None = None

    def __init__(self, **kwargs: Any) -> None:
        parent = kwargs.get("parent")
        if kwargs.get("config") is None:
            config = file_config()
            if parent is not None:
                config.merge(copy.deepcopy(parent.config))
            kwargs["config"] = config
        try:
            super().__init__(**kwargs)
        except TraitError as error:
            raise InvalidConfig(f"the configuration of Policy is invalid: {error}", setting="Policy") from None
        self._check()

    def _load_config(self, cfg: Config, section_names: Any = None, traits: Any = None) -> None:
        names = self.trait_names(config=True)
        for name in self._find_my_config(cfg):
            # traitlets only warns about unknown settings. A misspelled limit would then not be applied.
            if name not in names and not name[:1].isupper():
                raise InvalidConfig(
                    f"unknown setting Policy.{name}{did_you_mean(name, names)}", setting=f"Policy.{name}"
                )
        super()._load_config(cfg, section_names, traits)

    def _check(self) -> None:
        """Reject settings whose values are invalid, or inconsistent with each other."""
        for key in LIMIT_NAMES:
            read({key: getattr(self, f"max_{key}")}, PROFILE_KEYS, f"Policy.max_{key}", InvalidConfig)
        own = {
            name: getattr(self, name)
            for name in ("hidden_files", "read_only_files", "mounts", "env", "lease_timeout", "freeze_after")
        }
        read(own, PROFILE_KEYS, "Policy", InvalidConfig)
        for name in ("park_kernels_after", "keep_ended_for"):
            read({"freeze_after": getattr(self, name)}, PROFILE_KEYS, f"Policy.{name}", InvalidConfig)
        for name in ("idle_timeout", "max_idle_timeout", "max_life", "max_token_life"):
            read({"lease_timeout": getattr(self, name)}, PROFILE_KEYS, f"Policy.{name}", InvalidConfig)
        for name in self.profile_names():
            self.profile(name)
        if self.default_profile not in self.profile_names():
            raise InvalidConfig(
                f"Policy.default_profile {self.default_profile!r} does not exist; profiles are "
                f"{', '.join(self.profile_names())}",
                setting="Policy.default_profile",
            )

    @property
    def allowable_hosts(self) -> tuple[str, ...]:
        """The value of ``user_may_allow``, or its default."""
        chosen: list[str] | None = self.user_may_allow
        if chosen is not None:
            return tuple(chosen)
        return () if self._is_enforced else ("*:*",)

    @property
    def addable_folders(self) -> tuple[str, ...]:
        """The value of ``user_may_add_folders``, or its default."""
        chosen: list[str] | None = self.user_may_add_folders
        if chosen is not None:
            return tuple(os.path.realpath(os.path.expanduser(folder)) for folder in chosen)
        return () if self._is_enforced else ("/",)

    @property
    def _is_enforced(self) -> bool:
        section = self.config.get("AgentboxExtension", {})
        return section.get("enforce", False) is not False or bool(find_enforcing_files())

    @property
    def host_rules(self) -> HostRules:
        """The hosts that a person allowed."""
        if self._host_rules is None or self._host_rules.path.parent != self.state_path:
            self._host_rules = HostRules(self.state_path)
        return self._host_rules

    @property
    def folder_rules(self) -> FolderRules:
        """The folders that a person added."""
        if self._folder_rules is None or self._folder_rules.path.parent != self.state_path:
            self._folder_rules = FolderRules(self.state_path)
        return self._folder_rules

    @property
    def state_path(self) -> Path:
        """Absolute path of the state directory."""
        return Path(os.path.abspath(os.path.expanduser(self.state_dir or os.path.join(jupyter_data_dir(), "agentbox"))))

    def snapshot_secret(self) -> bytes | None:
        """Return the key in ``snapshot_key_file``, or None if the setting is empty. Raises InvalidConfig."""
        if not self.snapshot_key_file:
            return None
        try:
            found = Path(self.snapshot_key_file).expanduser()
            if found.stat().st_mode & 0o077:
                raise ValueError("other users can read it; run chmod 600 on it")
            secret = found.read_bytes().strip()
            if len(secret) < 32:
                raise ValueError("it contains fewer than 32 bytes")
        except (OSError, ValueError) as error:
            raise InvalidConfig(f"Policy.snapshot_key_file: {error}", setting="Policy.snapshot_key_file") from None
        return secret

    def profile_names(self) -> tuple[str, ...]:
        """Return the names of all profiles, which always include ``default``."""
        return tuple(dict.fromkeys(("default", *self.profiles)))

    def profile(self, name: str) -> Profile:
        """Return a profile, with the values that it inherits from Policy.

        Raises
        ------
        InvalidRequest
            No profile has this name.
        InvalidConfig
            The profile is malformed, or exceeds Policy.
        """
        if name not in self.profile_names():
            names = self.profile_names()
            raise InvalidRequest(
                f"profile {name!r} does not exist{did_you_mean(name, names)}; profiles are {', '.join(names)} "
                "(setting: Policy.profiles)",
                field="profile",
                setting="Policy.profiles",
            )
        setting = f"Policy.profiles[{name!r}]"
        values = read(self.profiles.get(name, {}), PROFILE_KEYS, setting, InvalidConfig)
        maxima = {key: getattr(self, f"max_{key}") for key in LIMIT_NAMES}
        limits = {key: values.get(key, min(getattr(Limits(), key), maxima[key])) for key in LIMIT_NAMES}
        for key in LIMIT_NAMES:
            if limits[key] > maxima[key]:
                raise InvalidConfig(
                    f"{setting}[{key!r}] is {show(key, limits[key])}, more than Policy.max_{key} "
                    f"({show(key, maxima[key])})",
                    setting=f"Policy.max_{key}",
                )
        runtime = values.get("runtime", self.runtime)
        if runtime not in self.allowed_runtimes:
            named = f"{setting}['runtime']" if "runtime" in values else "Policy.runtime"
            raise InvalidConfig(
                f"{named} is {runtime!r}, which is not in Policy.allowed_runtimes", setting="Policy.allowed_runtimes"
            )
        if values.get("is_root") and not self.allow_root:
            raise InvalidConfig(f"{setting}['is_root'] requires Policy.allow_root", setting="Policy.allow_root")
        return Profile(
            name=name,
            limits=Limits(**limits),
            hosts=self._profile_hosts(values, "allowed_hosts", setting),
            private_hosts=self._profile_hosts(values, "private_hosts", setting),
            user_may_allow=expand(self._profile_hosts(values, "user_may_allow", setting)),
            hosts_setting=f"{setting}['allowed_hosts']" if "allowed_hosts" in values else "Policy.allowed_hosts",
            runtime=runtime,
            root=values.get("root"),
            is_root=values.get("is_root", False),
            hidden=values.get("hidden_files", tuple(self.hidden_files)),
            read_only=values.get("read_only_files", tuple(self.read_only_files)),
            is_private=values.get("workspace", False),
            env={**self.env, **values.get("env", {})},
            mounts=(*read_mounts(self.mounts), *values.get("mounts", ())),
            lease_timeout=values.get("lease_timeout", self.lease_timeout),
            freeze_after=values.get("freeze_after", self.freeze_after),
            **{key: values[key] for key in ("image", "python", "init", "services") if key in values},
            warm=WarmStart(Limits(**limits), values.get("preload", ()), values.get("pool_size", self.pool_size)),
        )

    def _profile_hosts(self, values: Mapping[str, Any], key: str, setting: str) -> tuple[str, ...]:
        """Return a profile's host patterns, or else Policy's. A profile's patterns must be within Policy's."""
        ceiling = self.allowable_hosts if key == "user_may_allow" else tuple(getattr(self, key))
        entries: tuple[str, ...] = values.get(key, ceiling)
        if (entry := find_uncovered(entries, ceiling)) is not None:
            raise InvalidConfig(
                f"{setting}[{key!r}] contains {entry!r}, which Policy.{key} does not allow", setting=f"Policy.{key}"
            )
        return entries

    def choose(self, profile: Profile, requested: Mapping[str, Any]) -> Profile:
        """Return a profile completed with its root, Python, kernels, environment, init lines and services.

        Parameters
        ----------
        profile : Profile
        requested : mapping
            The request.

        Raises
        ------
        InvalidConfig, InvalidRequest, NotFound
            The image does not exist, or the choices contradict each other.
        PolicyRefused
            Policy does not allow the image, whether or not it exists.
        """
        setting = f"Policy.profiles[{profile.name!r}]"
        if profile.image is not None and profile.root is not None:
            raise InvalidConfig(f"{setting} has both 'image' and 'root'; remove one", setting=setting)
        image = requested.get("image", profile.image)
        if image not in (None, profile.image) and (profile.root is not None or profile.image is not None):
            raise PolicyRefused(
                f"Cannot use image {image!r}: profile {profile.name!r} has its own root. Choose another profile",
                field="image",
                setting=f"{setting}['image']",
            )
        python = requested.get("python", profile.python)
        if python is not None and (image is not None or profile.root is not None):
            error: type[InvalidRequest | InvalidConfig] = InvalidRequest if "python" in requested else InvalidConfig
            raise error(
                "'python' selects an environment of the host, but the image has its own. Choose one", field="python"
            )
        if image is not None:
            return use_image(profile, image, ImageStore(self.state_path), self.allowed_images)
        if profile.root is not None:
            return replace(profile, python="python3")
        path = str(python) if python is not None else sys.executable
        if python is not None and os.path.isabs(path):
            check_python(path)
        return replace(profile, python=path, kernels=find_kernels(path))

    def chosen_profile(self, name: str, image: str) -> Profile:
        """Return a profile under today's policy, with a sandbox's image. Raises the same errors as :meth:`choose`."""
        profile = self.profile(name)
        is_free = profile.image is None and profile.root is None
        return self.choose(profile, {"image": image} if image and is_free else {})

    def may_use(self, folder: Path) -> bool:
        """Return whether a folder that need not exist yet could be a work folder."""
        private = (*private_directories(), self.state_path)
        try:
            check_workspace(folder, (), allowed=self.allowed_workspaces, private=private, must_exist=False)
        except AgentboxError:
            return False
        return True

    def resolve(
        self,
        request: Mapping[str, Any] | None = None,
        *,
        workspace: str | Path | None = None,
        executable: str | None = None,
        resource_dir: str | Path | None = None,
        kernelspec_env: Mapping[str, str] | None = None,
        launch_env: Mapping[str, str] | None = None,
        kernel_id: str = "",
        notebook: str = "",
        owner: str = "",
        private: Sequence[Path] = (),
    ) -> SandboxSpec:
        """Return the complete spec of a sandbox for a request.

        Parameters
        ----------
        request : mapping, optional
            The user's request; see :data:`~jupyter_agentbox.policy.profiles.REQUEST_KEYS`. Untrusted.
        workspace : path, optional
            Folder to mount writable at ``/workspace``; None for a private one.
        executable : str, optional
            The kernel's program: an absolute path on the host or a name on PATH.
        resource_dir : path, optional
            The kernelspec's directory.
        kernelspec_env, launch_env : mapping, optional
            The kernelspec's ``env``, and the environment given to the launch call. Untrusted.
        kernel_id, owner : str
            Labels.
        notebook : str
            Path of the notebook on the host, if it is known. The hosts that a person allowed for it are granted.
        private : sequence of Path
            Directories that no sandbox may see, such as a state directory that was moved.

        Raises
        ------
        InvalidRequest
            The request has an unknown key or profile, or a malformed value.
        PolicyRefused
            The request exceeds policy. The error names the field and the setting.
        """
        requested = read(request or {}, REQUEST_KEYS, "the request for a sandbox", InvalidRequest)
        profile = self.profile(requested.get("profile", self.default_profile))
        if workspace is not None:
            # Before anything looks at it: code inside may have made it.
            if (python := requested.get("python", profile.python)) and (own := find_relative(workspace, str(python))):
                requested["python"] = _or_servers(workspace, own)
            if executable not in (None, sys.executable) and (own := find_relative(workspace, str(executable))):
                requested.setdefault("python", _or_servers(workspace, own))
                executable = None
            python = requested.get("python", profile.python)
            if python is not None and not os.path.isabs(str(python)):
                requested["python"] = _or_servers(workspace, str(python))
        profile = self.choose(profile, requested)
        if profile.python != sys.executable and executable in (None, sys.executable):
            executable = str(profile.python)
        elif profile.python == sys.executable and executable is not None and is_kernels_python(executable):
            profile = replace(profile, python=executable, kernels=find_kernels(executable))
        limits = self._narrow_limits(profile, requested)
        hidden = tuple(dict.fromkeys((*profile.hidden, *requested.get("hidden_files", ()))))
        read_only = tuple(dict.fromkeys((*profile.read_only, *requested.get("read_only_files", ()))))
        private_dirs = (*private_directories(), self.state_path, *private)
        folder = None
        if workspace is not None and not (profile.is_private or requested.get("workspace", False)):
            folder, hidden = check_workspace(
                Path(workspace), hidden, allowed=self.allowed_workspaces, private=private_dirs
            )
        project = None
        if profile.root is None and not os.path.isabs(str(profile.python)):
            project = self._find_project(str(profile.python), profile, folder, private_dirs)
            if executable == str(profile.python):
                executable = None
            profile = replace(profile, python=project.python, kernels=find_kernels(project.python))
        is_projects = project is not None and executable is None
        packages = user_packages(executable) if profile.root is None and not is_projects else None
        mounts = self._mounts(profile, executable, resource_dir, private_dirs)
        if project is not None:
            mounts = (*mounts, *(mount for mount in project.mounts if mount not in mounts))
        env = kernel_environment(
            os.environ,
            limits=limits,
            bin_dirs=self._find_bin_dirs(profile, None if is_projects else executable, project),
            is_visible=lambda path: is_visible(path, profile.root, mounts),
            has_locale=lambda name: has_locale(name, profile.root),
            passthrough=self.env_passthrough,
            request=launch_env,
            templates=kernelspec_env,
            profile={
                **({"PYTHONPATH": packages} if packages else {}),
                **profile.env,
                **(project.env if project is not None else {}),
            },
            egress={**presets.pip_environment(), **PROXY_ENV},
        )
        if project is not None and project.import_dirs:
            env["PYTHONPATH"] = ":".join(filter(None, (env.get("PYTHONPATH"), *project.import_dirs)))
        spec = SandboxSpec(
            profile=profile.name,
            limits=limits,
            grant=self._narrow_hosts(profile, requested),
            root=profile.root,
            mounts=mounts,
            workspace=folder,
            hidden=hidden,
            read_only=read_only,
            env=env,
            is_root=profile.is_root,
            accept_unenforced=frozenset(self.accept_unenforced),
            lease_timeout=self._narrow(profile, "lease_timeout", profile.lease_timeout, requested),
            freeze_after=profile.freeze_after,
            min_free_disk=self.min_free_disk,
            driver=self.kernel_driver,
            kernel_id=kernel_id,
            notebook=notebook_path(notebook),
            owner=owner,
            runtime=profile.runtime,
            warm=profile.warm if self.templates or profile.warm.pool_size else None,
            image=profile.image or "",
            python=str(profile.python),
            kernels=profile.kernels,
            init=profile.init,
            services=profile.services,
        )
        return self.with_consent(spec)

    def with_consent(self, spec: SandboxSpec) -> SandboxSpec:
        """Return a spec with the hosts that a person allowed for its kernel, its notebook or its profile.

        Only hosts that policy lets a person allow today are granted. A sandbox with hosts of its own request gets only
        those for its kernel. Blocks briefly. Raises the same errors as :meth:`profile`.
        """
        possible = self.profile(spec.profile).user_may_allow
        found = self.host_rules.hosts(
            kernel=spec.kernel_id or spec.consent_id,
            notebook="" if spec.grant.setting == OWN_HOSTS else spec.notebook,
            profile=None if spec.grant.setting == OWN_HOSTS else spec.profile,
        )
        hosts = tuple(host for host in found if find_uncovered([host], possible) is None)
        may_allow = possible if self.is_attended else ()
        return replace(spec, grant=replace(spec.grant, user_hosts=hosts, may_allow=may_allow))

    def check_added(self, source: Path, workspace: Path | None) -> Path:
        """Check that a person may add a folder to the sandbox of a notebook. Return its path without links.

        Raises
        ------
        InvalidRequest, PolicyRefused
        """
        real = check_added(source.expanduser(), workspace, (*private_directories(), self.state_path))
        if not is_beneath(str(real), self.addable_folders):
            raise PolicyRefused(
                f"Cannot add {source}: ask your administrator to add it to Policy.user_may_add_folders, or to "
                "Policy.mounts",
                field="source",
                setting="Policy.user_may_add_folders",
            )
        return real

    def with_folders(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec of a notebook's sandbox with the folders that a person added for it or for its profile.

        A folder that no longer exists, or that policy no longer lets a person add, is left out with a warning. Blocks
        briefly.
        """
        mounts: list[Mount] = []
        for rule in self.folder_rules.of(notebook=spec.notebook, profile=spec.profile):
            try:
                source = self.check_added(Path(rule.source), spec.workspace)
            except AgentboxError as error:
                self.log.warning("the folder %s is not shown in the sandbox: %s", rule.source, error)
                continue
            for target in added_targets(source, spec.workspace):
                # A mount of the administrator takes precedence, and of two folders the one that was added first.
                if not any(_hides(mount, source, target) for mount in (*spec.mounts, *mounts)):
                    mounts.append(Mount(source, target, is_added=True))
        return replace(spec, mounts=(*spec.mounts, *mounts))

    def _find_project(
        self, environment: str, profile: Profile, folder: Path | None, private: Sequence[Path]
    ) -> ProjectPython:
        if folder is None:
            raise InvalidRequest(
                f"Cannot use {environment} as the sandbox's Python: it is a path in the notebook's folder, and this"
                " sandbox has a private one. Use an absolute path",
                field="python",
            )
        return find_project_python(folder, environment, mounts=profile.mounts, private=private)

    def _find_bin_dirs(
        self, profile: Profile, executable: str | None, project: ProjectPython | None
    ) -> tuple[str, ...]:
        if project is not None:
            return (*project.bin_dirs, *(() if executable is None else bin_dirs(executable)))
        return bin_dirs(executable) if profile.root is None else ()

    def _narrow_limits(self, profile: Profile, requested: Mapping[str, Any]) -> Limits:
        changes = {key: self._narrow(profile, key, getattr(profile.limits, key), requested) for key in LIMIT_NAMES}
        return replace(profile.limits, **changes)

    def _narrow(self, profile: Profile, key: str, ceiling: float, requested: Mapping[str, Any]) -> Any:
        value = requested.get(key, ceiling)
        if value > ceiling:
            own = f"max_{key}" if key in LIMIT_NAMES else key
            is_own = ceiling == getattr(self, own) and key not in self.profiles.get(profile.name, {})
            setting = f"Policy.{own}" if is_own else f"Policy.profiles[{profile.name!r}][{key!r}]"
            raise PolicyRefused(
                f"{key} of {show(key, value)} is more than the {show(key, ceiling)} that profile {profile.name!r} "
                f"allows (setting: {setting})",
                field=key,
                setting=setting,
            )
        return value

    def _narrow_hosts(self, profile: Profile, requested: Mapping[str, Any]) -> Grant:
        hosts: tuple[str, ...] = requested.get("allowed_hosts", profile.hosts)
        if (entry := find_uncovered(hosts, profile.hosts)) is not None:
            raise PolicyRefused(
                f"host {entry!r} is not allowed by profile {profile.name!r} (setting: {profile.hosts_setting})",
                field="allowed_hosts",
                setting=profile.hosts_setting,
            )
        setting = OWN_HOSTS if "allowed_hosts" in requested else profile.hosts_setting
        return Grant(hosts=expand(hosts), private_hosts=profile.private_hosts, setting=setting)

    def narrow_grant(self, profile: str, hosts: Sequence[str]) -> Grant:
        """Return a grant for these hosts within a profile, for a sandbox that already runs.

        Blocks, because presets query package clients.

        Raises
        ------
        InvalidRequest
            A pattern is malformed.
        PolicyRefused
            The profile does not allow a host.
        """
        requested = read({"allowed_hosts": list(hosts)}, REQUEST_KEYS, "the request", InvalidRequest)
        return self._narrow_hosts(self.profile(profile), requested)

    def _mounts(
        self, profile: Profile, executable: str | None, resource_dir: str | Path | None, private: Sequence[Path]
    ) -> tuple[Mount, ...]:
        """Return the read-only mounts of a sandbox. An image contains its own programs and needs none of the host's."""
        for mount in profile.mounts:
            if not mount.source.exists():
                raise InvalidConfig(f"Policy.mounts: {mount.source} does not exist", setting="Policy.mounts")
            check_mount(mount.source, private)
        if profile.root is not None:
            if not profile.root.is_dir():
                raise InvalidConfig(
                    f"the image directory {profile.root} of profile {profile.name!r} does not exist",
                    setting=f"Policy.profiles[{profile.name!r}]['root']",
                )
            return profile.mounts
        directory = None if resource_dir is None else Path(resource_dir)
        found = environment_mounts(executable, private=private, resource_dir=directory)
        taken = {mount.target for mount in profile.mounts}
        # Folders that are mounted anyway, such as an installation in Policy.mounts that contains the needed program.
        shown = [mount.target for mount in profile.mounts if str(mount.source) == mount.target]
        needed = (item for item in found if item.target not in taken and not is_beneath(item.target, shown))
        return (*needed, *profile.mounts)


def _hides(mount: Mount, source: Path, target: str) -> bool:
    """Return whether a mount makes another one at `target` impossible or unnecessary."""
    if str(mount.source) == mount.target and str(source) == target:
        return is_beneath(target, [mount.target])  # the folder is visible already
    return is_beneath(target, [mount.target]) or is_beneath(mount.target, [target])


def _or_servers(folder: str | Path, environment: str) -> Path:
    """Return an environment's path in a folder, or the server's interpreter if it is the server's own environment."""
    is_servers = os.path.realpath(os.path.join(folder, environment)) == os.path.realpath(sys.prefix)
    return Path(sys.executable) if is_servers else Path(environment)
