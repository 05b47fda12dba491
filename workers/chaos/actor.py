"""`python -m workers.chaos.actor FILE`: a real actor, a scripted engine, a failing machine."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from deltastore.cli.signals import ring_on_sigterm
from deltastore.errors import InvalidInputError, Kind
from deltastore.observability.jsonl import JsonlSink
from workers.chaos.deeds import DeedLog
from workers.chaos.orders import OrderBook, SpoilingStore, SteppedClock, deeds_file, orders_file
from workers.wiring import open_surroundings, run_worker

if TYPE_CHECKING:
    from workers.actor.loop import Actor
    from workers.config import WorkerConfig


def _work(config: WorkerConfig) -> None:
    settings = config.actor
    if settings is None:
        raise InvalidInputError("the file has no `actor` part", kind=Kind.SETTING)
    with open_surroundings(config, settings.actor_id) as around:
        from workers.actor.assembly import act
        from workers.chaos.engine import ScriptedEngine

        folder, actor_id = around.folder, settings.actor_id
        log = DeedLog(deeds_file(folder, actor_id))
        book = OrderBook(orders_file(folder, actor_id), log)
        regions = {
            name: replace(run, store=SpoilingStore(run.store, book))
            for name, run in around.regions.items()
        }
        clock = SteppedClock(book)
        # Who reads a wall clock here stamps events with it.
        with JsonlSink(folder.events(actor_id), clock) as sink:
            act(
                replace(around, regions=regions, clock=clock, sink=sink),
                _stop_on_sigterm,
                make_engine=lambda live: ScriptedEngine(
                    live.target,
                    book,
                    vocabulary=int(live.model.config.vocab_size),
                    clock=around.clock,
                ),
            )


def _stop_on_sigterm(actor: Actor) -> None:
    ring_on_sigterm(actor.request_stop)


if __name__ == "__main__":
    sys.exit(run_worker(_work, sys.argv[1:]))
