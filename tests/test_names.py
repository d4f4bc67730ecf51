"""Which names of a work folder are hidden, read-only or ordinary."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_agentbox.names import HIDDEN_FILES, READ_ONLY_FILES, Names

DEFAULT = Names(HIDDEN_FILES, READ_ONLY_FILES)


@pytest.mark.parametrize(
    ("kind", "paths"),
    [
        (
            "hidden",
            ".env .env.local deep/down/.env .ENV .envs/prod .ssh/id_rsa .aws .netrc .npmrc .pypirc .git-credentials"
            " .config/gcloud/key .docker/config.json .bash_history .python_history .kube .gnupg .azure id_ed25519"
            " node_modules/x/.env .vscode/.env .streamlit/secrets.toml",
        ),
        (
            "read-only",
            ".envrc .git/hooks .git/hooks/pre-commit deep/.git/config .GIT/Hooks .git/config.worktree .git/commondir"
            " .git/modules/a/b/hooks/x .git/modules/a/modules/b/config .git/worktrees/w/commondir .gitmodules"
            " .vscode/tasks.json .idea .pre-commit-config.yaml .claude/settings.json .mcp.json .bashrc .profile"
            " jupyter_config.py jupyter_server_config.py jupyter_lab_config.json .ipython/profile_default/startup/x.py"
            " .Rprofile .husky/pre-commit",
        ),
        ("parent", ".git deep/.git .config .git/modules .git/worktrees"),
        (
            "",
            ".venv .venv/bin/python .git/HEAD .git/refs/heads/config .git/objects/ab .gitignore .github/workflows/x"
            " node_modules/.bin/hi target/debug/.fingerprint/x .pytest_cache .coverage .ipynb_checkpoints/x env"
            " environment.yml .streamlit/config.toml .config/myapp node_modules/x/.vscode hooks config"
            " lib/site-packages/x/.idea/y jupyter_notebook.py .python-version .ruff_cache .dockerignore",
        ),
    ],
)
def test_the_table(kind: str, paths: str) -> None:
    for path in paths.split():
        assert (path, DEFAULT.classify(path.split("/"))[0]) == (path, kind)


def test_the_entry_that_gives_the_class_is_named() -> None:
    assert DEFAULT.classify(["a", ".ssh", "keys", ".env"]) == ("hidden", ("a", ".ssh"))
    assert DEFAULT.classify(["a", ".vscode", "b", ".env"]) == ("hidden", ("a", ".vscode", "b", ".env"))
    assert DEFAULT.classify(["a", ".git", "hooks", "x"]) == ("read-only", ("a", ".git", "hooks"))


@pytest.mark.parametrize(
    ("patterns", "hidden", "shown"),
    [
        ([".*"], [".git", ".", ".a\n"], ["a", "a.b"]),
        ([".*", "secret*"], [".x", "secrets"], ["a-secret"]),
        (["*.pem", "[iI]d_rsa"], ["a.pem", "Id_rsa"], [".git", "pem"]),
        (["a*z"], ["az", "abz", "AZ"], ["a", "z", "ab"]),
        (["a/**/z", "x*/y"], ["a/z", "a/b/c/z", "1/a/b/z/2", "x1/y"], ["a", "z", "b/z", "x1", "y"]),
    ],
)
def test_patterns(patterns: list[str], hidden: list[str], shown: list[str]) -> None:
    names = Names(patterns)
    assert [path for path in hidden if not names.is_hidden(path.split("/"))] == []
    assert [path for path in shown if names.is_hidden(path.split("/"))] == []


@given(st.lists(st.text("ab*?[].", min_size=1, max_size=6), max_size=3), st.text("ab.[]", min_size=1, max_size=8))
def test_patterns_of_one_name_agree_with_fnmatch(patterns: list[str], name: str) -> None:
    assert Names(patterns).is_hidden([name]) is any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
