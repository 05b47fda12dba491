"""Consumers of events: files, tables and pages. Nothing here is asked by the parts that report."""
