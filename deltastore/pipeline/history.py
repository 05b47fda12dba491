"""Two ways to read a chain disagree sooner or later: the pipeline uses the repository's."""

from __future__ import annotations

from deltastore.repository.history import locate, walk_down

__all__ = ["locate", "walk_down"]
