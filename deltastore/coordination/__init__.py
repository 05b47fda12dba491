"""Who takes part, who does which job until when, and how fast: names and time, never objects.

Nothing here decides what is true of a run (the bucket does): losing all of it slows or repeats
work. `backend` holds the protocol and its values, `redis` and `memory` the two implementations.
"""
