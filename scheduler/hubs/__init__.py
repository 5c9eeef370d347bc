"""What the controller passes on without the core: barriers, step I/O, waits, relayed commands."""
