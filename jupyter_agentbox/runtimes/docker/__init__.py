"""The runtimes ``docker`` and ``docker-runc``: sandboxes as containers of a Docker engine, under gVisor or runc."""
