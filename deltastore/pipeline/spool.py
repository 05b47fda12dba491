"""A stager and ranks that meet in a folder by habit corrupt each other: who writes what is here.

    stager.lock           held by the one stager of the host
    ranks/<rank>.lock     held by a rank as long as it lives: the kernel lets go when it dies
    ranks/<rank>.json     where the rank's weights are; written by the rank
    offers/<rank>.json    path, size, digest and target of what is staged for it; by the stager
    updates/<...>.staged  decoded, composed, read-only (format/staged_file.py); by the stager

Nothing but these small files and the updates' paths passes between the processes; everything is
written aside and renamed. Put the folder on shared memory (/dev/shm) or on a local disk. A reader
checks an update's SHA-256 once, when it maps it; a mapped update outlives its name.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import os
import re
import stat
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltastore.errors import (
    DeltastoreError,
    FormatError,
    IntegrityError,
    Kind,
    StorageError,
)
from deltastore.format.canonical import canonical_json, parse_canonical_json
from deltastore.format.fingerprint import Fingerprint
from deltastore.format.staged_file import StagedContent, read_staged, staged_parts
from deltastore.ids import check_name, check_version, is_sha256, new_token
from deltastore.pipeline.held_lock import is_locked, remove_if_dead
from deltastore.pipeline.staged import StagedUpdate
from deltastore.repository.points import ActiveVersion

if TYPE_CHECKING:
    from deltastore.format.layout import Layout

MAX_NOTE_BYTES = 1 << 16
MAX_RANKS = 256
_UPDATE = re.compile(r"\d{10}-[0-9a-f]{12}\.(staged|part)")
_RANK = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_OFFER = re.compile(r"\.?([A-Za-z0-9_-][A-Za-z0-9._-]{0,127}?)\.json(\.part)?")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankNote:
    """Where a rank's weights are.

    Args:
        attempt: raised when the rank wants what was staged from there to be fetched anew.
        until: nothing beyond this version is wanted; None: everything.
    """

    active: ActiveVersion
    attempt: int = 0
    until: int | None = None


@dataclass(frozen=True, slots=True)
class SpooledUpdate:
    """An update in the spool: all that passes to a rank."""

    path: str
    size_bytes: int
    sha256: str
    target: ActiveVersion


@dataclass(frozen=True, slots=True)
class Offer:
    """What the stager has for a rank.

    Args:
        note: what the rank said; an offer for another note is not for it.
        update: what to activate next; None when nothing is staged.
        head_seen: the newest version known to exist.
        current: whether there is nothing to wait for: nothing newer was found, or there is no room
            for more before this has been taken.
        trouble: class name, kind and message of what keeps the stager from going on.
    """

    note: RankNote
    update: SpooledUpdate | None
    head_seen: int
    current: bool
    trouble: tuple[str, str, str] | None = None


class SpoolFolder:
    """The folder in which one host's stager and ranks meet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unread: dict[str, str] = {}
        for folder in (path, self.ranks, self.offers, self.updates):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def stager_lock(self) -> Path:
        """Held by the host's stager."""
        return self.path / "stager.lock"

    @property
    def ranks(self) -> Path:
        """The ranks' notes and locks."""
        return self.path / "ranks"

    @property
    def offers(self) -> Path:
        """What the stager says to each rank."""
        return self.path / "offers"

    @property
    def updates(self) -> Path:
        """The staged updates."""
        return self.path / "updates"

    def rank_lock(self, rank: str) -> Path:
        """Held by a rank while it lives."""
        return self.ranks / f"{check_name(rank, 'rank')}.lock"

    def write_note(self, rank: str, note: RankNote) -> None:
        """Say where a rank's weights are."""
        _write_whole(self.ranks / f"{check_name(rank, 'rank')}.json", _note_row(note))

    def living_ranks(self) -> dict[str, RankNote]:
        """The notes of the ranks that live; what dead ones left is removed.

        With it goes the dead rank's lock: engines named after their process would leave one each.
        A note that cannot be read (of another release, damaged) is its rank's trouble, no other's:
        it is said once in the log and left out.
        """
        notes: dict[str, RankNote] = {}
        for lock in sorted(self.ranks.glob("*.lock")):
            rank = lock.stem
            if not _RANK.fullmatch(rank) or not _may_be_lock(lock):
                continue  # no rank's
            if not is_locked(lock):
                remove_if_dead(lock, partial(self._forget, rank))
                continue
            try:
                row = _read(self.ranks / f"{rank}.json")
                note = None if row is None else _note_of(row)
            except DeltastoreError as err:
                self._say_unread(rank, str(err))
                continue
            self._unread.pop(rank, None)
            if note is not None and len(notes) < MAX_RANKS:
                notes[rank] = note
        return notes

    def _forget(self, rank: str) -> None:
        """Remove what a dead rank said, and what was said to it."""
        for folder in (self.ranks, self.offers):
            path = folder / f"{rank}.json"
            path.unlink(missing_ok=True)
            _aside(path).unlink(missing_ok=True)
        self._unread.pop(rank, None)

    def _say_unread(self, rank: str, cause: str) -> None:
        if self._unread.get(rank) != cause:
            self._unread[rank] = cause
            _log.warning("rank %s gets nothing staged, its note cannot be read: %s", rank, cause)

    def write_offer(self, rank: str, offer: Offer) -> None:
        """Say to a rank what is staged for it."""
        update = offer.update
        row = {
            "note": _note_row(offer.note),
            "update": None
            if update is None
            else [update.path, update.size_bytes, update.sha256, _point_row(update.target)],
            "head_seen": offer.head_seen,
            "current": offer.current,
            "trouble": None if offer.trouble is None else list(offer.trouble),
        }
        _write_whole(self.offers / f"{check_name(rank, 'rank')}.json", row)

    def read_offer(self, rank: str) -> Offer | None:
        """What the stager last said to a rank; None if nothing."""
        row = _read(self.offers / f"{check_name(rank, 'rank')}.json")
        return None if row is None else _offer_of(row)

    def spool(self, layout: Layout, update: StagedUpdate) -> SpooledUpdate:
        """Write an update; StorageError(disk_full) when the folder has no room for it."""
        about = {
            "base": _point_row(update.base),
            "target": _point_row(update.target),
            "size_bytes": update.size_bytes,
            "versions": update.versions,
        }
        path = self.updates / f"{update.target.version:010d}-{new_token()[:12]}.staged"
        part = path.with_suffix(".part")
        digest, size_bytes = hashlib.sha256(), 0
        try:
            with part.open("xb") as file:
                for piece in staged_parts(
                    layout, StagedContent(about, update.blocks, update.state)
                ):
                    digest.update(piece)
                    file.write(piece)
                    size_bytes += piece.nbytes
            part.chmod(0o400)
            part.rename(path)
        except OSError as err:
            part.unlink(missing_ok=True)
            raise _no_room(err, self.path) from err
        return SpooledUpdate(str(path), size_bytes, digest.hexdigest(), update.target)

    def clear(self) -> None:
        """Remove the updates and offers of a dead stager, and nothing that others put there."""
        for path in self.updates.iterdir():
            if _UPDATE.fullmatch(path.name):
                path.unlink(missing_ok=True)
        for path in self.offers.iterdir():
            rank = _OFFER.fullmatch(path.name)
            if rank is not None and self.rank_lock(rank[1]).exists():
                path.unlink(missing_ok=True)


