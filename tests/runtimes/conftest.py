"""Failed assertions of the shared suite tell their values."""

import pytest

pytest.register_assert_rewrite("runtimes.contract", "runtimes.box", "tests.runtimes.contract")
