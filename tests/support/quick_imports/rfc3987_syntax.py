"""Hide rfc3987_syntax: each import compiles a grammar for more than a second, and jsonschema does without it.

``tests/conftest.py`` puts this folder first in ``PYTHONPATH``, for every server and program that the tests start.
"""

raise ImportError("hidden by the tests")
