"""Measurements, each against its baseline in one run: `make bench-NAME` runs `NAME.py` here."""
