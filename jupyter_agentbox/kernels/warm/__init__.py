"""Warm starts: templates, the pool, and what takes from them."""
