"""Two API servers that both pause one engine undo each other: one of them leads, the rest watch.

The follower inside an API server: a thread that drives the server's engine (`safe_point.py`). With
several API servers on one engine a file lock says which of them leads; the others read what it last
wrote down, so that the health of each says the same, and take over when it dies. What others that
are dead have written, under this name or another, is nobody's word: it is removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from deltastore.adapters.vllm.version_headers import read_label
from deltastore.errors import FormatError, InvalidInputError, Kind
from deltastore.events import both, discard
from deltastore.pipeline.held_lock import HeldLock, remove_if_dead
from deltastore.pipeline.safe_point import SafePointDriver, SafePointView
from deltastore.pipeline.spool_use import UseReader
from deltastore.storage.url import split_run_url

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deltastore.adapters.vllm.server_settings import ServerSettings
    from deltastore.clock import Clock
    from deltastore.events import Event, EventSink
    from deltastore.pipeline.engine_control import EngineControl, ServedVersion
    from deltastore.storage.store_use import StoreUse

_LOG = logging.getLogger(__name__)
STOP_WITHIN_S = 10.0
MAX_WRITTEN_BYTES = 1 << 20
WRITTEN, ASIDE = ".json", ".new"


class ServerFollowing:
    """Follows a run for one API server, in a thread.

    Args:
        control: of the server's engine.
        server: names the engine among those of this host; the same in all its API servers.
        sink: takes events besides the server's log.
        used: takes what the engine's ranks and their stager have done with their store.
    """

    def __init__(
        self,
        control: EngineControl,
        settings: ServerSettings,
        clock: Clock,
        *,
        server: str,
        sink: EventSink = discard,
        used: Callable[[StoreUse], None] | None = None,
    ) -> None:
        self._used = used
        self._settings = settings
        self._clock = clock
        self._look_s = settings.safe_points.look_s
        self._run_name = split_run_url(settings.engine.run)[1]
        self._driver = SafePointDriver(
            control,
            clock,
            name=settings.engine.engine_name,
            settings=settings.safe_points,
            sink=both(_log_event, sink),
        )
        key = hashlib.sha256(server.encode()).hexdigest()[:16]
        folder = settings.engine.spool_folder() / "servers"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_path = folder / f"{key}.lock"
        self._written_path = folder / f"{key}{WRITTEN}"
        self._stopping = threading.Event()
        self._leads = self._took_over = False
        self._died = ""
        self._read: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, name="deltastore-follower", daemon=True)

    @property
    def served(self) -> ServedVersion | None:
        """The version that forward passes use; None before it is known."""
        own = self._driver.view().served if self._leads else None
        return own or read_label(self._read.get("served"))

    @property
    def held(self) -> str:
        """Why the engine is out of rotation; empty when it is not."""
        own = self._driver.view().held if self._leads else ""
        return self._died or own or str(self._read.get("held", ""))

    def document(self) -> dict[str, Any]:
        """What `GET /deltastore/status` answers."""
        shown = _document(self._driver.view()) | self._read
        return shown | {"run": self._run_name, "leads": self._leads, "held": self.held}

    def start(self) -> None:
        """Begin, in the background."""
        self._thread.start()

    def stop(self) -> None:
        """Let a turn in progress finish, at most `STOP_WITHIN_S`; then let go."""
        self._stopping.set()
        self._thread.join(STOP_WITHIN_S)

    def _run(self) -> None:
        try:
            lock = self._await_lead()
            if lock is None:
                return
            try:
                self._lead()
            finally:
                lock.close()
        except BaseException as err:
            # Nobody else ends a pause: whoever asks for the server's health must learn of it.
            self._died = f"the follower died: {type(err).__name__}: {err}"
            raise

    def _await_lead(self) -> HeldLock | None:
        """The lock, once no other API server of this engine holds it; None when told to stop."""
        self._remove_dead()
        while not self._stopping.is_set():
            try:
                return HeldLock(self._lock_path, what="the lead of this engine's API servers")
            except InvalidInputError as err:
                if err.kind is not Kind.LEASE_HELD:
                    raise
            self._took_over = True
            self._read = _read_written(self._written_path)
            self._clock.wait(self._stopping, self._look_s)
        return None

    def _lead(self) -> None:
        self._leads = True
        _LOG.info("this server follows run %s", self._run_name)
        # Who led before has counted until now.
        used = None if self._used is None else UseReader(self._used, already=self._took_over)
        written: dict[str, Any] = {}
        while not self._stopping.is_set():
            self._driver.turn()
            if used is not None:
                used.see(self._driver.view().ranks)
            self._read = {}  # of who led before: until now nothing newer was known
            shown = _document(self._driver.view())
            if shown != written:
                self._write(shown)
                written = shown
            self._clock.wait(self._stopping, self._look_s)

    def _remove_dead(self) -> None:
        """What API servers have left of whom none lives, those of this one's name too."""
        for lock in self._lock_path.parent.glob("*.lock"):
            remove_if_dead(lock, partial(_remove_written, lock))

    def _write(self, shown: dict[str, Any]) -> None:
        aside = self._written_path.with_suffix(ASIDE)
        try:
            aside.write_text(json.dumps(shown), encoding="utf-8")
            aside.replace(self._written_path)
        except OSError as err:
            _LOG.warning("other API servers cannot be told the state: %s", err)


def _document(view: SafePointView) -> dict[str, Any]:
    passed = view.passed
    return {
        "served": None if view.served is None else str(view.served),
        "staged": view.staged,
        "head": view.head,
        "held": view.held,
        "trouble": view.trouble,
        "last_safe_point": None if passed is None else asdict(passed),
        "ranks": [
            {
                "rank": rank.rank,
                "active": None if rank.active is None else str(rank.active),
                "staged": rank.staged,
                "head": rank.head,
                "poisoned": rank.poisoned,
                "trouble": rank.trouble,
                "dense_share": rank.dense_share,
                "shadow_bytes": rank.shadow_bytes,
                "scratch_bytes": rank.scratch_bytes,
                "last_pause_s": rank.last_pause_s,
                "asleep": rank.asleep,
            }
            for rank in view.ranks
        ],
    }


def _remove_written(lock: Path) -> None:
    for suffix in (WRITTEN, ASIDE):
        lock.with_suffix(suffix).unlink(missing_ok=True)


def _read_written(path: Path) -> dict[str, Any]:
    """What the leader wrote down last; empty before it has."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_WRITTEN_BYTES + 1)
        found = json.loads(text)
    except FileNotFoundError:
        return {}
    except ValueError as err:
        raise FormatError(f"{path} is not what a server writes", kind=Kind.FIELD) from err
    if not isinstance(found, dict):
        raise FormatError(f"{path} is not what a server writes", kind=Kind.FIELD)
    return found


def _log_event(event: Event) -> None:
    _LOG.info("%s", event)
