"""A trainer that waits for its own rollouts halves the fleet: it learns one step behind them.

Per step k: take the results of batch k (sampled at the version of step k - 2 or k - 1), put up
batch k + 1 at the newest committed version, learn from batch k while that is generated, publish.

What a crash leaves: steps up to the last committed version. A restarted trainer takes its weights
from there (the optimizer's moments are gone), commits its fence, and goes on with the next step.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from deltastore.coordination.backend import HeadHint
from deltastore.errors import Kind, LeaseError, StorageError
from deltastore.events import StepTrained
from deltastore.repository.resolve import version_exists
from workers.trainer.grpo import backward
from workers.trainer.jobs import Policy

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from deltastore.clock import Clock
    from deltastore.coordination.backend import Coordination
    from deltastore.events import EventSink
    from deltastore.format.manifest import VersionManifest
    from deltastore.pipeline.publication import Publication
    from deltastore.pipeline.publisher import Publisher
    from deltastore.repository.run import Run
    from workers.config import TrainerConfig
    from workers.trainer.dispatch import Batch, Dispatcher
    from workers.trainer.fleet import Fleet
    from workers.trainer.grpo import LossReport
    from workers.trainer.jobs import PolicyLedger
    from workers.trainer.optimizer import MasterOptimizer
    from workers.trainer.steady import Steady

CAPTURE_WAIT_S = 600.0
RETRY_S = 1.0
POLL_S = 0.25


class TrainerStopped(Exception):
    """Somebody asked the trainer to stop before its last step. Not a failure."""


class Trainer:
    """Runs the steps of one run. One thread uses it.

    Args:
        home: the run where versions are committed.
        publisher: open, its source the model.
        first_step: the first step that is not in the published weights yet.
        stopping: set by whoever wants it to stop early; it stops at the next safe moment.
        on_batch: shown what each step is about to learn from.
    """

    def __init__(
        self,
        home: Run,
        model: Any,
        optimizer: MasterOptimizer,
        publisher: Publisher,
        dispatcher: Dispatcher,
        ledger: PolicyLedger,
        fleet: Fleet,
        coordination: Coordination,
        steady: Steady,
        settings: TrainerConfig,
        *,
        first_step: int,
        stopping: threading.Event,
        on_batch: Callable[[Batch], None],
        clock: Clock,
        sink: EventSink,
    ) -> None:
        self._home = home
        self._model = model
        self._optimizer = optimizer
        self._publisher = publisher
        self._dispatcher = dispatcher
        self._ledger = ledger
        self._fleet = fleet
        self._coordination = coordination
        self._steady = steady
        self._settings = settings
        self._next_step = first_step
        self._on_batch = on_batch
        self._clock = clock
        self._sink = sink
        self._pending: Publication | None = None
        self._stopping = stopping

    def run(self) -> VersionManifest:
        """Train up to the last step; return the manifest of the final version.

        Raises TrainerStopped; LeaseError when another trainer took the run; CoordinationError when
        Redis or all actors are away for too long; StorageError when home is.
        """
        self._announce(self._publisher.head)
        self._wait_for_actors()
        ahead = self._settings.max_policy_lag >= 1
        dealt = self._next_step - 1
        for step in range(self._next_step, self._settings.steps + 1):
            if dealt < step:
                self._commit()
                self._dispatcher.deal(step)
                dealt = step
            batch = self._dispatcher.collect(step, self._tick)
            self._commit()  # the weights are about to change: what they were must exist first
            if ahead and step < self._settings.steps:
                self._dispatcher.deal(step + 1)
                dealt = step + 1
            self._learn(batch)
        self._commit()
        return self._publisher.head

    def _learn(self, batch: Batch) -> None:
        self._on_batch(batch)
        started_s = self._clock.monotonic_s()
        report = backward(
            self._model,
            batch.groups,
            temperature=self._settings.temperature,
            ratio_cap=self._settings.ratio_cap,
            micro_batch_groups=self._settings.micro_batch_groups,
        )
        if self._pending is not None:
            self._pending.wait_captured(CAPTURE_WAIT_S)
        grad_norm = self._optimizer.step()
        self._pending = self._publisher.publish(batch.step)
        train_s = self._clock.monotonic_s() - started_s
        self._sink(_event(batch, report, grad_norm, train_s))
        self._next_step = batch.step + 1

    def _tick(self) -> None:
        if self._stopping.is_set():
            raise TrainerStopped
        if self._pending is not None and self._pending.done():
            self._commit()
        self._require_right()

    def _require_right(self) -> None:
        """Stop when another trainer has taken the run: its hint says so, and the bucket agrees.

        A trainer that waits for results publishes nothing, so it would not meet the fence.
        """
        hint = self._steady.attempt(self._coordination.head_hint)
        head = self._publisher.head.core
        if hint is None or hint.generation <= head.generation or self._pending is not None:
            return
        try:
            taken = version_exists(self._home, head.version + 1)
        except StorageError:
            return  # asked again at the next turn; publishing would say what is wrong
        if taken:
            raise LeaseError(
                f"version {head.version + 1} was committed by another trainer",
                kind=Kind.FOREIGN_WRITER,
                run=self._home.name,
                version=head.version + 1,
                hint="two trainers were started on one run: this one, the earlier, stops",
            )

    def _commit(self) -> None:
        """Wait until the weights as they are exist as a version; remember and advertise it.

        A version that could not be committed is published again, until `commit_wait_s` is over:
        nothing may be sampled for the next step before.
        """
        deadline_s = self._clock.monotonic_s() + self._settings.commit_wait_s
        while (pending := self._pending) is not None:
            left_s = max(0.0, deadline_s - self._clock.monotonic_s())
            try:
                manifest = pending.result(left_s)
            except StorageError:
                if self._clock.monotonic_s() + RETRY_S > deadline_s:
                    raise
                self._clock.sleep_s(RETRY_S)
                self._pending = self._publisher.publish(self._next_step - 1) or pending
                continue
            self._pending = None
            core = manifest.core
            self._ledger.note(Policy(core.version, manifest.policy_hash, core.step_last))
            self._announce(manifest)

    def _announce(self, manifest: VersionManifest) -> None:
        core = manifest.core
        hint = HeadHint(core.version, manifest.policy_hash, core.generation)
        self._steady.attempt(lambda: self._coordination.announce_head(hint))

    def _wait_for_actors(self) -> None:
        """Let the first batch be split: wait, but not for ever, until enough actors are near."""
        deadline_s = self._clock.monotonic_s() + self._settings.actors_wait_s
        while self._clock.monotonic_s() < deadline_s:
            self._tick()
            count = self._steady.attempt(
                lambda: self._fleet.eligible_count(
                    head_version=self._ledger.newest.version, hashes=self._ledger.hashes()
                )
            )
            if count is not None and count >= self._settings.wait_for_actors:
                return
            self._clock.wait(self._stopping, POLL_S)


def _event(batch: Batch, report: LossReport, grad_norm: float, train_s: float) -> StepTrained:
    rewards = [reward for group in batch.groups for reward in group.rewards]
    versions = Counter(group.result.provenance.version for group in batch.groups)
    return StepTrained(
        step=batch.step,
        version=versions.most_common(1)[0][0],
        sampled_accuracy=sum(rewards) / len(rewards),
        loss=report.loss,
        grad_norm=grad_norm,
        samples=len(rewards),
        dropped=batch.dropped + batch.missing,
        lag_max=max(group.lag for group in batch.groups),
        ratio_mean=report.ratio_mean,
        ratio_max=report.ratio_max,
        mismatch_kl=report.mismatch_kl,
        wait_s=batch.wait_s,
        train_s=train_s,
    )
