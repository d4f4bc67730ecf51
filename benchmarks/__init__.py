"""Benchmarks: ``python -m benchmarks`` (or ``make bench``) measures bare and sandboxed kernels in one run."""
