"""A Redis that fills up refuses leases: every collection a run keeps there has its limit here.

The Lua scripts get these numbers from this module (as LIMIT.<name>) and the memory twin imports
them, so the two cannot disagree.
"""

from __future__ import annotations

MAX_ACTORS = 4_096
MAX_JOBS = 16_384  # live jobs plus admitted results nobody has taken
MAX_ENDED = 65_536  # settled, parked and closed names kept for late callers, each
MAX_LEASES_PER_ACTOR = 64
MAX_SAMPLES = 128  # per actor: two full hands of leases, small enough to read whole
MAX_ATTEMPTS = 3  # a third expiry parks the job: its prompt never ends
MAX_TAKE = 1_024  # results per call
SCAN_MAX = 1_024  # jobs of another gate that a grant steps over per pool, a multiple of 64
MAX_SEGMENT_HINTS = 64  # of segments that are on their way: two to a stream
LISTED_MAX = 4_096  # running leases that one look at the fleet shows
REAP_MAX = 256  # jobs per script call: keeps each call below a few milliseconds
FORGET_AFTER_S = 3_600.0  # a lost actor is listed this long, so that people see it
TAKEN_TTL_S = 600.0  # how long a repeated `take` finds its answer
SEGMENT_HINTS_TTL_S = 600.0  # an older announcement helps nobody
KEY_TTL_S = 7 * 86_400.0  # a run nobody touches leaves nothing behind

LUA_LIMITS: dict[str, int] = {
    "actors": MAX_ACTORS,
    "jobs": MAX_JOBS,
    "ended": MAX_ENDED,
    "leases_per_actor": MAX_LEASES_PER_ACTOR,
    "samples": MAX_SAMPLES,
    "attempts": MAX_ATTEMPTS,
    "scan": SCAN_MAX,
    "reap": REAP_MAX,
    "listed": LISTED_MAX,
    "segments": MAX_SEGMENT_HINTS,
    "segments_ttl_ms": int(SEGMENT_HINTS_TTL_S * 1000),
    "forget_ms": int(FORGET_AFTER_S * 1000),
    "taken_ttl_ms": int(TAKEN_TTL_S * 1000),
    "key_ttl_ms": int(KEY_TTL_S * 1000),
}
