"""Define which names of a work folder a sandbox does not see, and which it sees but cannot write.

The table has three classes. *Hidden* names are secrets: tokens, keys, histories, private state of browsers and clouds.
*Read-only* names are what programs of the host run on their own: hooks, start-up files, settings of editors and agents.
Everything else is an ordinary file, tools such as ``.venv``, ``.git``, ``.pytest_cache`` included.

:class:`Names` decides by the table. The launcher, the file operations and the file browser use it. It may use only the
standard library, and imports as little as possible, because the launcher loads it during each start.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would be slow
    from collections.abc import Iterable, Sequence
    from typing import Any

#: Names that sandboxes do not see. ``.envrc`` is not among them: it is read-only.
HIDDEN_FILES = (
    # variables and tokens of projects
    ".env", ".env.*", ".env-*", ".env_*", ".envs", ".streamlit/secrets.toml", ".Renviron", ".vault-token", ".dev.vars",
    # keys, passwords, logins
    ".ssh", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", ".gnupg", ".password-store", ".netrc", "_netrc", ".pgpass",
    ".my.cnf", ".mylogin.cnf", ".git-credentials", ".htpasswd", ".local/share/keyrings", ".pki", ".Xauthority",
    # package indexes and registries
    ".pypirc", ".npmrc", ".yarnrc.npm", ".config/pip", ".pip", ".cargo/credentials", ".cargo/credentials.toml",
    ".gem/credentials", ".docker", ".dockercfg", ".config/containers", ".m2/settings.xml", ".gradle/gradle.properties",
    # clouds and services
    ".aws", ".azure", ".boto", ".gsutil", ".s3cfg", ".oci", ".aliyun", ".bluemix", ".kube", ".databrickscfg",
    ".snowflake", ".snowsql", ".kaggle", ".huggingface", ".cache/huggingface/token", ".cache/huggingface/stored_tokens",
    ".terraform.d", ".terraformrc", ".heroku", ".fly", ".modal.toml", ".wandb/settings", ".config/gcloud", ".config/gh",
    ".config/glab-cli", ".config/hub", ".config/op", ".config/rclone", ".config/doctl", ".config/heroku",
    ".config/sops", ".config/wandb", ".config/configstore",
    # private lives of browsers and shells
    ".mozilla", ".thunderbird", ".config/google-chrome", ".config/chromium", ".config/BraveSoftware",
    ".config/microsoft-edge", ".*_history", ".lesshst",
)  # fmt: skip

#: Files of a Git directory that name programs, or where other such files are.
GIT_FILES = ("hooks", "config", "config.worktree", "commondir")

#: Names that sandboxes see and cannot write, because programs of the host run what they contain.
READ_ONLY_FILES = (
    # Git
    *(f"{folder}/{name}" for folder in (".git", ".git/modules/**", ".git/worktrees/*") for name in GIT_FILES),
    ".gitmodules", ".gitconfig", ".config/git", ".githooks", ".husky", ".lefthook", ".lefthook.yml", "lefthook.yml",
    ".pre-commit-config.yaml", ".pre-commit-hooks.yaml",
    # editors and development environments
    ".vscode", "*.code-workspace", ".idea", ".fleet", ".zed", ".devcontainer", ".devcontainer.json", ".vim", ".vimrc",
    ".exrc", ".nvimrc", ".nvim.lua", ".config/nvim", ".emacs", ".emacs.d", ".dir-locals.el", ".gdbinit", ".lldbinit",
    # agents
    ".claude", ".claude.json", ".mcp.json", ".cursor", ".codex", ".gemini", ".windsurf", ".continue", ".opencode",
    ".aider.conf.yml",
    # shells and what they run
    ".envrc", ".mise.toml", ".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile",
    ".zshrc", ".zshenv", ".zprofile", ".zlogin", ".zlogout", ".kshrc", ".cshrc", ".tcshrc", ".login", ".logout",
    ".inputrc", ".tmux.conf", ".screenrc", ".curlrc", ".wgetrc", ".condarc", ".mambarc", ".config/fish",
    ".config/autostart", ".config/systemd", ".config/environment.d", ".config/direnv", ".xprofile", ".xsession",
    ".xsessionrc", ".xinitrc", ".pam_environment", ".local/bin", ".local/share/applications",
    # Python, Jupyter, R and Julia
    ".jupyter", ".ipython", "jupyter_*config.py", "jupyter_*config.json", "ipython_*config.py", ".jupytext.py",
    ".pythonrc", ".pythonrc.py", ".pdbrc", ".pdbrc.py", ".config/matplotlib", ".local/share/jupyter", ".Rprofile",
    ".julia/config",
)  # fmt: skip

#: Folders of installed packages. No one opens a project there, so read-only names are ordinary beneath them.
PACKAGE_FOLDERS = frozenset({"node_modules", "site-packages"})

HIDDEN, READ_ONLY = "hidden", "read-only"
#: An entry that contains read-only names if it is a folder. Anything else in its place counts as read-only.
PARENT = "parent"

#: Part of the state of a folder that is in one of :data:`PACKAGE_FOLDERS`, and the states that have no other part.
_NO_READ_ONLY = ("", ())
_PLAIN = ((), (_NO_READ_ONLY,))


class Names:
    """The classes of names, compared at any depth and without regard to case.

    A pattern is a name with ``*``, ``?`` and ``[...]``, or several separated by slashes. ``**`` stands for any number
    of names. What is beneath a matching folder has the class of the folder.

    Parameters
    ----------
    hidden, read_only : sequence of str
        Patterns. A name that both match is hidden.
    """

    def __init__(self, hidden: "Sequence[str]" = (), read_only: "Sequence[str]" = ()) -> None:
        self.hidden, self.read_only = tuple(hidden), tuple(read_only)
        #: Names of a Git directory that must not be created if they do not exist.
        self.git_files = GIT_FILES
        self._exact: dict[str, str] = {}
        self._wild: list[tuple[Any, str]] = []
        self._chains: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
        self._wild_chains: list[tuple[str, tuple[str, ...]]] = []
        for kind, patterns in ((READ_ONLY, self.read_only), (HIDDEN, self.hidden)):
            for pattern in patterns:
                parts = tuple(pattern.lower().strip("/").split("/"))
                if len(parts) > 1 and not _is_wild(parts[0]):
                    self._chains.setdefault(parts[0], []).append((kind, parts[1:]))
                elif len(parts) > 1:
                    self._wild_chains.append((kind, parts))
                elif _is_wild(parts[0]):
                    self._wild.append((_make_test(parts[0]), kind))
                else:
                    self._exact[parts[0]] = kind
        firsts = [pattern.lower().split("/")[0] for pattern in (*self.hidden, *self.read_only)]
        # What matches must begin or end so. A pattern without such a beginning or end has an empty beginning.
        self._suffixes = tuple({first[1:] for first in firsts if first[:1] == "*" and not _is_wild(first[1:])})
        self._prefixes = tuple({_prefix(first) for first in firsts if first[1:] not in self._suffixes})

    def __bool__(self) -> bool:
        return bool(self.hidden or self.read_only)

    def step(self, state: "tuple[Any, ...]", name: str) -> "tuple[str, tuple[Any, ...]]":
        """Classify an entry of a folder.

        Parameters
        ----------
        state : tuple
            The folder's state, from the step to the folder; empty for the work folder.
        name : str
            Name of the entry.

        Returns
        -------
        str, tuple
            :data:`HIDDEN`, :data:`READ_ONLY`, :data:`PARENT`, or an empty string for an ordinary name; and the entry's
            state.
        """
        low = name.lower()
        if state in _PLAIN and not low.startswith(self._prefixes) and not low.endswith(self._suffixes):
            return "", (_NO_READ_ONLY,) if low in PACKAGE_FOLDERS else state
        kinds, following = [self._exact.get(low, "")], []
        kinds += [kind for test, kind in self._wild if test(low)]
        for kind, rest in (*state, *((kind, chain) for kind, chain in self._wild_chains)):
            if not rest:
                continue
            if rest[0] == "**":
                following.append((kind, rest))
                rest = rest[1:]
            if _make_test(rest[0])(low):
                if len(rest) == 1:
                    kinds.append(kind)
                else:
                    kinds.append(PARENT if kind == READ_ONLY else "")
                    following.append((kind, rest[1:]))
        if low in self._chains:
            following += self._chains[low]
            kinds.append(PARENT if any(kind == READ_ONLY for kind, _ in self._chains[low]) else "")
        if low in PACKAGE_FOLDERS or _NO_READ_ONLY in state:
            following = [item for item in following if item[0] == HIDDEN] + [_NO_READ_ONLY]
        if _NO_READ_ONLY in state:
            kinds = [kind for kind in kinds if kind == HIDDEN]
        found = next((kind for kind in (HIDDEN, READ_ONLY, PARENT) if kind in kinds), "")
        return found, tuple(dict.fromkeys(following))

    def classify(self, parts: "Iterable[str]") -> "tuple[str, tuple[str, ...]]":
        """Return the class of a path, and the path to the entry that gives it this class; empty for an ordinary path.

        :data:`PARENT` is returned only for the last name.
        """
        state: tuple[Any, ...] = ()
        passed: list[str] = []
        kind = read_only = ""
        where: tuple[str, ...] = ()
        for part in parts:
            kind, state = self.step(state, part)
            passed.append(part)
            if kind == HIDDEN:
                return HIDDEN, tuple(passed)
            if kind == READ_ONLY and not read_only:
                read_only, where = READ_ONLY, tuple(passed)
        return (read_only, where) if read_only else (kind, tuple(passed) if kind else ())

    def is_hidden(self, parts: "Iterable[str]") -> bool:
        """Return whether a path is hidden."""
        return self.classify(parts)[0] == HIDDEN


def _is_wild(text: str) -> bool:
    return any(char in text for char in "*?[")


def _prefix(first: str) -> str:
    return first[: min([first.find(char) for char in "*?[" if char in first], default=len(first))]


def _make_test(pattern: str) -> "Any":
    """Return a predicate on names in lower case. A pattern with one star does not import regular expressions."""
    if not _is_wild(pattern):
        return pattern.__eq__
    before, star, after = pattern.partition("*")
    if star and not _is_wild(before + after):
        size = len(before) + len(after)
        return lambda name: name.startswith(before) and name.endswith(after) and len(name) >= size
    import fnmatch

    return lambda name: fnmatch.fnmatchcase(name, pattern)
