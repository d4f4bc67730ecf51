"""Manage sandbox ownership, and what each owner may do with a sandbox."""
