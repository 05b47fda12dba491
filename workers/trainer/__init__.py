"""The reference trainer: GRPO, one step ahead of its actors, small enough to read."""
