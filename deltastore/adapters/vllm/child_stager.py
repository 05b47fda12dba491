"""A host on which nobody stages never gets a new version: an engine without a stager starts one.

The child is `deltastore stage`, and ends when its stdin does: with this process, however that ends.
Several engines may try at once: the folder's lock lets one through, and when that one goes, another
engine's next look starts another.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from deltastore.errors import Kind, StorageError
from deltastore.pipeline.held_lock import is_locked
from deltastore.pipeline.spool import SpoolFolder

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.adapters.vllm.settings import EngineSettings
    from deltastore.clock import Clock

LOOK_S = 0.5
RESTART_MIN_S = 1.0
RESTART_MAX_S = 60.0
STOP_WITHIN_S = 10.0
_log = logging.getLogger(__name__)


class ChildStager:
    """Sees to it that the folder has a stager, from a thread of its own, until `stop`."""

    def __init__(self, settings: EngineSettings, folder: Path, clock: Clock) -> None:
        self._command = stage_command(settings, folder)
        self._folder = SpoolFolder(folder)
        self._clock = clock
        self._stop = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._wait_s = RESTART_MIN_S
        self._not_before_s = clock.monotonic_s()
        self._thread = threading.Thread(target=self._watch, name="stager-keeper", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End the child, if there is one, and stop looking."""
        self._stop.set()
        self._thread.join()
        if self._child is not None:
            _end(self._child)
            self._child = None

    @property
    def pid(self) -> int | None:
        """Of the child, while there is one."""
        child = self._child
        return None if child is None or child.poll() is not None else child.pid

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                self._look()
            except OSError as err:
                self._later()
                _log.warning("a stager cannot be started: %s", err)
            except Exception:  # noqa: BLE001 - a thread that died of it would start none, in silence
                self._later()
                _log.exception("a stager cannot be started")
            self._clock.wait(self._stop, LOOK_S)

    def _look(self) -> None:
        if self._child is not None and self._child.poll() is not None:
            child, self._child = self._child, None
            code = _end(child)
            self._later()
            _log.warning("the stager ended with code %s; another one is started soon", code)
        now_s = self._clock.monotonic_s()
        if self._child is not None:
            if is_locked(self._folder.stager_lock):
                self._wait_s = RESTART_MIN_S
            return
        if now_s >= self._not_before_s and not is_locked(self._folder.stager_lock):
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C that the engine survives is not for it
            )

    def _later(self) -> None:
        self._not_before_s = self._clock.monotonic_s() + self._wait_s
        self._wait_s = min(2 * self._wait_s, RESTART_MAX_S)


def stage_command(settings: EngineSettings, folder: Path) -> list[str]:
    """The words that start a stager with these settings; writes its file of trusted keys.

    Raises StorageError(unavailable) when that file cannot be written.
    """
    words = [sys.executable, "-m", "deltastore.cli", "stage", settings.run]
    words += ["--folder", str(folder), "--until-stdin-ends"]
    words += ["--stage-max-bytes", str(settings.stage_max_bytes)]
    words += ["--poll-s", str(settings.poll_min_s)]
    named = {
        "--endpoint-url": settings.endpoint,
        "--region": settings.region,
        "--profile": settings.profile,
        "--region-name": settings.region_name,
    }
    for option, value in named.items():
        words += [] if value is None else [option, value]
    if settings.trusted_keys:
        path = SpoolFolder(folder).path / "trusted-keys"
        part = path.with_name(".trusted-keys.part")
        try:
            part.write_text("\n".join(settings.trusted_keys) + "\n", encoding="ascii")
            part.replace(path)
        except OSError as err:
            raise StorageError(
                f"{path} cannot be written: {err}",
                kind=Kind.UNAVAILABLE,
                hint="set `folder` to a folder of your own on a local disk",
            ) from err
        words += ["--trusted-keys", str(path)]
    return words


def _end(child: subprocess.Popen[bytes]) -> int:
    """Let it end, or make it; its exit code."""
    if child.stdin is not None:
        child.stdin.close()
    try:
        return child.wait(STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()
