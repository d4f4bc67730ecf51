"""Resolve a request and the administrator's limits to a ``SandboxSpec``."""
