"""Let a person add folders of the host, read-only, to the sandboxes of notebooks.

The folders are shown from the next start of the kernel on, because gVisor cannot show more of the host later. Agents'
sandboxes get none of them, and callers with a token for one sandbox cannot add any.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_agentbox.errors import AgentboxError, InvalidRequest, NotFound, PolicyRefused
from jupyter_agentbox.models.folders import FolderInfo, FolderList
from jupyter_agentbox.policy.consent import FolderRule, FolderScope
from jupyter_agentbox.policy.folders import added_targets
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.sandbox.link.thread import on_link_thread
from jupyter_agentbox.spec import SandboxSpec

from .registry import Caller, SandboxRegistry

if TYPE_CHECKING:
    from .grants import Grants


class Folders:
    """Manager of the folders that a person added. Its coroutines may be awaited on any event loop.

    Parameters
    ----------
    policy : Policy
        Says which folders a person may add.
    registry : SandboxRegistry
        Finds the sandboxes that a caller may see.
    grants : Grants
        Finds the notebook of a sandbox.
    """

    def __init__(self, policy: Policy, registry: SandboxRegistry, grants: Grants) -> None:
        self.policy = policy
        self._registry = registry
        self._grants = grants

    async def list(self, sandbox_id: str, *, caller: Caller) -> FolderList:
        """Return the folders that a person added for a notebook's sandbox, and whether the caller may add some."""
        notebook = await self._grants.find_notebook_of(sandbox_id, caller)
        spec, kind = await self._find(sandbox_id, notebook, caller)
        return await asyncio.to_thread(self._describe, spec, kind, caller)

    @on_link_thread
    async def _find(self, sandbox_id: str, notebook: str, caller: Caller) -> tuple[SandboxSpec, str]:
        managed = await self._registry.peek(sandbox_id, caller=caller)
        spec = managed.running().spec
        return replace(spec, notebook=notebook or spec.notebook), managed.kind

    def _describe(self, spec: SandboxSpec, kind: str, caller: Caller) -> FolderList:
        message = ""
        try:
            self._check_caller(kind, caller)
        except AgentboxError as error:
            message = str(error)
        rules = self.policy.folder_rules.of(notebook=spec.notebook, profile=spec.profile) if kind == "notebook" else ()
        shown = {str(mount.source) for mount in spec.mounts if mount.is_added}
        folders = [
            FolderInfo(
                source=rule.source,
                paths=list(added_targets(Path(rule.source), spec.workspace)),
                scope=rule.scope,
                target=rule.target,
                by=rule.by,
                added=rule.added,
                is_shown=rule.source in shown,
            )
            for rule in rules
        ]
        return FolderList(folders=folders, may_add=not message, message=message, scopes=_scopes(spec))

    def _check_caller(self, kind: str, caller: Caller) -> None:
        caller.check_unscoped("add folders")
        if kind != "notebook":
            raise InvalidRequest("folders can be added to the sandboxes of notebooks only", field="id")
        if not self.policy.is_attended or not self.policy.addable_folders:
            raise PolicyRefused(
                "Ask your administrator to add the folder to Policy.mounts, or to Policy.user_may_add_folders",
                setting="Policy.user_may_add_folders",
            )

    async def add(self, sandbox_id: str, source: str, scope: FolderScope, *, caller: Caller) -> None:
        """Add a folder for a sandbox's notebook, or always for its profile. It is shown from the next start on.

        Raises
        ------
        NotAuthorized
            The caller has a token for one sandbox.
        InvalidRequest
            The path is not one of a folder that could be added.
        PolicyRefused
            Policy does not let a person add the folder.
        NotFound, SandboxEnded, Conflict
        """
        notebook = await self._grants.find_notebook_of(sandbox_id, caller)
        spec, kind = await self._find(sandbox_id, notebook, caller)
        self._check_caller(kind, caller)
        if scope not in _scopes(spec):
            raise InvalidRequest("the sandbox has no notebook for which the folder could be added", field="scope")
        real = await asyncio.to_thread(self.policy.check_added, Path(source), spec.workspace)
        rule = FolderRule(str(real), scope, _target(spec, scope), caller.name)
        await self._record(sandbox_id, "added", rule, caller)
        await asyncio.to_thread(self.policy.folder_rules.add, rule)
        await self._remember(sandbox_id, spec.notebook, caller)

    @on_link_thread
    async def _remember(self, sandbox_id: str, notebook: str, caller: Caller) -> None:
        """Record the present path of the notebook, for which a restart looks up folders."""
        managed = await self._registry.peek(sandbox_id, caller=caller)
        sandbox = managed.running()
        sandbox.record.spec = managed.spec = replace(sandbox.spec, notebook=notebook)
        await asyncio.to_thread(sandbox.record.save, sandbox.directory)

    async def remove(self, sandbox_id: str, source: str, scope: FolderScope | None, *, caller: Caller) -> None:
        """Remove a folder that a person added. A running kernel sees it until its next start.

        Raises
        ------
        NotAuthorized
            The caller has a token for one sandbox.
        NotFound
            No person added the folder.
        """
        caller.check_unscoped("remove folders")
        notebook = await self._grants.find_notebook_of(sandbox_id, caller)
        spec, _ = await self._find(sandbox_id, notebook, caller)
        known = await asyncio.to_thread(self.policy.folder_rules.of, notebook=spec.notebook, profile=spec.profile)
        meant = {rule.key: rule for rule in known if rule.source == source and scope in (None, rule.scope)}
        if not meant:
            raise NotFound(f"the folder {source[:300]!r} was not added to this sandbox", field="source")
        await asyncio.to_thread(self.policy.folder_rules.remove, lambda rule: rule.key in meant)
        for rule in meant.values():
            await self._record(sandbox_id, "removed", rule, caller)

    async def _record(self, sandbox_id: str, event: str, rule: FolderRule, caller: Caller) -> None:
        detail = {
            "event": event, "folder": rule.source, "scope": rule.scope, "for": rule.target, **caller.to_detail(),
        }  # fmt: skip
        await self._registry.audit().arecord("grant", sandbox_id, is_allowed=event == "added", detail=detail)


def _scopes(spec: SandboxSpec) -> list[FolderScope]:
    return ["notebook", "always"] if spec.notebook else ["always"]


def _target(spec: SandboxSpec, scope: FolderScope) -> str:
    return spec.notebook if scope == "notebook" else spec.profile
