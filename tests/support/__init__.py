"""Shared parts of the tests: servers, sandboxes, clients and images. Contains no tests."""

from __future__ import annotations

from pathlib import Path

#: Folder of the tests, and the source tree that contains it.
TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
