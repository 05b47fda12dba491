"""A folder of versions has one writer, and a crash at any point leaves the last version whole."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from deltastore.adapters.safetensors_dir import checkpoint_layout, load_state, scan_checkpoint
from deltastore.adapters.version_folders import FolderRecord, VersionFolders, read_record
from deltastore.errors import ConflictError, InvalidInputError, Kind, LeaseError, NotFoundError
from deltastore.testing.checkpoints import TinyShape, next_checkpoint, tiny_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.adapters.safetensors_scan import Checkpoint

RUN = "a" * 32
SHAPE = TinyShape(vocab=16, hidden=8, intermediate=8, layers=1, heads=2, kv_heads=1)


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Checkpoint]:
    """Four checkpoints, each a step after the one before."""
    folders = [tiny_checkpoint(tmp_path / "0", shape=SHAPE)]
    for number in range(1, 4):
        folders.append(next_checkpoint(folders[-1], tmp_path / str(number), seed=number))
    return [scan_checkpoint(folder) for folder in folders]


def write(folders: VersionFolders, checkpoint: Checkpoint, version: int) -> Path:
    """Write a checkpoint as a version."""
    state = load_state(checkpoint, checkpoint_layout(checkpoint))
    return folders.write(
        state,
        FolderRecord(folders.run_id, version, f"{version:064x}"),
        headers={shard.name: shard.header for shard in checkpoint.shards},
        extras={file.name: file.path.read_bytes() for file in checkpoint.extras},
    )


def weights(folder: Path) -> bytes:
    """The one shard."""
    return (folder / "model.safetensors").read_bytes()


def test_versions_come_and_go(tmp_path: Path, checkpoints: list[Checkpoint]) -> None:
    """`latest` names the newest version, `keep` of them stay, and what others put there stays."""
    folders = VersionFolders(tmp_path / "out", RUN, keep=2)
    with folders.writing():
        (tmp_path / "out" / "notes").mkdir()
        (tmp_path / "out" / f"{9:010d}").mkdir()  # not of our making
        for version, checkpoint in enumerate(checkpoints):
            folder = write(folders, checkpoint, version)
            found = folders.latest()
            assert found == (folder, FolderRecord(RUN, version, f"{version:064x}"))
            assert weights(folder) == weights(tmp_path / str(version))
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [".lock", f"{2:010d}", f"{3:010d}", f"{9:010d}", "latest", "notes"]


def test_a_version_written_twice_is_kept(tmp_path: Path, checkpoints: list[Checkpoint]) -> None:
    """A writer that was killed after the rename finds its version whole, and only links it."""
    folders = VersionFolders(tmp_path / "out", RUN)
    with folders.writing():
        folder = write(folders, checkpoints[0], 5)
        (tmp_path / "out" / "latest").unlink()
        before = (folder / "model.safetensors").stat().st_mtime_ns
        assert write(folders, checkpoints[0], 5) == folder
        assert (folder / "model.safetensors").stat().st_mtime_ns == before
        assert (tmp_path / "out" / "latest").resolve() == folder


def test_what_a_killed_writer_left_is_removed(
    tmp_path: Path, checkpoints: list[Checkpoint]
) -> None:
    """Half-written folders and links of a killed writer go at the next start, versions stay."""
    folders, token = VersionFolders(tmp_path / "out", RUN), "0" * 32
    with folders.writing():
        write(folders, checkpoints[0], 5)
    for name in (f".{6:010d}.{token}.partial", f".{4:010d}.{token}.old"):
        (folders.out / name).mkdir()
        (folders.out / name / "model.safetensors").write_bytes(b"half")
    (folders.out / f".latest.{token}").symlink_to("nowhere")
    with folders.writing():
        assert sorted(path.name for path in folders.out.iterdir()) == [
            ".lock",
            f"{5:010d}",
            "latest",
        ]


def test_one_writer(tmp_path: Path) -> None:
    """A second writer is refused while the first one is there, and let in afterwards."""
    folders = VersionFolders(tmp_path / "out", RUN)
    with folders.writing():
        with pytest.raises(LeaseError) as err, folders.writing():
            pass
        assert err.value.kind is Kind.LEASE_HELD
    with folders.writing():
        assert folders.latest() is None


def test_a_lock_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe in the place of the lock is another's: the folder is refused."""
    folders = VersionFolders(tmp_path, RUN)
    os.mkfifo(tmp_path / ".lock")
    held = os.open(tmp_path / ".lock", os.O_RDWR)  # what would wait for it fails instead
    try:
        with pytest.raises(ConflictError), folders.writing():
            pass
    finally:
        os.close(held)


def test_another_run_is_refused(tmp_path: Path, checkpoints: list[Checkpoint]) -> None:
    """A folder that holds versions of another run is not taken over."""
    ours, theirs = VersionFolders(tmp_path / "out", RUN), VersionFolders(tmp_path / "out", "b" * 32)
    with theirs.writing():
        write(theirs, checkpoints[0], 1)
    with pytest.raises(ConflictError) as err:
        ours.latest()
    assert err.value.kind is Kind.OUTPUT_EXISTS


def test_a_link_to_nothing_is_named(tmp_path: Path, checkpoints: list[Checkpoint]) -> None:
    """A `latest` whose folder somebody removed, or that names itself, is said to be that; without
    it the version is written again."""
    folders = VersionFolders(tmp_path / "out", RUN)
    with folders.writing():
        shutil.rmtree(write(folders, checkpoints[0], 1))
        with pytest.raises(NotFoundError, match=r"names '0000000001', which is not there") as err:
            folders.latest()
        assert "remove the link" in str(err.value)
        (folders.out / "latest").unlink()
        (folders.out / "latest").symlink_to("latest")
        with pytest.raises(NotFoundError, match=r"names 'latest'"):
            folders.latest()
        (folders.out / "latest").unlink()
        write(folders, checkpoints[0], 1)
        assert folders.latest() is not None


def test_a_damaged_version_is_discarded(tmp_path: Path, checkpoints: list[Checkpoint]) -> None:
    """What turned out damaged is no longer named, nor there."""
    folders = VersionFolders(tmp_path / "out", RUN)
    with folders.writing():
        folder = write(folders, checkpoints[0], 1)
        folders.discard(folder)
        assert folders.latest() is None
        assert not folder.exists()
        assert weights(write(folders, checkpoints[0], 1)) == weights(tmp_path / "0")


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b"[" * 50_000, b'{"run_id":1,"version":1,"policy_hash":""}']
)
def test_a_record_that_is_none(tmp_path: Path, text: bytes) -> None:
    """A folder that says nothing usable of itself is not of our making."""
    (tmp_path / "deltastore.json").write_bytes(text)
    assert read_record(tmp_path) is None


def test_keeping_nothing_is_refused(tmp_path: Path) -> None:
    """At least the newest version stays."""
    with pytest.raises(InvalidInputError):
        VersionFolders(tmp_path, RUN, keep=0)


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    """A folder that holds other files is refused before anything is written into it."""
    (tmp_path / "config.json").write_text("{}")
    with (
        pytest.raises(ConflictError) as err,
        VersionFolders(tmp_path, "0" * 32).writing(),
    ):
        pass
    assert err.value.kind is Kind.OUTPUT_EXISTS
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
