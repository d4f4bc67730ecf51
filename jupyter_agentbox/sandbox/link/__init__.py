"""The connection to a sandbox's guest, and the thread on which all of them run."""
