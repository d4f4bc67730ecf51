"""Warm starts: templates, the pool, and the choice between them."""
