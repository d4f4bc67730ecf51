"""What is done to a live sandbox: snapshots, forks, parking, export."""
