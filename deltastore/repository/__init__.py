"""One run in one bucket: how it is created, committed to, resolved and read back verified."""
