"""The steps of following between which a process may die, as data, and how it is made to."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltastore.pipeline.ballot import Round

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Step:
    """A place to die at.

    Args:
        at: "module:Class.method", or a function of a module as that module sees it.
        after: when the call has returned; else before it is made.
        nth: call of it, from 1; of a generator: piece of it, before it is given.
        when: of the call's arguments: whether it counts.
        during: what brings a process there.
    """

    name: str
    at: str
    after: bool = False
    nth: int = 1
    when: Callable[..., bool] | None = None
    during: str = "update"


def _vote(number: Round) -> Callable[..., bool]:
    return lambda _voter, ballot, *_others, **_named: ballot.round is number


def _in(folder: str) -> Callable[..., bool]:
    return lambda _path, target: target.parent.name == folder


def _of_a_body(_reader: Any, key: str, *_others: Any) -> bool:
    return key.endswith(".seg")


def _of_an_update(_folder: Any, _rank: str, offer: Any) -> bool:
    return offer.update is not None


VLLM = "deltastore.adapters.vllm."
PIPELINE = "deltastore.pipeline."
VOTE = f"{PIPELINE}voter:Voter.vote"
WRITE = "deltastore.adapters.placed_target:PlacedTarget.write"
PLAN = "deltastore.adapters.placed_target:PlacedTarget.plan"
WHOLE = "deltastore.adapters.placed_target:PlacedTarget.write_state"
MEMORY = "deltastore.adapters.live_memory:HostMemory.write"
APPLIER = f"{PIPELINE}rank_applier:RankApplier."
FEED = f"{PIPELINE}stager_rank:StagedFeed."
CORE = "vllm.v1.engine.core:EngineCore."
AT_START = (
    Step("ranks meet in the spool", f"{VLLM}world:meet", nth=2, during="start"),
    Step("a reload is tried out", f"{VLLM}reload:_Form.write", nth=1, during="start"),
    Step("a stager has begun", f"{VLLM}child_stager:ChildStager._look", True, during="start"),
    Step("its version is found", f"{VLLM}rank:EngineRank._located", True, during="start"),
    Step("its place is noted", f"{FEED}start", during="start"),
)
FOLLOWING = (
    Step("an update is announced", f"{PIPELINE}stager_rank:map_update"),
    Step("it is mapped", PLAN),
    Step("it is prepared", PLAN, True),
    Step("before vote 1", VOTE, when=_vote(Round.VERIFY)),
    Step("after vote 1", VOTE, True, when=_vote(Round.VERIFY)),
    Step("after the first part", WRITE, True),
    Step("after part 9", WRITE, True, nth=9),
    Step("after the last part", f"{WRITE}_all", True),
    Step("in a reload", f"{VLLM}reload:_Form.write", nth=2),
    Step("before vote 2", VOTE, when=_vote(Round.WRITTEN)),
    Step("after vote 2", VOTE, True, when=_vote(Round.WRITTEN)),
    Step("the marker has moved", f"{APPLIER}activate", True),
    Step("its note is half written", "pathlib:Path.replace", when=_in("ranks")),
    Step("its note is written", f"{FEED}take", True),
    Step("the core is named", f"{CORE}set_weight_version", True),
    Step("it finishes", f"{VLLM}backend:DeltastoreEngine.finish_weight_update"),
    Step("caches are reset", f"{CORE}reset_prefix_cache"),
)
REBUILDING = (
    Step("a state is rebuilt", f"{VLLM}rank:EngineRank._rebuilt", True, during="re-anchor"),
    Step("half a state is written", MEMORY, True, nth=8, during="re-anchor"),
    Step("a state is written", WHOLE, True, during="re-anchor"),
    Step("it is proved", f"{APPLIER}write_state", True, during="re-anchor"),
)
STAGING = (
    Step("a body is on its way", "deltastore.storage.s3_reader:S3Reader._fill", when=_of_a_body),
    Step("an update is half written", f"{PIPELINE}spool:staged_parts", nth=12),
    Step("an update is written", "pathlib:Path.rename", when=_in("updates")),
    Step("it has its name", "pathlib:Path.rename", True, when=_in("updates")),
    Step("its offer is half written", "pathlib:Path.replace", when=_in("offers")),
    Step("it is announced", f"{PIPELINE}spool:SpoolFolder.write_offer", True, when=_of_an_update),
)
"""Of a stager, not of an engine."""
STEPS = {step.name: step for step in (*AT_START, *FOLLOWING, *REBUILDING, *STAGING)}


def arm(step: Step, die: Callable[[], None] | None = None) -> None:
    """Have this process die at that step, as of SIGKILL."""
    die = die or kill_self
    module, _, path = step.at.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    call = getattr(owner, name)
    left = step.nth

    def counts(*arguments: Any, **named: Any) -> bool:
        """Whether the time has come."""
        nonlocal left
        if step.when is None or step.when(*arguments, **named):
            left -= 1
            return left == 0
        return False

    @functools.wraps(call)
    def dying(*arguments: Any, **named: Any) -> Any:
        now = counts(*arguments, **named)
        if now and not step.after:
            die()
        found = call(*arguments, **named)
        if now:
            die()
        return found

    def dying_pieces(*arguments: Any, **named: Any) -> Iterator[Any]:
        for piece in call(*arguments, **named):
            if counts(*arguments, **named):
                die()
            yield piece

    setattr(owner, name, dying_pieces if inspect.isgeneratorfunction(call) else dying)


def kill_self() -> None:
    """SIGKILL: nothing of this process runs after it."""
    os.kill(os.getpid(), signal.SIGKILL)
