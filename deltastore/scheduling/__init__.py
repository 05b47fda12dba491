"""Who gets how much work: pure functions of (state, now), so the simulator runs the real code."""
