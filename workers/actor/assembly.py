"""An actor on another engine than asked for answers differently: the engine is named, or refused.

Puts an actor together from its surroundings: weights at a proved version, engine, loop.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deltastore.cli.keys import read_trusted
from deltastore.config import FollowerSettings
from deltastore.errors import InvalidInputError, Kind
from workers.actor.follow import FollowedWeights
from workers.actor.loop import Actor
from workers.actor.ready import ReadyEngine
from workers.actor.safe_point import SafePoint
from workers.actor.transformers_engine import TransformersEngine
from workers.config import TRANSFORMERS, VLLM
from workers.weights import join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from workers.actor.engine import Engine
    from workers.config import ActorConfig
    from workers.run_folder import FinalReport
    from workers.weights import LiveWeights
    from workers.wiring import Surroundings

_LOG = logging.getLogger(__name__)


def act(
    around: Surroundings,
    on_ready: Callable[[Actor], None],
    *,
    make_engine: Callable[[LiveWeights], Engine] | None = None,
) -> FinalReport:
    """Run the actor that the surroundings' file describes until it is told to stop.

    Args:
        on_ready: given the actor before it runs, for whoever wants to stop it.
        make_engine: an engine of the caller's own; None is the one that the file names.
    """
    settings = around.config.actor
    if settings is None:
        raise InvalidInputError(
            "the file has no `actor` part", kind=Kind.SETTING, hint="see docs/workers.md"
        )
    torch.set_num_threads(around.config.threads)
    safe_point = SafePoint(around.clock)
    with _ready(around, settings, safe_point, make_engine) as ready:
        _LOG.info("at version %d (%s)", ready.weights.active.version, ready.via)
        actor = Actor(
            around.regions[settings.region],
            ready.engine,
            ready.weights,
            via=ready.via,
            safe_point=safe_point,
            coordination=around.coordination,
            settings=settings,
            threads=around.config.threads,
            folder=around.folder,
            clock=around.clock,
            sink=around.sink,
        )
        on_ready(actor)
        return actor.run()


@contextmanager
def _ready(
    around: Surroundings,
    settings: ActorConfig,
    safe_point: SafePoint,
    make_engine: Callable[[LiveWeights], Engine] | None,
) -> Iterator[ReadyEngine]:
    """The engine that the file names, with its weights at a proved version."""
    if settings.engine == TRANSFORMERS:
        yield _on_transformers(around, settings, safe_point, make_engine)
        return
    if settings.engine != VLLM or make_engine is not None:
        raise InvalidInputError(f"there is no engine {settings.engine!r} here", kind=Kind.SETTING)
    # Only now: vLLM has an environment of its own.
    from workers.actor.vllm_start import start_vllm

    with start_vllm(around, settings, safe_point) as ready:
        yield ready


def _on_transformers(
    around: Surroundings,
    settings: ActorConfig,
    safe_point: SafePoint,
    make_engine: Callable[[LiveWeights], Engine] | None,
) -> ReadyEngine:
    run = around.regions[settings.region]
    trusted = read_trusted(None if settings.trusted_keys is None else Path(settings.trusted_keys))
    live = join(
        run,
        checkpoint=around.checkpoint,
        scratch=around.folder.scratch(settings.actor_id),
        clock=around.clock,
        trusted=trusted,
    )
    weights = FollowedWeights(
        run,
        live.target,
        live.active,
        live.report,
        name=settings.actor_id,
        coordination=around.coordination,
        settings=FollowerSettings(),
        most_rebuilds=settings.leave_poisoned_after,
        safe_point=safe_point,
        clock=around.clock,
        sink=around.sink,
        stager_folder=None if settings.stager_folder is None else Path(settings.stager_folder),
        trusted=trusted,
    )
    engine = TransformersEngine(live.model) if make_engine is None else make_engine(live)
    return ReadyEngine(engine, weights, live.report.via)
