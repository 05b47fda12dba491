"""Tests ask engines for the same things wherever these run: here one in a process of its own."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.vllm.crash_nursery import Life, Nursery


class RemoteEngine:
    """What tests use of a `vllm.LLM`, of an engine of the nursery. Answers come as JSON gives them.

    Raises RefusedError, with its words, for what the engine raises.
    """

    def __init__(self, life: Life) -> None:
        self._life = life

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a method of every rank."""
        return self._life.ask("rpc", method, *args, **(kwargs or {}))

    def said(self, tokens: int) -> Any:
        """As `runs.generate`, which see."""
        return self._life.ask("said", tokens)

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        """Begin to follow."""
        self._life.ask("call", "init_weight_transfer_engine", request)

    def start_weight_update(self) -> None:
        """The first call of an update."""
        self._life.ask("call", "start_weight_update")

    def update_weights(self, request: dict[str, Any]) -> None:
        """The second."""
        self._life.ask("call", "update_weights", request)

    def finish_weight_update(self) -> None:
        """The last."""
        self._life.ask("call", "finish_weight_update")

    def get_weight_version(self) -> str:
        """Which weights it says that it serves."""
        return str(self._life.ask("label"))


@contextmanager
def raised(nursery: Nursery, checkpoint: Path, **arguments: Any) -> Iterator[RemoteEngine]:
    """An engine of the nursery until the end of the block; with `processes`, its core is apart."""
    life = nursery.start(checkpoint, **arguments)
    try:
        life.answer()
        yield RemoteEngine(life)
        nursery.note_shared()
    finally:
        life.kill()
