"""A folder that is half a step ahead serves a policy nobody trained: `follow` swaps whole ones.

Watches a run and, for each newest version, writes a checkpoint folder (see `version_folders`) or
just prints it. Versions in between are not written: who is behind jumps. What is on disk already is
built upon, if its fingerprint still holds. While the store does not answer it says so and goes on.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.adapters.safetensors_dir import load_state, scan_checkpoint
from deltastore.adapters.version_folders import FolderRecord, VersionFolders
from deltastore.cli.checkpoint_parts import CheckpointParts, read_parts
from deltastore.cli.files import typed_errors
from deltastore.cli.output import Document, Output, one_line, size_text
from deltastore.cli.progress import progress
from deltastore.clock import SystemClock
from deltastore.errors import (
    FormatError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)
from deltastore.format.mixing import fingerprint_state
from deltastore.repository.fetch import load_manifest
from deltastore.repository.history import require_signed
from deltastore.repository.points import ActiveVersion
from deltastore.repository.rebuild import Held, replay
from deltastore.repository.resolve import find_head, read_head_hint, version_exists

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.cli.connection import Connection
    from deltastore.clock import Clock
    from deltastore.format.layout import BitState
    from deltastore.format.manifest import VersionManifest
    from deltastore.format.signing import TrustedKeys
    from deltastore.repository.run import Run


@dataclass(frozen=True, slots=True)
class Following:
    """How to follow.

    Args:
        out: where the folders go; None: versions are only printed.
        once: one look, then the end.
        keep: folders to keep.
        poll_s: between looks.
    """

    out: Path | None
    once: bool = False
    keep: int = 2
    poll_s: float = 2.0
    streams: int = 8
    trusted: TrustedKeys | None = None


def follow_run(run_url: str, connection: Connection, following: Following, output: Output) -> None:
    """Follow a run until interrupted, or once."""
    clock, never = SystemClock(), threading.Event()
    with ExitStack() as stack:
        run = stack.enter_context(connection.run(run_url, streams=following.streams))
        folders = None
        if following.out is not None:
            folders = VersionFolders(following.out, run.record.run_id, following.keep)
            with typed_errors(following.out):
                stack.enter_context(folders.writing())
        folder = _Folder(run, following, folders, clock)
        known = folder.known
        while True:
            try:
                newest = _newest(run, known)
                if newest > known or following.once:
                    document = folder.bring(newest, new=newest > known)
                    _emit(document, output, following.once)
                    known = newest
            except StorageError as err:
                if following.once:
                    raise
                sys.stderr.write(one_line(f"deltastore: {err.kind.value}: {err}") + "\n")
            if following.once:
                return
            clock.wait(never, following.poll_s)


class _Folder:
    """What is on disk and in memory of the run."""

    def __init__(
        self, run: Run, following: Following, folders: VersionFolders | None, clock: Clock
    ) -> None:
        self._run = run
        self._following = following
        self._clock = clock
        self._folders = folders
        self._held: Held | None = None
        self._parts: CheckpointParts | None = None
        self.known = -1
        if folders is not None:
            with typed_errors(folders.out):
                self._held = self._load()
            self.known = -1 if self._held is None else self._held.point.version

    def bring(self, version: int, *, new: bool) -> Document:
        """Write the version's folder if it is new; say what it is."""
        run, following = self._run, self._following
        document: Document = {
            "run": run.name,
            "version": version,
            "policy_hash": "",
            "step_last": 0,
            "folder": None,
            "via": "",
            "read_bytes": 0,
            "seconds": 0.0,
            "new": new,
        }
        if self._folders is None or not new:
            manifest = load_manifest(run, version)
            require_signed(run, manifest, following.trusted)
        else:
            held, self._held = self._held, None  # changed in place: of no use after a failure
            with progress(f"replay {run.name}") as meter:
                replayed = replay(
                    run,
                    version,
                    clock=self._clock,
                    held=held,
                    streams=following.streams,
                    progress=meter.advance,
                    trusted=following.trusted,
                )
            manifest, self._held = replayed.manifest, replayed.held
            self._parts = self._parts or read_parts(run, streams=following.streams)
            record = FolderRecord(run.record.run_id, version, manifest.policy_hash)
            with typed_errors(self._folders.out):
                self._folders.write(
                    replayed.state,
                    record,
                    headers=self._parts.headers,
                    extras=self._parts.extras,
                )
            document["via"] = replayed.report.via
            document["read_bytes"] = replayed.report.size_bytes
            document["seconds"] = round(replayed.report.seconds, 3)
        document["policy_hash"] = manifest.policy_hash
        document["step_last"] = manifest.core.step_last
        if self._folders is not None:
            document["folder"] = str(self._folders.out / f"{version:010d}")
        return document

    def _load(self) -> Held | None:
        """The state on disk; None when there is none. One that is not what it says is removed."""
        found = None if self._folders is None else self._folders.latest()
        if found is None or self._folders is None:
            return None
        folder, record = found
        manifest = load_manifest(self._run, record.version)
        try:
            state = load_state(scan_checkpoint(folder), self._run.layout)
        except (IntegrityError, InvalidInputError, FormatError, NotFoundError):
            state = None
        if state is not None and _is_at(state, manifest, record):
            return Held(state, ActiveVersion.of(manifest))
        self._folders.discard(folder)
        return None


def _is_at(state: BitState, manifest: VersionManifest, record: FolderRecord) -> bool:
    same_history = manifest.policy_hash == record.policy_hash
    return same_history and fingerprint_state(state) == manifest.core.fingerprint_after


def _newest(run: Run, known: int) -> int:
    """The newest version; from a known one it takes one request when nothing is new."""
    if known < 0:
        return find_head(run)
    hinted = read_head_hint(run)
    newest = known
    if hinted is not None and hinted > known and version_exists(run, hinted):
        newest = hinted
    while version_exists(run, newest + 1):
        newest += 1
    return newest


def _emit(document: Document, output: Output, once: bool) -> None:
    if output.as_json:
        sys.stdout.write(json.dumps(document, ensure_ascii=True, allow_nan=False) + "\n")
    else:
        digest = document["policy_hash"][:12]
        text = f"version {document['version']}, step {document['step_last']}, {digest}"
        if document["folder"] is not None and document["new"]:
            size = size_text(document["read_bytes"])
            text += f": {document['folder']} ({document['via']}, {size} read)"
        elif not document["new"]:
            text += ": nothing new"
        sys.stdout.write(one_line(text) + "\n")
    sys.stdout.flush()
