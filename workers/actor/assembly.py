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

    from deltastore.pipeline.replay import JoinReport
    from deltastore.repository.points import ActiveVersion
    from workers.actor.engine import Engine
    from workers.config import ActorConfig
    from workers.run_folder import FinalReport
    from workers.wiring import Surroundings

_LOG = logging.getLogger(__name__)
ENGINES = ("transformers",)


def act(around: Surroundings, on_ready: Callable[[Actor], None]) -> FinalReport:
    """Run the actor that the surroundings' file describes until it is told to stop.

    Args:
        on_ready: given the actor before it runs, for whoever wants to stop it.
    """
    settings = around.config.actor
    if settings is None:
        raise InvalidInputError(
            "the file has no `actor` part", kind=Kind.SETTING, hint="see workers/config.py"
        )
    torch.set_num_threads(around.config.threads)
    engine, active, report = _engine(around, settings)
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


def _engine(
    around: Surroundings, settings: ActorConfig
) -> tuple[Engine, ActiveVersion, JoinReport]:
    """The engine that the file names, with weights at a proved version."""
    if settings.engine not in ENGINES:
        raise InvalidInputError(
            f"there is no engine {settings.engine!r}",
            kind=Kind.SETTING,
            hint=f"actor.engine is one of: {', '.join(ENGINES)}",
        )
    live = join(
        around.regions[settings.region],
        checkpoint=around.checkpoint,
        scratch=around.folder.scratch(settings.actor_id),
        clock=around.clock,
    )
    return TransformersEngine(live.model, live.target), live.active, live.report
