"""One sandbox: its life, its link to the guest, its processes, and the sweep of those without an owner."""
