"""Publish, stage, activate: written against protocols only, never against a backend."""
