"""A rollout actor: follows a run by deltas and generates what it holds leases for."""
