"""A fault that was ordered and never done looks survived: actors write down what they did.

One line of JSON per deed, in a file per actor that all its lives append to. A deed is written when
it is done and before anybody can see what comes of it: a damaged result before it is settled.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from deltastore.observability.jsonl import whole_lines

if TYPE_CHECKING:
    from pathlib import Path

STORED = "stored"  # a result as it was made
FLIP_RESULTS, CUT_RESULTS, FLIP_READS = "flip_results", "cut_results", "flip_reads"
READ_AGAIN = "read_again"  # after a flipped read: the same object, now with its right digest
SLOW, CLOCK_STEP, CLOCK_AHEAD = "slow", "clock_step_s", "clock_ahead_s"


@dataclass(frozen=True, slots=True)
class Deed:
    """What an actor did.

    Args:
        what: STORED, READ_AGAIN, or the field of `Orders` that was carried out.
        number: of the orders it was done under.
        about: the job of a result, the key of a read; else empty.
    """

    what: str
    number: int
    about: str = ""


class DeedLog:
    """The deeds in a file: appended by one process at a time, read by another."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def append(self, deed: Deed) -> None:
        """Write a deed down, with one write: a killed process leaves it whole or not at all."""
        line = json.dumps(asdict(deed)).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)

    def read_new(self) -> list[Deed]:
        """The deeds since the last call; none if there is no file yet."""
        deeds: list[Deed] = []
        while whole := whole_lines(self.path, self._offset)[0]:
            self._offset += len(whole)
            deeds += [Deed(**json.loads(line)) for line in whole.splitlines()]
        return deeds
