"""Maintenance of a run by processes of their own, whether its trainer lives or not."""
