"""A rank that raises leaves the other ranks' answers unread: errors of ranks travel as answers.

When a call of all workers fails, vLLM's executor raises at the first rank's error and never reads
what the others said: from then on every answer of those is the one to the call before. So a worker
returns its error, and the engine core raises it when all have been read.
"""

from __future__ import annotations

from typing import Any

from deltastore.errors import DeltastoreError, error_of, error_row

MAX_CHARS = 4000


class RankError:
    """What a rank raised; across processes rebuilt as an error of the same class and kind."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        """As vLLM sends it from one of its processes to another."""
        err = self.error
        if isinstance(err, DeltastoreError):
            row = error_row(err)
            return _rebuilt, (row | {"message": err.message[:MAX_CHARS]},)
        return _rebuilt, ({"message": f"{type(err).__name__}: {err}"[:MAX_CHARS]},)


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


def _rebuilt(row: dict[str, Any]) -> RankError:
    return RankError(error_of(row) or RuntimeError(row["message"]))
