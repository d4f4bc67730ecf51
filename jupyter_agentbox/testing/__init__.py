"""The test suite that every runtime must pass, for whoever writes one in a package of their own.

Derive from :class:`.contract.RuntimeContract` and :class:`.escapes.EscapeContract`, give each a ``runtime`` fixture,
and run pytest; ``docs/runtimes.md`` shows it whole. Needs pytest, and nothing of this package's own tests.
"""
