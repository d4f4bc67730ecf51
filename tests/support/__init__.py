"""What tests share: servers, sandboxes, clients and images. Nothing here is a test."""

from __future__ import annotations

from pathlib import Path

#: The folder of the tests, and the source tree that it lies in.
TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
