"""The whole loop on one machine: a real model learns while its actors follow by deltas."""
