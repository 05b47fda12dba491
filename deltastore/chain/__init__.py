"""Laws over versions, pure: two states give a delta, a delta moves a state, two deltas give one."""
