"""A fleet that is updated by a script of curls is left paused by the first that fails: `--vllm`.

Drives a vLLM server on this machine through its development endpoints, from version to version
(`pipeline/safe_point.py`); the server's own workers stage. SIGTERM and Ctrl-C end it after the turn
in progress, so that the engine is never left paused, unless its weights are in doubt: then it stays
out of rotation, and the exit code says so.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltastore.adapters.vllm_http import HttpControl
from deltastore.cli.connection import Watched
from deltastore.cli.files import typed_errors
from deltastore.cli.keys import read_trusted
from deltastore.cli.observing import Observing
from deltastore.cli.output import one_line
from deltastore.cli.signals import SignalBell
from deltastore.clock import SystemClock
from deltastore.errors import ApplyError, InvalidInputError, Kind
from deltastore.ids import check_name
from deltastore.pipeline.engine_control import PauseMode
from deltastore.pipeline.safe_point import SafePointDriver, SafePointSettings, Turn
from deltastore.pipeline.spool_use import UseReader
from deltastore.repository.resolve import find_head
from deltastore.storage.url import split_run_url

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deltastore.cli.connection import Connection
    from deltastore.cli.output import Document, Output
    from deltastore.clock import Clock


@dataclass(frozen=True, slots=True)
class EngineFollowing:
    """How to follow with a server.

    Args:
        server: its URL on this machine.
        policy: what becomes of requests in flight.
        once: activate what exists now, then end.
        within_s: how long `once` may take.
        observing: where it says what happens.
        region_name: what events and metrics call the bucket's region; None: as the run calls home.
    """

    server: str
    policy: PauseMode = PauseMode.KEEP
    once: bool = False
    poll_s: float = 2.0
    min_interval_s: float = 2.0
    jitter_s: float = 1.0
    within_s: float = 600.0
    trusted: Path | None = None
    observing: Observing = Observing()  # noqa: RUF009 - it is frozen
    region_name: str | None = None

    @property
    def safe_points(self) -> SafePointSettings:
        """When to pause."""
        spread = 0.0 if self.once else 1.0  # there is nothing to keep a distance from
        return SafePointSettings(
            mode=self.policy,
            min_interval_s=spread * self.min_interval_s,
            jitter_s=spread * self.jitter_s,
            look_s=self.poll_s,
        )


def follow_engine(
    run_url: str, connection: Connection, following: EngineFollowing, output: Output
) -> None:
    """Keep a server at a run's newest version until told to stop, or once.

    Raises ApplyError(poisoned) when the server is out of rotation at the end; with `once`, what
    kept it from the newest version.
    """
    clock, stopping = SystemClock(), threading.Event()
    control = HttpControl(
        following.server, init_info=_worker_settings(run_url, connection, following)
    )
    with ExitStack() as stack:
        name = split_run_url(run_url)[1]
        sink, metrics = following.observing.begin(stack, name, clock)
        region = following.region_name
        if region is None and metrics is not None:
            region = connection.home_name(run_url)
        with connection.run(run_url, watched=Watched(metrics, region)) as run:
            newest = find_head(run)  # it exists, before anything is paused
        driver = SafePointDriver(
            control, clock, name=str(control.address), settings=following.safe_points, sink=sink
        )
        used = None if metrics is None else UseReader(metrics.used)
        ctrl_c = stack.enter_context(_ending_on_signals(stopping))
        _drive(name, driver, newest, following, clock, stopping, output, used)
    if driver.view().held:
        raise ApplyError(
            f"{control.address} is left paused: {driver.view().held}",
            kind=Kind.POISONED,
            hint="start `deltastore follow --vllm` again: it goes on rebuilding the weights",
        )
    if ctrl_c.pressed:
        raise KeyboardInterrupt


def _worker_settings(
    run_url: str, connection: Connection, following: EngineFollowing
) -> dict[str, Any]:
    """What the server's workers must know: they read the bucket, not this process."""
    if connection.access_key_env is not None or connection.secret_key_env is not None:
        raise InvalidInputError(
            "--access-key-env and --secret-key-env say nothing to a server's workers",
            kind=Kind.SETTING,
            hint="give the server the AWS environment or a --profile of its own",
        )
    settings: dict[str, Any] = {"run": run_url}
    parts = {
        "endpoint": connection.endpoint_url,
        "profile": connection.profile,
        "region": connection.region,
    }
    settings |= {name: value for name, value in parts.items() if value is not None}
    if following.region_name is not None:
        settings["region_name"] = check_name(following.region_name, "region name")
    if following.trusted is not None:
        read_trusted(following.trusted)  # refused here, not in the engine
        with typed_errors(following.trusted):
            settings["trusted_keys"] = following.trusted.read_text(encoding="utf-8").splitlines()
    return settings