def map_update(spooled: SpooledUpdate, layout: Layout, base: ActiveVersion) -> StagedUpdate:
    """Map an update of the spool, read-only, and check it.

    Raises StorageError(unavailable) when it is gone, IntegrityError (digest, wrong_base),
    FormatError.
    """
    try:
        with Path(spooled.path).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as err:
        raise StorageError(
            f"the staged update {spooled.path} cannot be mapped: {err}",
            kind=Kind.UNAVAILABLE,
            hint="the stager replaces it: look at its offer again",
        ) from err
    view = memoryview(mapped)
    if len(view) != spooled.size_bytes or hashlib.sha256(view).hexdigest() != spooled.sha256:
        raise IntegrityError(
            f"the staged update {spooled.path} is not what its stager wrote",
            kind=Kind.DIGEST,
            hint="something else writes to the spool folder",
        )
    content = read_staged(layout, view)
    match content.about:
        case {"base": [*first], "target": [*last], "size_bytes": int(size), "versions": int(count)}:
            found, target = _point_of(first), _point_of(last)
        case _:
            raise FormatError("the staged update does not say what it is", kind=Kind.FIELD)
    if found != base or target != spooled.target:
        raise IntegrityError(
            f"the staged update leads from version {found.version} to {target.version}",
            kind=Kind.WRONG_BASE,
            hint="it was offered for another state",
        )
    return StagedUpdate(base, target, content.blocks, size, count, content.state)


