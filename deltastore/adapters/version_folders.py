"""A server that reloads a folder while it is written loads half of each: versions get folders.

`<out>/0000000042` is a whole checkpoint: written beside, then renamed. `<out>/latest` is a symbolic
link that is replaced in one step, so who opens it gets one version or the next, never a mixture. A
crash leaves a hidden folder that nothing reads and that the next writer removes, or a whole one
that `latest` does not name yet. Older folders are removed, never the one that `latest` names. There
is one writer at a time: it holds a lock on `<out>/.lock` that ends with its process.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.adapters.safetensors_write import write_checkpoint
from deltastore.errors import (
    ConflictError,
    InvalidInputError,
    Kind,
    LeaseError,
    NotFoundError,
)
from deltastore.ids import new_token

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from deltastore.format.checkpoint_file import CheckpointHeader
    from deltastore.format.layout import BitState

LINK = "latest"
RECORD = "deltastore.json"
MAX_RECORD_BYTES = 1 << 16
LOCK = ".lock"
_FOLDER = re.compile(r"\d{10}")
_LEFT_OVER = re.compile(r"\.(\d{10}|latest)\.[0-9a-f]{32}(\.partial|\.old)?")


@dataclass(frozen=True, slots=True)
class FolderRecord:
    """What a version's folder says of itself, in `deltastore.json`."""

    run_id: str
    version: int
    policy_hash: str


@dataclass(frozen=True, slots=True)
class VersionFolders:
    """The folders of one run's versions under `out`.

    Args:
        run_id: of the run; folders of another one are refused.
        keep: newest versions to keep.
    """

    out: Path
    run_id: str
    keep: int = 2

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise InvalidInputError(f"cannot keep {self.keep} versions", kind=Kind.SETTING)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the one writer for the block, and remove what a killed one left.

        Makes the folder. Raises LeaseError(lease_held) when another process writes there, and
        ConflictError(output_exists) when the folder holds something and was not made by this.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        if not (self.out / LOCK).is_file() and any(self.out.iterdir()):  # nor wait for a pipe
            raise ConflictError(
                f"{self.out} holds other files",
                kind=Kind.OUTPUT_EXISTS,
                hint="name a new or an empty folder for --out",
            )
        with (self.out / LOCK).open("a") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as err:
                raise LeaseError(
                    f"another process keeps {self.out}",
                    kind=Kind.LEASE_HELD,
                    hint="stop it, or name another folder",
                ) from err
            for path in self.out.iterdir():
                if _LEFT_OVER.fullmatch(path.name):
                    if path.is_symlink():
                        path.unlink()
                    else:
                        shutil.rmtree(path)
            yield

    def latest(self) -> tuple[Path, FolderRecord] | None:
        """The folder that `latest` names and its record; None before the first version.

        Raises ConflictError(output_exists) when it is of another run, or not of our making, and
        NotFoundError(file_missing) when it names a folder that is not there.
        """
        link = self.out / LINK
        if not os.path.lexists(link):
            return None
        if link.is_symlink():
            _require_target(link)
        folder = link.resolve()
        record = read_record(folder)
        if not link.is_symlink() or record is None or record.run_id != self.run_id:
            raise ConflictError(
                f"{link} is not of this run",
                kind=Kind.OUTPUT_EXISTS,
                hint="name another folder for --out",
            )
        return folder, record

    def write(
        self,
        state: BitState,
        record: FolderRecord,
        *,
        headers: Mapping[str, CheckpointHeader],
        extras: Mapping[str, bytes],
    ) -> Path:
        """Write a version, make `latest` name it, remove old ones; return its folder."""
        folder = self.out / f"{record.version:010d}"
        if read_record(folder) != record:
            text = json.dumps(
                {
                    "run_id": record.run_id,
                    "version": record.version,
                    "policy_hash": record.policy_hash,
                }
            )
            files = {**extras, RECORD: text.encode() + b"\n"}
            write_checkpoint(state, folder, headers=headers, extras=files)
        self._point_to(folder)
        self._prune(folder)
        return folder

    def discard(self, folder: Path) -> None:
        """Remove a version that turned out damaged: `latest` first, so that nobody opens it."""
        link = self.out / LINK
        if link.resolve() == folder.resolve():
            link.unlink(missing_ok=True)
        self._remove(folder)

    def _point_to(self, folder: Path) -> None:
        beside = self.out / f".{LINK}.{new_token()}"
        beside.symlink_to(folder.name)
        beside.replace(self.out / LINK)

    def _prune(self, current: Path) -> None:
        ours = [
            path
            for path in self.out.iterdir()
            if _FOLDER.fullmatch(path.name) and _is_of(path, self.run_id)
        ]
        for path in sorted(ours, reverse=True)[self.keep :]:
            if path != current:
                self._remove(path)

    def _remove(self, folder: Path) -> None:
        doomed = self.out / f".{folder.name}.{new_token()}.old"
        folder.rename(doomed)  # gone in one step for who lists the folder
        shutil.rmtree(doomed)


def _require_target(link: Path) -> None:
    """Refuse a link to nothing as what it is: somebody removed the folder, and not the link."""
    try:
        link.stat()
    except OSError as err:
        if err.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            raise
        raise NotFoundError(
            f"{link} names {str(link.readlink())!r}, which is not there",
            kind=Kind.FILE_MISSING,
            hint="remove the link: the newest version is then written anew",
        ) from err


def read_record(folder: Path) -> FolderRecord | None:
    """What a folder says of itself; None when it is not there or not of our making."""
    try:
        with (folder / RECORD).open("rb") as file:
            document = json.loads(file.read(MAX_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    match document:
        case {"run_id": str(run_id), "version": int(version), "policy_hash": str(policy_hash)}:
            return FolderRecord(run_id, version, policy_hash)
    return None


def _is_of(folder: Path, run_id: str) -> bool:
    record = read_record(folder)
    return record is not None and record.run_id == run_id
