"""A worker whose weights get lost while a file is there: writes break off, nothing mends them."""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltastore.adapters.placed_target import PlacedTarget
from tests.vllm.poisoned import ONE

if TYPE_CHECKING:
    from collections.abc import Callable

FAULT = Path(os.environ["DELTASTORE_TEST_FAULT"])


def _has_fault() -> bool:
    """Whether this process is to fail: all are, or the one that finds out first."""
    try:
        if FAULT.read_text(encoding="ascii") != ONE:
            return True
    except FileNotFoundError:
        return False
    chosen = FAULT.with_suffix(".chosen")
    with suppress(FileExistsError), chosen.open("x", encoding="ascii") as file:
        file.write(str(os.getpid()))
    return chosen.read_text(encoding="ascii") == str(os.getpid())


def _breaking(call: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
    """`call`, which fails while the file is there, before or after it has done its work."""

    @functools.wraps(call)
    def broken(*arguments: Any, **named: Any) -> Any:
        if not after and _has_fault():
            raise OSError("the test has the memory fail")
        answer = call(*arguments, **named)
        if _has_fault():
            raise OSError("the test has the memory fail")
        return answer

    return broken


PlacedTarget.write = _breaking(PlacedTarget.write, after=True)
PlacedTarget.undo = _breaking(PlacedTarget.undo, after=False)
PlacedTarget.write_state = _breaking(PlacedTarget.write_state, after=False)


class PoisoningWorker:
    """Adds nothing of its own."""
