"""Two replays would differ in the bits one day: the pipeline uses the repository's."""

from __future__ import annotations

from deltastore.repository.rebuild import Held, JoinReport, Replayed, replay

__all__ = ["Held", "JoinReport", "Replayed", "replay"]
