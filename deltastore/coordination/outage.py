"""A worker that dies because Redis is full is one more thing to restart: outages are waited out.

Redis that does not answer and Redis that is out of memory (CASE L2) pass: whoever asked goes on
without, asks again, and gives up by a limit of its own. A wrong policy, a refused script or a
missing permission does not pass by waiting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.errors import Kind

if TYPE_CHECKING:
    from deltastore.errors import CoordinationError

OUTAGES = frozenset({Kind.REDIS_UNAVAILABLE, Kind.REDIS_MEMORY})


def is_outage(err: CoordinationError) -> bool:
    """Whether the same call may well succeed a while later."""
    return err.kind in OUTAGES
