"""Sandboxes by gVisor's own ``runsc``, without a container engine."""
