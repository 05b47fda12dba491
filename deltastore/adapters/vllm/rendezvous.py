"""A rank that downloads while the others vote is taken for dead: work of any length is met around.

Votes have a timeout, downloads and waits do not. `meet` lets every rank do its own work, however
long it takes, while all of them keep saying that they live; then everyone has everyone's answer,
or all raise. Nothing here touches weights.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from deltastore.errors import (
    ApplyError,
    DeltastoreError,
    FormatError,
    Kind,
    error_of,
    error_row,
)
from deltastore.format.canonical import canonical_json, parse_canonical_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.clock import Clock
    from deltastore.pipeline.group import Group

Answer = dict[str, Any]
BEAT_S = 0.2
"""How often ranks say that they live; far below any vote's timeout."""
FIRST_BEATS = 8
"""That many beats are short: most work is over at once."""
MAX_ANSWER_BYTES = 16 << 20


def meet(
    group: Group, clock: Clock, work: Callable[[], Answer], *, beat_s: float = BEAT_S
) -> list[Answer]:
    """Every rank's answer, in rank order. Collective.

    Args:
        work: this rank's part; its answer is an object of canonical JSON. Called in the caller's
            thread, for a device is the current one of a thread; the beats come from another.

    Raises on every rank alike when the work of one failed: there its own error, on the others one
    of the same class and kind. What `group.exchange` raises, once the own work is over.
    """
    if group.size == 1:
        return [work()]
    beats = _Beats(group, clock, beat_s)
    own: BaseException | None = None
    try:
        result = b"=" + canonical_json(work())
    except BaseException as err:  # noqa: BLE001 - raised below, when everyone knows of it
        own = err
        result = b"!" + canonical_json(_row_of(err))
    said = beats.end(result)
    failed = [rank for rank, text in enumerate(said) if text.startswith(b"!")]
    if own is not None:
        raise own
    if not failed:
        return [_answer(text) for text in said]
    raise _error_of(failed[0], said[failed[0]])


class _Beats:
    """Says for one rank that it lives, from a thread of its own, then what it has to say."""

    def __init__(self, group: Group, clock: Clock, beat_s: float) -> None:
        self._group = group
        self._clock = clock
        self._beat_s = beat_s
        self._over = threading.Event()
        self._result = b""
        self._said: list[bytes] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="deltastore-meet", daemon=True)
        self._thread.start()

    def end(self, result: bytes) -> list[bytes]:
        """What everyone has to say, when all have said it; raises what an exchange raised."""
        self._result = result
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._said

    def _run(self) -> None:
        try:
            beats = 0
            while not (self._said and all(self._said)):
                short = beats < FIRST_BEATS
                self._clock.wait(self._over, self._beat_s / FIRST_BEATS if short else self._beat_s)
                beats += 1
                self._said = self._group.exchange(self._result if self._over.is_set() else b"")
        except BaseException as err:  # noqa: BLE001 - raised by `end`
            self._error = err


def _answer(text: bytes) -> Answer:
    row = parse_canonical_json(text[1:], what="a rank's answer", max_bytes=MAX_ANSWER_BYTES)
    if not isinstance(row, dict):
        raise FormatError("a rank's answer is not an object", kind=Kind.FIELD)
    return row


def _row_of(err: BaseException) -> Answer:
    if isinstance(err, DeltastoreError):
        return error_row(err)
    return error_row(ApplyError(f"{err!r}"[:2000], kind=Kind.NOT_STAGED))


def _error_of(rank: int, text: bytes) -> DeltastoreError:
    """Another rank's error, as one of the same class and kind."""
    row = _answer(text)
    message = f"rank {rank}: {row.get('message')}"
    return error_of(row | {"message": message}) or ApplyError(message, kind=Kind.NOT_STAGED)
