"""One sandbox: its life cycle, link, processes, and record, and the sweeper that removes sandboxes without an owner."""
