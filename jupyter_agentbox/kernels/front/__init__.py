"""The endpoints that Jupyter clients connect to instead of the kernel itself."""
