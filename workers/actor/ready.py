"""An engine without its weights' version is half an actor: both are handed over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.actor.engine import ActorWeights, Engine


@dataclass(frozen=True, slots=True)
class ReadyEngine:
    """An engine whose weights are at a proved version of the run.

    Args:
        via: how they got there, for people.
    """

    engine: Engine
    weights: ActorWeights
    via: str
