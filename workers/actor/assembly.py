"""An actor on another engine than asked for answers differently: the engine is named, or refused.

Puts an actor together from its surroundings: weights at a proved version, engine, loop.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from deltastore.config import FollowerSettings
from deltastore.errors import InvalidInputError, Kind
from workers.actor.loop import Actor
from workers.actor.transformers_engine import TransformersEngine
from workers.weights import join

if TYPE_CHECKING:
    from collections.abc import Callable

    from workers.actor.engine import Engine
    from workers.config import ActorConfig
    from workers.run_folder import FinalReport
    from workers.weights import LiveWeights
    from workers.wiring import Surroundings

_LOG = logging.getLogger(__name__)
ENGINES = ("transformers",)


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
            "the file has no `actor` part", kind=Kind.SETTING, hint="see workers/config.py"
        )
    torch.set_num_threads(around.config.threads)
    live = _join(around, settings)
    if make_engine is None:
        engine: Engine = TransformersEngine(live.model, live.target)
    else:
        engine = make_engine(live)
    active, report = live.active, live.report
    _LOG.info("at version %d (%s)", active.version, report.via)
    actor = Actor(
        around.regions[settings.region],
        engine,
        active,
        report,
        coordination=around.coordination,
        settings=settings,
        follower=FollowerSettings(),
        threads=around.config.threads,
        folder=around.folder,
        clock=around.clock,
        sink=around.sink,
    )
    on_ready(actor)
    return actor.run()


def _join(around: Surroundings, settings: ActorConfig) -> LiveWeights:
    """Weights at a proved version; an engine that there is not is refused before."""
    if settings.engine not in ENGINES:
        raise InvalidInputError(
            f"there is no engine {settings.engine!r}",
            kind=Kind.SETTING,
            hint=f"actor.engine is one of: {', '.join(ENGINES)}",
        )
    return join(
        around.regions[settings.region],
        checkpoint=around.checkpoint,
        scratch=around.folder.scratch(settings.actor_id),
        clock=around.clock,
    )
