"""What a request and the administrator's limits come to: a ``SandboxSpec``."""
