"""The link to a sandbox's guest, and the thread that serves all links."""
