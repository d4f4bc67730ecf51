"""Operate on running sandboxes: snapshots, forks, parking and export."""
