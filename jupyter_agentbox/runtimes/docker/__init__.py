"""Sandboxes as containers of a Docker engine, under gVisor or runc."""
