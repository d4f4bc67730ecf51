"""Test suites that every runtime must pass, also for authors of a runtime in another package.

:class:`.contract.RuntimeContract` and :class:`.escapes.EscapeContract` test the runtime itself.
:class:`.sandboxes.SandboxContract` tests what users get from it, on any image. Derive from each, provide the fixtures
that it needs, and run pytest; ``docs/runtimes.md`` has a complete example. The suites need pytest, and nothing of this
package's own tests.
"""
