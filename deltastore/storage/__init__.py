"""Objects in one bucket: this floor knows bytes and keys, never weights."""
