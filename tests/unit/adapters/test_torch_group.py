"""A group over gloo gives every rank everyone's message, or tells every rank that it failed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deltastore.adapters.torch_group import FIRST_BYTES, TorchGroup
from deltastore.errors import InvalidInputError, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

CHILD = Path(__file__).parent / "torch_group_child.py"
TIMED_OUT = "failed vote_timeout"


class Ranks:
    """Processes that are the ranks of one group."""

    def __init__(self, size: int, folder: Path, timeout_s: float) -> None:
        words = [str(size), str(folder / f"store-{timeout_s}"), str(timeout_s)]
        self.children = [
            subprocess.Popen(
                [sys.executable, str(CHILD), str(rank), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[3],
            )
            for rank in range(size)
        ]
        assert self.answers() == ["ready"] * size

    def order(self, text: str, ranks: list[int] | None = None) -> None:
        """Give an order to some ranks, or all."""
        for rank in range(len(self.children)) if ranks is None else ranks:
            stdin = self.children[rank].stdin
            assert stdin is not None
            stdin.write(text + "\n")
            stdin.flush()

    def answers(self, ranks: list[int] | None = None) -> list[str]:
        """One answer of each of them."""
        found = []
        for rank in range(len(self.children)) if ranks is None else ranks:
            stdout = self.children[rank].stdout
            assert stdout is not None
            found.append(stdout.readline().strip())
        return found

    def close(self) -> None:
        """End them all."""
        for child in self.children:
            child.kill()
            child.communicate()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Three ranks that are patient."""
    ranks = Ranks(3, tmp_path_factory.mktemp("gloo"), timeout_s=60.0)
    yield ranks
    ranks.close()


def _told(size: int, number: int) -> str:
    bodies = [bytes([rank]) * (number if rank else number // 2) for rank in range(size)]
    return " ".join(f"{len(one)}:{hashlib.sha256(one).hexdigest()[:16]}" for one in bodies)


@pytest.mark.parametrize(
    "number", [0, 1, FIRST_BYTES - 9, FIRST_BYTES - 8, FIRST_BYTES - 7, 2 * FIRST_BYTES, 3_000_001]
)
def test_everyone_gets_everyones_message(three: Ranks, number: int) -> None:
    """Messages of any size, of other sizes on other ranks, arrive whole and in rank order."""
    three.order(f"say {number}")
    assert three.answers() == [_told(3, number)] * 3


def test_a_renewed_group_works_as_before(three: Ranks) -> None:
    """After every rank has renewed it, messages arrive."""
    three.order("renew")
    assert three.answers() == ["renewed"] * 3
    three.order("say 100")
    assert three.answers() == [_told(3, 100)] * 3


def test_a_rank_that_does_not_come_times_out_the_others_until_all_renew(tmp_path: Path) -> None:
    """CASE R2: who waits for a rank that does not vote is told so, and so is that rank; all meet
    again when all renew, however often one of them has tried before."""
    ranks = Ranks(2, tmp_path, timeout_s=1.0)
    try:
        ranks.order("say 10", [0])
        assert ranks.answers([0]) == [TIMED_OUT]
        ranks.order("say 10", [0])
        assert ranks.answers([0]) == [TIMED_OUT], "a group that failed stays so"
        ranks.order("say 10", [1])
        assert ranks.answers([1]) == [TIMED_OUT], "the late one is not told otherwise"
        ranks.order("renew", [0])
        assert ranks.answers([0]) == [TIMED_OUT], "nobody is there to meet"
        ranks.order("renew")
        assert ranks.answers() == ["renewed"] * 2
        ranks.order("say 10")
        assert ranks.answers() == [_told(2, 10)] * 2
    finally:
        ranks.close()


def test_a_rank_that_dies_fails_the_others_at_once(tmp_path: Path) -> None:
    """A killed rank leaves no other waiting for as long as the timeout."""
    ranks = Ranks(2, tmp_path, timeout_s=600.0)
    try:
        ranks.order("say 10")
        assert ranks.answers() == [_told(2, 10)] * 2
        ranks.order("die", [1])
        ranks.children[1].wait()
        ranks.order("say 10", [0])
        assert ranks.answers([0]) == [TIMED_OUT]
    finally:
        ranks.close()


def test_a_process_outside_is_refused() -> None:
    """Without torch.distributed there is no group, and the error says so."""
    with pytest.raises(InvalidInputError) as caught:
        TorchGroup.of([0, 1], timeout_s=1.0)
    assert caught.value.kind is Kind.SETTING
