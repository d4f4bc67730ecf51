"""Apply the hosts that a person allowed to running sandboxes, as soon as they change.

The rules are in a file that other processes change too, such as ``jupyter agentbox egress``. Each process with
sandboxes looks at it twice a second.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace
from typing import ClassVar

from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.sandbox.link.thread import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.spec import Grant, SandboxSpec

log = logging.getLogger(__name__)

#: Seconds between two looks at the file.
INTERVAL = 0.5


def put_grant(sandbox: Sandbox, grant: Grant) -> None:
    """Set a sandbox's grant, and close the connections that it does not cover. On the link thread."""
    sandbox.gate.grant = grant
    # A later owner reads the grant from the record.
    sandbox.record.spec = replace(sandbox.spec, grant=grant)


class ConsentWatch:
    """Watch over the rules of one state directory. Only on the link thread, apart from :meth:`start`.

    Parameters
    ----------
    policy : Policy
        Decides which rules apply.
    """

    _started: ClassVar[set[str]] = set()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @classmethod
    def start(cls, policy: Policy) -> None:
        """Start to watch a state directory, unless this process does already. May be called from any thread."""
        with cls._lock:
            key = str(policy.state_path)
            if key in cls._started:
                return
            cls._started.add(key)
        LinkThread.instance().submit(cls(policy)._watch())

    async def _watch(self) -> None:
        stamp = self._policy.host_rules.stamp()
        while True:
            await asyncio.sleep(INTERVAL)
            found = self._policy.host_rules.stamp()
            if found != stamp:
                stamp = found
                await apply_rules(self._policy)


async def apply_rules(policy: Policy) -> None:
    """Apply the present rules to all running sandboxes of this process. On the link thread."""
    for manager in SandboxManager.all_shared(policy.state_path):
        for sandbox in list(manager.sandboxes.values()):
            if sandbox.end is not None or sandbox.spec.layout == "waiting":
                continue
            spec = replace(sandbox.spec, grant=sandbox.gate.grant)
            grant = await asyncio.to_thread(_consented, policy, spec)
            if sandbox.gate.grant is not spec.grant:
                # It has changed in the meantime, and every other change applies the rules itself.
                grant = replace(sandbox.gate.grant, user_hosts=grant.user_hosts, may_allow=grant.may_allow)
            if grant != sandbox.gate.grant:
                put_grant(sandbox, grant)
                try:
                    await asyncio.to_thread(sandbox.record.save, sandbox.directory)
                except OSError as error:  # a later owner applies the rules again
                    log.warning("cannot save the record of sandbox %s: %s", sandbox.id, error)


def _consented(policy: Policy, spec: SandboxSpec) -> Grant:
    try:
        return policy.with_consent(spec).grant
    except AgentboxError as error:  # such as a profile that no longer exists
        log.warning("no host is allowed by a person's consent: %s", error)
        return replace(spec.grant, user_hosts=(), may_allow=())
