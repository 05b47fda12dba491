"""An actor that knows its engine's insides cannot change engines: it speaks to protocols only.

An engine generates, and its weights change, neither of them on its own: the actor's loop calls both
from one thread, so between two calls no forward pass is in flight (a safe point).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from deltastore.errors import FormatError, Kind
from deltastore.ids import MAX_VERSION, is_sha256
from deltastore.pipeline.engine_control import ServedVersion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltastore.format.fingerprint import Fingerprint
    from deltastore.repository.points import ActiveVersion
    from workers.sampling import Sampling

Progress: TypeAlias = Callable[[int], bool]
"""Told after every decoding step how many tokens there are; False stops the generation."""


class GenerationStopped(Exception):
    """Progress said stop: nothing was completed. Not a failure."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One group to generate: token ids and how to sample."""

    tokens: tuple[int, ...]
    sampling: Sampling


def parse_label(text: str) -> ServedVersion:
    """Read an engine's label of its weights, `version:policy-hash`; FormatError(field) if odd."""
    number, _, policy_hash = text.partition(":")
    good = number.isascii() and number.isdigit() and len(number) <= 16 and is_sha256(policy_hash)
    if not good or int(number) > MAX_VERSION:
        raise FormatError(
            f"weights labelled {text[:80]!r} are of no version",
            kind=Kind.FIELD,
            hint="an engine that follows a run labels its weights `version:policy-hash`",
        )
    return ServedVersion(int(number), policy_hash)


@dataclass(frozen=True, slots=True)
class Completions:
    """The samples of one prompt.

    Args:
        tokens: per sample, its stop token included.
        logprobs: per token, of the distribution it was sampled from (after temperature, top-p).
        finished: per sample, whether it stopped by itself.
        begin, end: what the engine says its weights were at the first token and at the last; None:
            its weights are changed by its caller alone, between two calls.
        unversioned: what is wrong with the engine's own label, when it names no version: then
            nobody knows what sampled the tokens, and `begin` and `end` are None.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    finished: list[bool]
    begin: ServedVersion | None = None
    end: ServedVersion | None = None
    unversioned: str = ""


class Engine(Protocol):
    """Generates with live weights that somebody else may change between two calls."""

    def generate(self, prompts: Sequence[Prompt], progress: Progress) -> list[Completions]:
        """Sample every prompt; GenerationStopped when `progress` returned False."""
        ...


class ActorWeights(Protocol):
    """An engine's weights as the actor's loop sees them: they follow a run.

    `active`, `poisoned`, `staged_version`, `staleness` and `trouble` may be asked from any thread
    and cost nothing; the rest is called from the loop's.
    """

    @property
    def active(self) -> ActiveVersion | ServedVersion:
        """The version the weights are at."""
        ...

    @property
    def poisoned(self) -> bool:
        """Whether the weights are in doubt: nothing may be served."""
        ...

    @property
    def staged_version(self) -> int | None:
        """The version that waits for a safe point."""
        ...

    @property
    def staleness(self) -> int:
        """Newest known version minus the active one."""
        ...

    @property
    def trouble(self) -> str:
        """What keeps them from going on, for people; empty when nothing does."""
        ...

    def start(self) -> None:
        """Stage in the background from now on."""
        ...

    def stop(self) -> None:
        """Stop staging."""
        ...

    def catch_up(self) -> None:
        """Activate what exists now, before the first lease, and say how it got here."""
        ...

    def activate(self) -> bool:
        """Make a safe point and activate what is staged; whether the weights changed."""
        ...

    def re_anchor(self) -> None:
        """Rebuild from the bucket; ApplyError(poisoned) after too many in a row."""
        ...

    def lost_its_history(self) -> bool:
        """Whether the run's history no longer passes through the active version."""
        ...

    def fingerprint(self) -> Fingerprint:
        """A whole pass over the live weights."""
        ...
