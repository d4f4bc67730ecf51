"""Store files that hostile code may have written: work folders, images, snapshots, and the audit log."""
