"""The order of a demo decides what it proves: learn, kill, join, finish, then check everything.

1. the trainer and the first actors start; training begins when all of them are eligible
2. after half of the steps one actor is killed (SIGKILL) and a fresh one is started
3. the trainer writes its final weights and what version they are
4. stop.json tells every actor that version: it catches up, writes the fingerprint of its live
   weights, and leaves; then the trainer leaves
5. the checks of `ending` run, with the servers still up
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.observability.table import size
from workers.config import VLLM
from workers.demo import ending
from workers.demo.fleet import DemoError, Fleet
from workers.demo.screen import Screen
from workers.demo.settings import HOME, OTHER, VLLM_VARIABLES
from workers.demo.watch import Watch
from workers.run_folder import FinalReport, RunFolder, read_report

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from rich.console import Console

    from deltastore.clock import Clock
    from deltastore.observability.report import Check
    from workers.demo.meter import MemoryMeter
    from workers.demo.settings import ActorPlan
    from workers.demo.site import Site

_POLL_S = 0.25
TRAINER = "trainer"


class Director:
    """One demo from the first process to the last check."""

    def __init__(
        self,
        site: Site,
        fleet: Fleet,
        meter: MemoryMeter,
        console: Console,
        clock: Clock,
        started_s: float,
    ) -> None:
        self._site = site
        self._fleet = fleet
        self._meter = meter
        self._clock = clock
        self._started_s = started_s
        self.watch = Watch(site.run_dir / "events", site.coordination, clock)
        self._screen = Screen(console, self.watch.view)

    def train(self) -> FinalReport:
        """Steps 1 to 4; returns what the trainer said of its final weights."""
        site = self._site
        folder = RunFolder(site.run_dir)
        with self._screen:
            self._start(TRAINER, "workers.trainer", site.trainer_file())
            cast = site.settings.cast
            for plan in cast.first:
                self._start_actor(plan)
            deadline_s = self._clock.monotonic_s() + site.settings.give_up_s
            self._until(self._half_way, deadline_s, "half of the steps")
            self._fleet.kill(cast.killed)
            self.watch.end_actor(cast.killed)
            steps = self.watch.steps_trained
            self.watch.note(f"{cast.killed} was killed (SIGKILL) after step {steps}")
            self._start_actor(cast.joiner)
            self._until(folder.trainer_done.exists, deadline_s, "the last step")
            done = read_report(folder.trainer_done)
            deadline_s = self._clock.monotonic_s() + site.settings.end_within_s
            self._until(lambda: self._everywhere(done.version), deadline_s, "the other region")
            folder.ask_to_stop(done.version)
            names = [TRAINER, *cast.at_the_end]
            self._until(lambda: not self._fleet.running(names), deadline_s, "the processes' end")
            self._show(last=True)
        return done

    def check(
        self, done: FinalReport, environment: Mapping[str, str], say: Callable[[str], None]
    ) -> list[Check]:
        """Step 5."""
        site, view = self._site, self.watch.view
        checks: list[Check] = []

        def add(check: Check) -> None:
            checks.append(check)
            say(f"{'ok  ' if check.passed else 'FAIL'} {check.name}: {check.detail}")

        add(ending.check_accuracy(view, site.settings))
        add(ending.check_problems(view))
        add(ending.check_join(view, site.settings))
        names = site.settings.cast.at_the_end
        add(ending.check_actors(RunFolder(site.run_dir), names, done))
        for region in (HOME, OTHER):
            add(ending.check_verify(site, region, environment))
        replayed = ending.check_replay(site, OTHER, environment, done.version)
        add(replayed)
        if replayed.passed:
            must_know = site.settings.model is None
            add(ending.check_answer(site.run_dir / ending.REPLAYED, must_know=must_know))
        return checks

    def _start_actor(self, plan: ActorPlan) -> None:
        path = self._site.actor_file(plan)
        settings = self._site.settings
        self._fleet.start(
            plan.actor_id,
            "workers.actor",
            [str(path)],
            threads=1,
            nice=settings.actor_nice,
            python=settings.actor_python,
            variables=VLLM_VARIABLES if settings.engine == VLLM else None,
        )
        self._show()

    def _start(self, name: str, module: str, path: Path) -> None:
        threads = self._site.settings.trainer_threads
        self._fleet.start(name, module, [str(path)], threads=threads)

    def _half_way(self) -> bool:
        return self.watch.steps_trained >= self._site.settings.kill_at_step

    def _everywhere(self, version: int) -> bool:
        row = self.watch.view.versions.get(version)
        return version == 0 or (row is not None and OTHER in row.region_lag_s)

    def _until(self, happened: Callable[[], bool], deadline_s: float, what: str) -> None:
        while not happened():
            self._show()
            self._fleet.check()
            if self._clock.monotonic_s() > deadline_s:
                raise DemoError(f"{what} did not come in time; logs are in {self._site.run_dir}")
            self._clock.sleep_s(_POLL_S)
        self._show()

    def _show(self, *, last: bool = False) -> None:
        self.watch.poll()
        elapsed_s = self._clock.monotonic_s() - self._started_s
        self._screen.update(
            self.watch.actors,
            f"step {self.watch.steps_trained} of {self._site.settings.steps}, "
            f"{elapsed_s:.0f} s, memory {size(self._meter.now_bytes)}",
            last=last,
        )
