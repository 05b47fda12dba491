"""Bytes to values and back, pure: no I/O, no clock, no torch. FORMAT.md is the specification."""
