"""A run under faults that a seed chose: what was injected, what survived, how long it took."""
