"""The client for plain programs. Made from ``_async`` by ``tools/make_sync_client.py``, but for ``local``."""
