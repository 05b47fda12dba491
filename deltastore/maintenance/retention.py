"""A body deleted a second too early fails a reader at hour three: this is the order and the wait.

Each round does what is safe now, and no more:
  1. the whole state that everything kept will build on is read and its digests are checked
  2. `hints/floor` is raised to its version      readers plan above it from now on
  3. what has been below the floor for `grace_s` goes: shortcut manifests, then bodies
A round that raises the floor deletes nothing below the new floor: a later round does, by the
store's own clock. Nothing waits, nothing depends on Redis, and a crash after any step is a round
cut short. A reader that meets a body that is gone plans again from the floor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.errors import IntegrityError, Kind
from deltastore.events import FloorRaised, discard
from deltastore.maintenance.decisions import carry_out
from deltastore.maintenance.retention_plan import RetentionPlan, RetentionPolicy, plan_retention
from deltastore.repository.floor import Floor, Raise, read_floor, store_now_ms, write_floor
from deltastore.repository.full import check_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deltastore.events import EventSink
    from deltastore.format.signing import TrustedKeys
    from deltastore.repository.run import Run

NO_FLOOR = Floor((Raise(0, 0),))


@dataclass(frozen=True, slots=True)
class RetentionDone:
    """What one round did: the floor now, and how many objects went."""

    plan: RetentionPlan
    floor: int
    deleted: int


def execute_retention(
    run: Run,
    plan: RetentionPlan,
    *,
    now_ms: int | None,
    sink: EventSink = discard,
    streams: int = 8,
    check_start: bool = True,
) -> RetentionDone:
    """Carry a plan out.

    Args:
        now_ms: the store's own time; None when the store has no dates: then the floor is not
            raised, because nobody could tell when its grace time is over.
        check_start: read all of the whole state at the new floor before the floor is raised.

    Raises IntegrityError (digest) before anything is deleted when that state is damaged.
    """
    floor = 0 if plan.advertised is None else plan.advertised.version
    if plan.raises_floor and now_ms is not None and plan.floor > 0:
        if not plan.files:
            raise IntegrityError(
                f"there is no whole state at the floor {plan.floor}",
                kind=Kind.BROKEN_CHAIN,
                run=run.name,
                version=plan.floor,
                hint="make an anchor first",
            )
        if check_start:
            for file in plan.files:
                check_file(run, file, streams=streams)
        raised = (read_floor(run) or NO_FLOOR).raised_to(plan.floor, now_ms)
        write_floor(run, raised)
        sink(FloorRaised(plan.floor, floor))
        floor = plan.floor
    deleted = carry_out(run, plan.decisions, by="retention", sink=sink)
    return RetentionDone(plan, floor, deleted)


def run_retention(
    run: Run,
    policy: RetentionPolicy,
    *,
    dry_run: bool = True,
    regions: Mapping[str, Run] | None = None,
    behind: frozenset[str] = frozenset(),
    readers: Sequence[int] = (),
    sink: EventSink = discard,
    streams: int = 8,
    trusted: TrustedKeys | None = None,
    check_start: bool = True,
) -> RetentionDone:
    """Plan one round and, unless `dry_run`, carry it out; see `plan_retention`.

    A dry run writes nothing: it takes the newest object's date for the time, so it may call fewer
    objects old than a real round.
    """
    now_ms = None if dry_run else store_now_ms(run, read_floor(run) or NO_FLOOR)
    plan = plan_retention(
        run,
        policy,
        now_ms=now_ms,
        regions=regions,
        behind=behind,
        readers=readers,
        streams=streams,
        trusted=trusted,
    )
    if dry_run:
        floor = 0 if plan.advertised is None else plan.advertised.version
        return RetentionDone(plan, floor, 0)
    return execute_retention(
        run, plan, now_ms=now_ms, sink=sink, streams=streams, check_start=check_start
    )
