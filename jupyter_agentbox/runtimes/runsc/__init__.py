"""The runtime ``runsc``: sandboxes under gVisor's own program, without a container engine."""
