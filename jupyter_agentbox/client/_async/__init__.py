"""The client for event loops, and the source of the other: ``tools/make_sync_client.py`` makes ``_sync`` of it."""
