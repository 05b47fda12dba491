"""A host's stager: fetches, decodes and composes versions once for all ranks of the host."""
