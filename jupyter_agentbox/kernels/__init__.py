"""One kernel id: its endpoints, its warm start, and code that runs in it."""