def _drive(
    run: str,
    driver: SafePointDriver,
    newest: int,
    following: EngineFollowing,
    clock: Clock,
    stopping: threading.Event,
    output: Output,
    used: UseReader | None,
) -> None:
    """Turn until told to stop, or once: until the server is at `newest`."""
    deadline_s = clock.monotonic_s() + following.within_s
    told: Document = {}
    while not stopping.is_set():
        outcome = driver.turn()
        if used is not None:
            used.see(driver.view().ranks)
        told = _tell(run, driver, outcome, told, output)
        served = driver.view().served
        if following.once:
            if served is not None and served.version >= newest and not driver.view().held:
                return
            if clock.monotonic_s() > deadline_s:
                raise _too_late(driver, newest, following.within_s)
            if outcome is Turn.FAILED and driver.error is not None:
                raise driver.error
        clock.wait(stopping, following.poll_s)


@dataclass(slots=True)
class _CtrlC:
    """Whether it was pressed. No Event: a handler may not take the lock of one."""

    pressed: bool = False


@contextmanager
def _ending_on_signals(stopping: threading.Event) -> Iterator[_CtrlC]:
    """Inside, signals end it after the turn in progress; a second Ctrl-C does not wait."""
    ctrl_c = _CtrlC()
    bell = SignalBell(stopping.set)

    def interrupt(*_signal: object) -> None:
        if ctrl_c.pressed:
            raise KeyboardInterrupt
        ctrl_c.pressed = True
        bell.ring()

    terminate = signal.signal(signal.SIGTERM, lambda *_signal: bell.ring())
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield ctrl_c
    finally:
        signal.signal(signal.SIGTERM, terminate)
        signal.signal(signal.SIGINT, before)
        bell.close()


def _tell(
    run: str, driver: SafePointDriver, outcome: Turn, told: Document, output: Output
) -> Document:
    """Print what has changed; returns what was printed last."""
    view = driver.view()
    passed = view.passed if outcome is Turn.ACTIVATED else None
    document: Document = {
        "run": run,
        "server": driver.name,
        "outcome": outcome.value,
        "version": None if view.served is None else view.served.version,
        "policy_hash": None if view.served is None else view.served.policy_hash,
        "base_version": None if passed is None else passed.base_version,
        "held": view.held,
        "trouble": view.trouble,
    }
    for stage in ("pause_s", "write_s", "reset_s", "resume_s"):
        document[stage] = None if passed is None else round(getattr(passed, stage), 6)
    if document | {"outcome": ""} == told | {"outcome": ""}:
        return told
    if output.as_json:
        sys.stdout.write(json.dumps(document, ensure_ascii=True, allow_nan=False) + "\n")
    else:
        sys.stdout.write(one_line(_line(document)) + "\n")
    sys.stdout.flush()
    return document


def _line(document: Document) -> str:
    if document["held"]:
        return f"{document['server']} is out of rotation: {document['held']}"
    text = f"{document['server']} serves version {document['version']}"
    if document["write_s"] is not None:
        paused_s = sum(document[stage] for stage in ("write_s", "reset_s", "resume_s"))
        text += f", {1000 * paused_s:.1f} ms without a forward pass"
    return text + (f" ({document['trouble']})" if document["trouble"] else "")


def _too_late(driver: SafePointDriver, newest: int, within_s: float) -> ApplyError:
    view = driver.view()
    at = "an unknown version" if view.served is None else f"version {view.served.version}"
    why = view.held or view.trouble or "nothing newer is staged"
    return ApplyError(
        f"{driver.name} is at {at} after {within_s:g} s: {why}",
        kind=Kind.POISONED if view.held else Kind.NOT_STAGED,
        version=newest,
        hint="see the server's log; --within-s gives it longer",
    )
