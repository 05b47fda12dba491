"""Where other people's formats end: checkpoint folders and torch modules as sources and targets.

Importing this package imports neither torch nor anything optional; its modules say what they need.
"""
