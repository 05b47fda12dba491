"""A bucket that nobody looks after ends as a chain that nobody can replay: checks and repairs."""
