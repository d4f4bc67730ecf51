"""The asynchronous client, and the source of the synchronous one, which is generated from it."""
