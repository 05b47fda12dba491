"""A restarted trainer that starts from its checkpoint undoes the run: it starts from HEAD.

Puts a trainer together from its surroundings and sees it through: weights at HEAD, publisher (whose
opening commits the fence), job table, steps, final state.
"""

from __future__ import annotations

import logging
from contextlib import closing
from typing import TYPE_CHECKING

import torch

from deltastore.adapters.torch_state import ModuleSource
from deltastore.config import OnBacklog, PublisherSettings
from deltastore.errors import InvalidInputError, Kind
from deltastore.pipeline.publisher import Publisher
from deltastore.pipeline.replay import Held
from deltastore.pipeline.replicator import Region
from deltastore.repository.fetch import load_manifest
from deltastore.repository.resolve import find_head
from workers.early_segments import SegmentTeller
from workers.run_folder import TRAINER
from workers.trainer.dispatch import Dispatcher
from workers.trainer.ending import leave_final_state, wait_for_stop
from workers.trainer.fleet import Fleet
from workers.trainer.jobs import JobTable, Policy, PolicyLedger
from workers.trainer.loop import Trainer, TrainerStopped
from workers.trainer.optimizer import MasterOptimizer, OptimizerSettings
from workers.trainer.rates import RateSnapshot
from workers.trainer.steady import Steady
from workers.trainer.tasks import Sums
from workers.weights import join, read_whole, rebuild

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from pathlib import Path

    from workers.config import TrainerConfig
    from workers.run_folder import FinalReport
    from workers.trainer.dispatch import Batch
    from workers.trainer.tasks import Task
    from workers.weights import LiveWeights
    from workers.wiring import Surroundings

_LOG = logging.getLogger(__name__)
ENCODE_THREADS = 2


def train(
    around: Surroundings,
    stopping: threading.Event,
    *,
    make_task: Callable[[Path, int], Task] = Sums.from_folder,
    on_batch: Callable[[Batch], None] = lambda batch: None,
) -> FinalReport | None:
    """Run the trainer that the surroundings' file describes; its report, None if it was stopped.

    Args:
        stopping: set by whoever wants it to stop early.
        make_task: makes prompts and rewards from a folder with the tokenizer and the run's seed.
        on_batch: shown what each step is about to learn from.
    """
    settings = around.config.trainer
    if settings is None:
        raise InvalidInputError(
            "the file has no `trainer` part", kind=Kind.SETTING, hint="see docs/workers.md"
        )
    torch.set_num_threads(around.config.threads)
    live, first_step = _weights_at_head(around)
    with (
        closing(SegmentTeller(around.coordination)) as teller,
        closing(_open_publisher(around, live, first_step, teller)) as publisher,
    ):
        task = make_task(live.folder, around.config.seed)
        trainer = _assemble(around, settings, live, publisher, task, first_step, stopping, on_batch)
        try:
            final = trainer.run()
        except TrainerStopped:
            _LOG.info("stopped at version %d", publisher.head.core.version)
            return None
        behind = publisher.wait_regions(settings.commit_wait_s)
        if behind:
            _LOG.warning("behind at the end: %s", ", ".join(behind))
        report = leave_final_state(around.folder, live.target, final)
        _LOG.info("trained to version %d, waiting for the stop file", report.version)
        wait_for_stop(around.folder, stopping, clock=around.clock, timeout_s=settings.stop_wait_s)
        return report


def _open_publisher(
    around: Surroundings, live: LiveWeights, first_step: int, teller: SegmentTeller
) -> Publisher:
    home = around.regions[around.config.home]
    return Publisher.open(
        home,
        ModuleSource(live.model, layout=home.layout),
        clock=around.clock,
        step=first_step - 1,
        regions=[
            Region(name, run, around.config.region(name).streams)
            for name, run in around.regions.items()
            if name != around.config.home
        ],
        settings=PublisherSettings(
            on_backlog=OnBacklog.WAIT,
            encode_threads=ENCODE_THREADS,
            spool_folder=str(around.folder.made_scratch(TRAINER)),
        ),
        sink=around.sink,
        baseline=Held(read_whole(live.target), live.active),
        announce=teller.tell,
    )


def _weights_at_head(around: Surroundings) -> tuple[LiveWeights, int]:
    """A model at HEAD, from the local checkpoint if that is HEAD; and the first step to make."""
    home = around.regions[around.config.home]
    live = join(
        home,
        checkpoint=around.checkpoint,
        scratch=around.folder.scratch(TRAINER),
        clock=around.clock,
    )
    if live.active.version != find_head(home):
        live = live.moved(*rebuild(home, live.target, clock=around.clock))
    step = load_manifest(home, live.active.version).core.step_last
    _LOG.info("at version %d, step %d (%s)", live.active.version, step, live.report.via)
    return live, step + 1


def _assemble(
    around: Surroundings,
    settings: TrainerConfig,
    live: LiveWeights,
    publisher: Publisher,
    task: Task,
    first_step: int,
    stopping: threading.Event,
    on_batch: Callable[[Batch], None],
) -> Trainer:
    home = around.regions[around.config.home]
    head = publisher.head
    ledger = PolicyLedger(Policy(head.core.version, head.policy_hash, first_step - 1))
    table = JobTable(
        ledger,
        max_policy_lag=settings.max_policy_lag,
        vocabulary=int(live.model.config.vocab_size),
    )
    steady = Steady(around.clock, settings.outage_max_s)
    fleet = Fleet(around.coordination, RateSnapshot(home, around.clock))
    dispatcher = Dispatcher(
        around.coordination,
        around.regions,
        task,
        table,
        ledger,
        fleet,
        steady,
        settings,
        seed=around.config.seed,
        clock=around.clock,
        sink=around.sink,
    )
    optimizer = MasterOptimizer(
        live.model,
        home.layout,
        OptimizerSettings(
            lr=settings.lr,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay,
            clip_norm=settings.clip_norm,
        ),
    )
    return Trainer(
        home,
        live.model,
        optimizer,
        publisher,
        dispatcher,
        ledger,
        fleet,
        around.coordination,
        steady,
        settings,
        first_step=first_step,
        stopping=stopping,
        on_batch=on_batch,
        clock=around.clock,
        sink=around.sink,
    )
