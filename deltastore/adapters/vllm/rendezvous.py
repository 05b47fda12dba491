"""A rank that downloads while the others vote is taken for dead: work of any length is met around.

Votes have a timeout, downloads and waits do not. `meet` lets every rank do its own work, however
long it takes, while all of them keep saying that they live; then everyone has everyone's answer,
or all raise. Nothing here touches weights.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from deltastore import errors
from deltastore.errors import ApplyError, DeltastoreError, FormatError, Kind
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
        work: this rank's part; its answer is an object of canonical JSON. Called in a thread of
            its own when there are several ranks.

    Raises on every rank alike when the work of one failed: there its own error, on the others one
    of the same class and kind. What `group.exchange` raises.
    """
    if group.size == 1:
        return [work()]
    task = _Task(work)
    beats = 0
    while True:
        clock.wait(task.over, beat_s / FIRST_BEATS if beats < FIRST_BEATS else beat_s)
        beats += 1
        said = group.exchange(task.report())
        if all(said):
            break
    failed = [rank for rank, text in enumerate(said) if text.startswith(b"!")]
    if not failed:
        return [_answer(text) for text in said]
    if task.error is not None:
        raise task.error
    raise _error_of(failed[0], said[failed[0]])


class _Task:
    """One rank's work in its thread."""

    def __init__(self, work: Callable[[], Answer]) -> None:
        self.over = threading.Event()
        self.error: BaseException | None = None
        self._work = work
        self._said = b""
        threading.Thread(target=self._run, name="deltastore-meet", daemon=True).start()

    def report(self) -> bytes:
        """What to say now: nothing while it goes on."""
        return self._said if self.over.is_set() else b""

    def _run(self) -> None:
        try:
            self._said = b"=" + canonical_json(self._work())
        except BaseException as err:  # noqa: BLE001 - raised by `meet`, on every rank
            self.error = err
            self._said = b"!" + canonical_json(_row_of(err))
        finally:
            self.over.set()


def _answer(text: bytes) -> Answer:
    row = parse_canonical_json(text[1:], what="a rank's answer", max_bytes=MAX_ANSWER_BYTES)
    if not isinstance(row, dict):
        raise FormatError("a rank's answer is not an object", kind=Kind.FIELD)
    return row


def _row_of(err: BaseException) -> Answer:
    if isinstance(err, DeltastoreError):
        row = {"class": type(err).__name__, "kind": err.kind.value, "hint": err.hint or ""}
        return row | {"message": err.message}
    kind = Kind.NOT_STAGED.value
    return {"class": "ApplyError", "kind": kind, "hint": "", "message": f"{err!r}"[:2000]}


def _error_of(rank: int, text: bytes) -> DeltastoreError:
    """Another rank's error, as one of the same class and kind."""
    row = _answer(text)
    found = getattr(errors, str(row.get("class")), None)
    known = {member.value: member for member in Kind}
    message, kind = f"rank {rank}: {row.get('message')}", known.get(str(row.get("kind")))
    if not (isinstance(found, type) and issubclass(found, DeltastoreError)) or kind is None:
        return ApplyError(message, kind=Kind.NOT_STAGED)
    return found(message, kind=kind, hint=str(row.get("hint")) or None)
