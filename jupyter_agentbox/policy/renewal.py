"""Reapply today's policy to a sandbox that is restored from a snapshot, adopted or replaced.

The contents of a snapshot's memory stay as they were. Everything else is decided again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jupyter_agentbox.errors import InvalidRequest, PolicyRefused
from jupyter_agentbox.spec import LIMIT_NAMES, OWN_HOSTS, Grant, Limits, SandboxSpec

from .folders import check_mount, check_workspace, private_directories
from .policy import Policy
from .profiles import expand, find_uncovered


def reapply_policy(
    policy: Policy, then: SandboxSpec, *, owner: str, is_tenants: bool = False, is_running: bool = False
) -> SandboxSpec:
    """Return a sandbox's spec under today's policy, when it is restored from a snapshot or adopted by another server.

    Hosts that policy no longer allows are dropped, and limits that it has lowered are lowered. What cannot be changed
    in a saved or running sandbox must still be allowed. Blocks, because presets query package clients.

    Parameters
    ----------
    policy : Policy
    then : SandboxSpec
        The spec of the original sandbox.
    owner : str
        Owner of the new sandbox.
    is_tenants : bool
        Whether its workspace belongs to one of the owner's tenants. Such a workspace is not checked.
    is_running : bool
        Whether it is running. Its folder is then in use already, although it may have been renamed since.

    Raises
    ------
    InvalidRequest
        Its profile or its folder no longer exists.
    PolicyRefused
        It has something that policy no longer allows. The error names the setting.
    """
    profile = policy.chosen_profile(then.profile, then.image)
    setting = f"Policy.profiles[{profile.name!r}]"
    for name, is_allowed in (
        ("runtime", then.runtime == profile.runtime),
        ("root", then.root == profile.root),
        ("is_root", profile.is_root or not then.is_root),
    ):
        if not is_allowed:
            value = getattr(then, name)
            raise PolicyRefused(
                f"the sandbox has {name} = {value!r:.200}, which its profile no longer allows",
                setting=f"{setting}[{name!r}]",
            )
    if then.workspace is not None and not is_tenants:
        if profile.is_private:
            raise PolicyRefused(
                f"the sandbox mounts the folder {then.workspace}, but its profile now allows only private folders",
                setting=f"{setting}['workspace']",
            )
        if shown := _find_new(profile.hidden, then.hidden):
            raise PolicyRefused(
                f"the sandbox shows files that policy now hides ({', '.join(shown)})", setting="Policy.hidden_files"
            )
        if writable := _find_new(profile.read_only, (*then.hidden, *then.read_only)):
            raise PolicyRefused(
                f"the sandbox can write files that policy now makes read-only ({', '.join(writable)})",
                setting="Policy.read_only_files",
            )
    private = (*private_directories(), policy.state_path)
    for mount in then.mounts:
        if mount.is_writable:
            continue  # a tenant's folder
        if mount.is_added:
            if mount not in policy.with_folders(replace(then, mounts=())).mounts:
                raise PolicyRefused(
                    f"the sandbox shows the folder {mount.source}, which is no longer added to it. Start a new kernel",
                    setting="Policy.user_may_add_folders",
                )
            continue
        is_policys = mount.is_policys or str(mount.source) != mount.target
        if is_policys and mount not in profile.mounts:
            raise PolicyRefused(
                f"the sandbox mounts {mount.target}, which policy no longer allows", setting="Policy.mounts"
            )
        check_mount(mount.source, private)
    if then.workspace is not None and not is_tenants:
        try:
            check_workspace(then.workspace, then.hidden, allowed=policy.allowed_workspaces, private=private)
        except InvalidRequest:  # the folder no longer exists
            if not is_running:
                raise
    allowed = expand(profile.hosts)  # expanded once, because presets query package clients each time
    hosts = [host for host in then.grant.hosts if find_uncovered([host], allowed) is None]
    private_hosts = [host for host in then.grant.private_hosts if host in expand(profile.private_hosts)]
    limits = {name: min(getattr(then.limits, name), getattr(profile.limits, name)) for name in LIMIT_NAMES}
    renewed = replace(
        then,
        limits=Limits(**limits),
        grant=Grant(expand(hosts), tuple(private_hosts), then.grant.setting),
        accept_unenforced=frozenset(policy.accept_unenforced),
        lease_timeout=profile.lease_timeout,
        freeze_after=profile.freeze_after,
        min_free_disk=policy.min_free_disk,
        owner=owner,
    )
    return policy.with_consent(renewed)


def _find_new(patterns: Sequence[str], earlier: Sequence[str]) -> list[str]:
    """Return the patterns that match more than the earlier ones. Of these, only a plain prefix counts as wider."""
    prefixes = tuple(each[:-1] for each in earlier if each[1:].endswith("*") and not set(each[:-1]) & set("*?[/"))
    return [pattern for pattern in patterns if pattern not in earlier and not pattern.startswith(prefixes)]


def keep_hosts(policy: Policy, new: SandboxSpec, before: SandboxSpec) -> SandboxSpec:
    """Return a spec with the hosts that were set for the sandbox that it replaces, if that one had hosts of its own.

    Of these hosts, those that the profile allows today are kept. Blocks, because presets query package clients.
    """
    if before.grant.setting != OWN_HOSTS:
        return new
    allowed = expand(policy.profile(new.profile).hosts)
    hosts = [host for host in before.grant.hosts if find_uncovered([host], allowed) is None]
    return policy.with_consent(replace(new, grant=policy.narrow_grant(new.profile, hosts)))


def intersect_grants(then: Grant, now: Grant) -> Grant:
    """Return a grant limited to what `now` also allows, so that a restore does not undo a later narrowing of it.

    What a person allowed is as in `now`.
    """
    hosts = _common(then.hosts, now.hosts)
    private = _common(then.private_hosts, now.private_hosts)
    narrower = then if set(hosts) == set(then.hosts) and set(hosts) != set(now.hosts) else now
    return replace(now, hosts=hosts, private_hosts=private, setting=narrower.setting)


def _common(one: Sequence[str], other: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns of each sequence that the other one covers. Presets must be expanded in both."""
    found = [host for host in one if find_uncovered([host], other) is None]
    found += [host for host in other if find_uncovered([host], one) is None]
    return tuple(dict.fromkeys(found))
