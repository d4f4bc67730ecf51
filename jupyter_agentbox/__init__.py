"""Jupyter kernels in gVisor sandboxes, with egress allowed by host name."""

__version__ = "0.1.0"
