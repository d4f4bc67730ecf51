"""Files on disk that hostile code may have written: work folders, images, snapshots, and the audit log."""
