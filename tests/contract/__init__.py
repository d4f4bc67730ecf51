"""The test suites that every runtime must pass, for whoever writes one in a package of their own.

:class:`.contract.RuntimeContract` and :class:`.escapes.EscapeContract` look at the runtime itself,
:class:`.sandboxes.SandboxContract` at what users have of it, on any image. Derive from each, give it the fixtures that
it asks for, and run pytest; ``docs/runtimes.md`` shows it whole. Needs pytest, and nothing of this package's own tests.
"""