def _no_room(err: OSError, folder: Path) -> StorageError:
    full = err.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    return StorageError(
        f"an update cannot be spooled in {folder}: {err.strerror}",
        kind=Kind.DISK_FULL if full else Kind.UNAVAILABLE,
        hint="give the folder more room, or set a smaller stage_max_bytes",
    )


def _write_whole(path: Path, row: dict[str, Any]) -> None:
    part = _aside(path)
    try:
        part.write_bytes(canonical_json(row))
        part.replace(path)
    except OSError as err:
        raise _no_room(err, path.parent) from err


def _aside(path: Path) -> Path:
    """Where a small file is written before it has its name."""
    return path.with_name(f".{path.name}.part")


def _may_be_lock(path: Path) -> bool:
    """Whether it is empty and this user's: what else has such a name is somebody else's."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    own = stat.S_ISREG(found.st_mode) and os.access(path, os.R_OK | os.W_OK)
    return own and found.st_size == 0


def _read(path: Path) -> dict[str, Any] | None:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    row = parse_canonical_json(text, what=str(path), max_bytes=MAX_NOTE_BYTES)
    if not isinstance(row, dict):
        raise FormatError(f"{path} is not an object", kind=Kind.FIELD)
    return row


def _point_row(point: ActiveVersion) -> list[Any]:
    return [point.version, point.policy_hash, str(point.fingerprint), point.generation]


def _point_of(row: object) -> ActiveVersion:
    match row:
        case [int(version), str(policy_hash), str(fingerprint), int(generation)] if is_sha256(
            policy_hash
        ):
            point = Fingerprint.parse(fingerprint)
            return ActiveVersion(check_version(version), policy_hash, point, generation)
    raise FormatError("a point is not [version, hash, fingerprint, generation]", kind=Kind.FIELD)


def _note_row(note: RankNote) -> dict[str, Any]:
    return {"active": _point_row(note.active), "attempt": note.attempt, "until": note.until}


def _note_of(row: object) -> RankNote:
    match row:
        case {"active": active, "attempt": int(attempt), "until": None}:
            return RankNote(_point_of(active), attempt)
        case {"active": active, "attempt": int(attempt), "until": int(until)}:
            return RankNote(_point_of(active), attempt, check_version(until))
    raise FormatError("a rank's note has other fields", kind=Kind.FIELD)


def _offer_of(row: dict[str, Any]) -> Offer:
    match row:
        case {
            "note": note,
            "update": update,
            "head_seen": int(head_seen),
            "current": bool(current),
            "trouble": trouble,
        }:
            return Offer(_note_of(note), _update_of(update), head_seen, current, _three(trouble))
    raise FormatError("a stager's offer has other fields", kind=Kind.FIELD)


def _update_of(row: object) -> SpooledUpdate | None:
    match row:
        case None:
            return None
        case [str(path), int(size_bytes), str(sha256), target] if is_sha256(sha256):
            return SpooledUpdate(path, size_bytes, sha256, _point_of(target))
    raise FormatError("an offer's update has other fields", kind=Kind.FIELD)


def _three(row: object) -> tuple[str, str, str] | None:
    match row:
        case None:
            return None
        case [str(name), str(kind), str(message)]:
            return name, kind, message
    raise FormatError("an offer's trouble has other fields", kind=Kind.FIELD)
