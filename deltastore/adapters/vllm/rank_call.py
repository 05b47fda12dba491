"""A rank that raises leaves the other ranks' answers unread: errors of ranks travel as answers.

When a call of all workers fails, vLLM's executor raises at the first rank's error and never reads
what the others said: from then on every answer of those is the one to the call before. So a worker
returns its error, and the engine core raises it when all have been read.
"""

from __future__ import annotations

from typing import Any

from deltastore import errors
from deltastore.errors import DeltastoreError, Kind

MAX_CHARS = 4000


class RankError:
    """What a rank raised; across processes rebuilt as an error of the same class and kind."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        """As vLLM sends it from one of its processes to another."""
        err = self.error
        if isinstance(err, DeltastoreError):
            about = (err.kind.value, err.run, err.version, err.key, err.hint)
            return _rebuilt, (type(err).__name__, err.message[:MAX_CHARS], about)
        return _rebuilt, ("", f"{type(err).__name__}: {err}"[:MAX_CHARS], None)


def answer_of(worker: Any, method: str, arguments: Any, named: Any) -> Any:
    """What a worker's method returns, or its error as a RankError."""
    try:
        return getattr(worker, method)(*arguments, **named)
    except Exception as err:  # noqa: BLE001 - raised by `raise_first`, in the engine core
        return RankError(err)


def raise_first(answers: list[Any]) -> None:
    """Raise the first rank's error, if one of them has an error."""
    for answer in answers:
        if isinstance(answer, RankError):
            raise answer.error


def _rebuilt(name: str, message: str, about: tuple[Any, ...] | None) -> RankError:
    found = getattr(errors, name, None)
    if about is None or not (isinstance(found, type) and issubclass(found, DeltastoreError)):
        return RankError(RuntimeError(message))
    kind, run, version, key, hint = about
    return RankError(found(message, kind=Kind(kind), run=run, version=version, key=key, hint=hint))
