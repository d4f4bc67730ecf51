"""What Jupyter's clients connect to, in place of the kernel."""
