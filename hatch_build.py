"""Build hook: generate the synchronous client before a wheel is built or the package is installed for development."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SyncClientHook(BuildHookInterface):
    """Run ``tools/make_sync_client.py``."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate the client in the source tree."""
        runpy.run_path(str(Path(self.root, "tools", "make_sync_client.py")), run_name="__main__")
