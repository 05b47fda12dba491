"""A multipart upload planned as it goes learns at part 10,001, or at complete, that it cannot be.

The plan is made before the first byte leaves (S5, S6): equal parts but the last, none too small,
not too many. The same plan drives parallel ranged reads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from deltastore.errors import InvalidInputError, Kind
from deltastore.storage.store import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor, Future

MIB = 1 << 20
MIN_PART_BYTES = 5 * MIB
MAX_PART_BYTES = 5 * 1024 * MIB
MAX_PARTS = 10_000


@dataclass(frozen=True, slots=True)
class PartPlan:
    """How `size_bytes` are cut: parts of `part_bytes`, the last one what is left."""

    size_bytes: int
    part_bytes: int

    def __post_init__(self) -> None:
        if self.size_bytes < 1 or self.part_bytes < 1:
            raise ValueError(f"{self} cuts nothing")

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return -(-self.size_bytes // self.part_bytes)

    def part(self, index: int) -> ByteRange:
        """The bytes of part `index`, counted from 0."""
        if not 0 <= index < self.parts:
            raise IndexError(f"part {index} of {self.parts}")
        start = index * self.part_bytes
        return ByteRange(start, min(start + self.part_bytes, self.size_bytes))


def plan_upload(size_bytes: int, part_bytes: int) -> PartPlan:
    """Parts of `part_bytes`, or of as many whole MiB more as 10,000 parts need."""
    least_bytes = -(-size_bytes // MAX_PARTS)
    if least_bytes > part_bytes:
        part_bytes = -(-least_bytes // MIB) * MIB
    if part_bytes > MAX_PART_BYTES:
        raise InvalidInputError(
            f"an object of {size_bytes} bytes does not fit in {MAX_PARTS} parts",
            kind=Kind.LIMIT,
            hint="write it as several objects",
        )
    return PartPlan(size_bytes, part_bytes)


def run_parts(
    pool: Executor,
    count: int,
    work: Callable[[int], None],
    *,
    window: int,
    first: int = 0,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Run `work(first) .. work(count - 1)` on `pool`, at most `window` submitted at a time.

    `meanwhile` runs on the calling thread, as one of them, once the others are on their way. The
    first failure is raised after the parts in flight have ended; no other part is started.
    """
    running: deque[Future[None]] = deque()
    indices = iter(range(first, count))
    try:
        beside = window if meanwhile is None else window - 1
        running.extend(pool.submit(work, index) for index in islice(indices, beside))
        if meanwhile is not None:
            meanwhile()
            running.extend(pool.submit(work, index) for index in islice(indices, 1))
        while running:
            running.popleft().result()
            running.extend(pool.submit(work, index) for index in islice(indices, 1))
    finally:
        for future in running:
            future.cancel()
        for future in running:
            if not future.cancelled():
                future.exception()  # waits; the failure that is being raised came first
