"""Shortcuts made by hand are made once, then joiners replay everything again: this keeps at it.

Round after round, for each bucket: anchors, composites, then what retention and the janitor would
delete (and do, if the file says so). Any number of these may run at once, and be killed: what two
of them make is the same, and committed by one create-only put. A task that fails is reported as an
event and does not keep the others, or the next round, from their work.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from deltastore.cli.keys import read_signer, read_trusted
from deltastore.errors import DeltastoreError, InvalidInputError, Kind
from deltastore.events import MaintenanceFailed
from deltastore.maintenance.anchors import AnchorPolicy, run_anchors
from deltastore.maintenance.composites import run_composites
from deltastore.maintenance.decisions import deletions
from deltastore.maintenance.janitor import JanitorPolicy, run_janitor
from deltastore.maintenance.retention import run_retention
from deltastore.maintenance.retention_plan import RetentionPolicy
from deltastore.maintenance.room import make_room
from deltastore.maintenance.settings import MaintenanceSettings
from deltastore.repository.body_checks import have_bodies_checked

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable

    from deltastore.maintenance.decisions import Decision
    from deltastore.repository.run import Run
    from workers.config import MaintenanceConfig
    from workers.wiring import Premises

_LOG = logging.getLogger(__name__)


def tend(at: Premises, stopping: threading.Event) -> None:
    """Tend the buckets until told to stop, or for as many rounds as the file says.

    Raises the first error of the last of a limited number of rounds, when it is over.
    """
    settings = at.config.maintenance
    if settings is None:
        raise InvalidInputError(
            "the file has no `maintenance` part", kind=Kind.SETTING, hint="see docs/workers.md"
        )
    rounds = 0
    tender = Tender(at, settings)
    while not stopping.is_set():
        errors = tender.one_round(stopping)
        rounds += 1
        if settings.rounds_max is not None and rounds >= settings.rounds_max:
            if errors:
                raise errors[0]
            return
        at.clock.wait(stopping, settings.every_s)


class Tender:
    """One worker's tasks over the buckets that its file names."""

    def __init__(self, at: Premises, settings: MaintenanceConfig) -> None:
        self._at = at
        self._settings = settings
        self._names = settings.regions or tuple(at.regions)
        self._checked: set[str] = set()
        self._made = MaintenanceSettings(streams=settings.streams)
        self._anchors = AnchorPolicy(
            join_seconds_max=settings.join_seconds_max, multiple=settings.anchor_multiple
        )
        self._retention = RetentionPolicy(
            keep_versions=settings.keep_versions,
            grace_s=settings.grace_s,
            rollout_keep_versions=settings.rollout_keep_versions,
        )
        self._janitor = JanitorPolicy(
            commit_deadline_s=self._made.commit_deadline_s,
            grace_s=settings.orphan_grace_s,
            abandoned_s=settings.abandoned_s,
        )
        self._signer = read_signer([Path(path) for path in settings.sign_keys])
        trusted = settings.trusted_keys
        self._trusted = read_trusted(None if trusted is None else Path(trusted))

    def one_round(self, stopping: threading.Event) -> list[DeltastoreError]:
        """Every task for every bucket once; what failed, after it was reported."""
        tasks: dict[str, Callable[[str, Run], None]] = {
            "anchors": self._make_anchor,
            "composites": self._make_composites,
            "retention": self._retain,
            "janitor": self._tidy,
        }
        errors: list[DeltastoreError] = []
        for name in self._names:
            for task, work in tasks.items():
                if task not in self._settings.tasks or stopping.is_set():
                    continue
                try:
                    work(name, self._at.regions[name])
                except DeltastoreError as err:
                    errors.append(err)
                    _LOG.warning("%s in %s: %s", task, name, err)
                    version = 0 if err.version is None else err.version
                    self._at.sink(MaintenanceFailed(task, version, err.kind.value, str(err)))
        return errors

    def _have_bodies_checked(self, name: str) -> None:
        """Once for each bucket, as soon as it answers."""
        if name not in self._checked:
            run = self._at.regions[name]
            have_bodies_checked(run.store, run.keys)
            self._checked.add(name)

    def _make_anchor(self, name: str, run: Run) -> None:
        self._have_bodies_checked(name)
        made = run_anchors(
            run,
            self._anchors,
            clock=self._at.clock,
            settings=self._made,
            sink=self._at.sink,
            signer=self._signer,
            trusted=self._trusted,
        )
        if made is None:
            made = make_room(
                run,
                self._anchors,
                self._retention,
                clock=self._at.clock,
                settings=self._made,
                sink=self._at.sink,
                signer=self._signer,
                trusted=self._trusted,
            )
        if made is not None:
            _LOG.info("%s: anchor %d", name, made.core.target.version)

    def _make_composites(self, name: str, run: Run) -> None:
        self._have_bodies_checked(name)
        done = run_composites(
            run,
            clock=self._at.clock,
            settings=self._made,
            sink=self._at.sink,
            signer=self._signer,
            trusted=self._trusted,
        )
        if done.written:
            _LOG.info("%s: %d composites", name, len(done.written))

    def _retain(self, name: str, run: Run) -> None:
        home = name == self._at.config.home
        others = {n: r for n, r in self._at.regions.items() if n != name} if home else {}
        done = run_retention(
            run,
            self._retention,
            dry_run=not self._settings.delete,
            regions=others,
            behind=frozenset(self._settings.behind),
            sink=self._at.sink,
            streams=self._settings.streams,
            trusted=self._trusted,
        )
        _report(name, "retention", done.plan.decisions, done.deleted)

    def _tidy(self, name: str, run: Run) -> None:
        done = run_janitor(
            run,
            self._janitor,
            dry_run=not self._settings.delete,
            sink=self._at.sink,
            streams=self._settings.streams,
        )
        _report(name, "janitor", done.decisions, done.deleted)


def _report(name: str, task: str, decisions: Iterable[Decision], deleted: int) -> None:
    doomed = len(deletions(decisions))
    if deleted:
        _LOG.info("%s: %s deleted %d objects", name, task, deleted)
    elif doomed:
        _LOG.info("%s: %s would delete %d objects", name, task, doomed)
