"""The audit log: every decision about a sandbox, in a hash chain."""
