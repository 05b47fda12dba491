"""A scripted engine behind `EngineControl`: fails where told to, and notices what must not be."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deltastore.errors import ApplyError, Kind
from deltastore.pipeline.engine_control import (
    EngineControl,
    PauseMode,
    RankStatus,
    ServedVersion,
    Wanted,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def hash_of(version: int) -> str:
    """A policy hash of that version."""
    return f"{version:064x}"


def served(version: int) -> ServedVersion:
    """That version of the one history there is."""
    return ServedVersion(version, hash_of(version))


@dataclass
class Rank:
    """One rank: the version of its weights, and why they are in doubt."""

    version: int | None = None
    poisoned: str = ""
    asleep: bool = False


@dataclass
class ScriptedEngine(EngineControl):
    """Ranks with weights, a cache, forward passes. Thread-safe as an engine is.

    `faults` names the calls that fail next: (call, how), first come first; how is "before" (nothing
    done), "after" (done, then failed), "false" (of a reset), "mixed" (of an update: the first rank
    alone is written) or "poisoned" (of an update or the start: no rank knows what it has).
    """

    ranks: list[Rank] = field(default_factory=lambda: [Rank(), Rank()])
    start: int = 1
    """Where ranks find themselves at initialisation; when `loaded` is another, it is rebuilt."""
    loaded: int | None = None
    """What was in memory before: forward passes before the start are made with it."""
    staged: int | None = None
    faults: list[tuple[str, str]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    paused: bool = False
    meanwhile: dict[str, Callable[[], object]] = field(default_factory=dict)
    """What somebody else does once during a call, by the call's name."""
    cached: int | None = None
    """The version that computed what is in the caches."""
    forwards: int = 0
    requests: list[str] = field(default_factory=list)
    """How requests that were in flight ended."""
    wrong: list[str] = field(default_factory=list)
    store: list[object] = field(default_factory=list)
    """What every rank says of the use of the store."""

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._writing = False

    def forward(self, *, within_s: float = 0.0) -> bool:
        """One forward pass, if the engine lets it in; remembers whatever it should not have met."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self.paused, within_s):
                return False
            self._running += 1
        before = self._held()
        asleep = any(rank.asleep for rank in self.ranks)
        threading.Event().wait(0)  # others run
        after = self._held()
        with self._changed:
            self.wrong += ["a write during a forward pass"] * (self._writing or before != after)
            self.wrong += ["ranks differ"] * (len(set(before)) > 1)
            self.wrong += ["memory that is away"] * asleep
            self.wrong += ["poisoned weights"] * any(rank.poisoned for rank in self.ranks)
            self.wrong += ["a stale cache"] * (self.cached not in (None, before[0][0]))
            self.cached = before[0][0]
            self.forwards += 1
            self._running -= 1
            self._changed.notify_all()
        return True

    def _held(self) -> list[tuple[int | None, str]]:
        """What is in each rank's memory, whether or not it follows."""
        return [
            (self.loaded if rank.version is None else rank.version, rank.poisoned)
            for rank in self.ranks
        ]

    def initialise(self) -> None:
        """Every rank is at `start`, unless it is somewhere already."""
        with self._step("initialise") as how:
            if how == "poisoned":
                for rank in self.ranks:
                    rank.poisoned = "the rebuild broke off"
                raise ApplyError("poisoned", kind=Kind.POISONED)
            self.wrong += ["a start while asleep"] * any(rank.asleep for rank in self.ranks)
            self._writing = self.loaded not in (None, self.start)
            self._meanwhile("initialise")
            for rank in self.ranks:
                rank.version = self.start if rank.version is None else rank.version
                rank.poisoned = ""
            self._writing = False

    def status(self) -> list[RankStatus]:
        """What the ranks say."""
        with self._step("status"):
            pass
        return [
            RankStatus.parse(
                {
                    "rank": number,
                    "active": None
                    if rank.version is None
                    else {"version": rank.version, "policy_hash": hash_of(rank.version)},
                    "staged": self.staged,
                    "head": self.staged,
                    "poisoned": rank.poisoned,
                    "store": self.store,
                    "trouble": "",
                    "coverage": {"share": 1.0},
                    "dense_share": 0.0,
                    "shadow_bytes": 0,
                    "scratch_bytes": 64,
                    "last_pause_s": None,
                    "asleep": rank.asleep,
                }
            )
            for number, rank in enumerate(self.ranks)
        ]

    def pause(self, mode: PauseMode) -> None:
        """Keep forward passes out; what is cached is dropped."""
        with self._step(f"pause({mode.value})"), self._changed:
            self.paused = True
            if not self._changed.wait_for(lambda: self._running == 0, 10):
                self.wrong.append("a forward pass never ended")
            self.cached = None
            self.requests += [mode.value]

    def is_paused(self) -> bool:
        """Whether forward passes are kept out."""
        with self._step("is_paused"):
            return self.paused

    def sleep(self) -> None:
        """As somebody else puts an engine to sleep: paused, memory away, caches gone."""
        self.paused, self.cached = True, None
        for rank in self.ranks:
            rank.asleep = True

    def wake_up(self) -> None:
        """Memory is back, and forward passes are let in."""
        for rank in self.ranks:
            rank.asleep = False
        with self._changed:
            self.paused = False
            self._changed.notify_all()

    def update(self, wanted: Wanted) -> None:
        """Write the staged version, rank by rank."""
        with self._step(f"update({wanted})") as how:
            target = self.staged
            self._meanwhile("update")
            if any(rank.asleep for rank in self.ranks):
                raise ApplyError("the engine sleeps", kind=Kind.NOT_STAGED)
            if target is None:
                raise ApplyError("nothing is staged", kind=Kind.NOT_STAGED)
            if how == "poisoned":
                for rank in self.ranks:
                    rank.poisoned = "the rollback failed"
                raise ApplyError("poisoned", kind=Kind.POISONED, version=target)
            self._writing = True
            for rank in self.ranks[: 1 if how == "mixed" else None]:
                rank.version = target
                self._meanwhile("write")
                threading.Event().wait(0)
            self._writing = False
            if how == "mixed":
                raise ApplyError("a rank died", kind=Kind.ENGINE, version=target)
            self.staged = None

    def reset_caches(self) -> bool:
        """Empty the cache."""
        with self._step("reset") as how:
            if how == "false":
                return False
            self.cached = None
            return True

    def resume(self) -> None:
        """Let forward passes in."""
        with self._step("resume"), self._changed:
            self.paused = False
            self._changed.notify_all()

    def re_anchor(self) -> None:
        """Write the newest version whole."""
        with self._step("re_anchor"):
            self._meanwhile("re_anchor")
            newest = max([self.staged or 0, *(rank.version or 0 for rank in self.ranks)])
            self.wrong += ["a rebuild that is not kept apart"] * (not self.paused)
            self._writing = True
            for rank in self.ranks:
                rank.version, rank.poisoned = newest, ""
            self._writing = False
            self.staged = None

    def _meanwhile(self, call: str) -> None:
        done = self.meanwhile.pop(call, None)
        if done is not None:
            done()

    def _step(self, call: str) -> _Step:
        self.calls.append(call)
        return _Step(self, call.partition("(")[0])


class _Step:
    """One call, that may be told to fail before or after it has done its work."""

    def __init__(self, engine: ScriptedEngine, call: str) -> None:
        self._how = ""
        for number, (name, how) in enumerate(engine.faults):
            if name == call:
                del engine.faults[number]
                self._how = how
                break
        self._call = call

    def __enter__(self) -> str:
        if self._how == "before":
            raise ApplyError(f"{self._call} failed", kind=Kind.ENGINE)
        return self._how

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._how == "after" and kind is None:
            raise ApplyError(f"{self._call} was not answered", kind=Kind.ENGINE_TIMEOUT)
