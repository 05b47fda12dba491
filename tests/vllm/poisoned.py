"""What tests and the workers that fail for them agree on; a worker's own module wants a fault."""

ONE = "one"
"""In the file that makes workers fail: only one of them is to."""
