"""Outputs appear whole or not at all, never replace anything, and errors name the path."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from deltastore.cli.files import (
    new_file,
    read_small,
    refuse_existing,
    require_regular,
    typed_errors,
)
from deltastore.errors import (
    ConflictError,
    DeltastoreError,
    IntegrityError,
    InvalidInputError,
    Kind,
    NotFoundError,
)


def test_new_file(tmp_path: Path) -> None:
    """The file has its bytes once the block has ended, and nothing lies beside it."""
    out = tmp_path / "d"
    with new_file(out) as handle:
        handle.write(b"abc")
        assert not out.exists()
    assert out.read_bytes() == b"abc"
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    assert out.stat().st_mode & 0o777 == 0o644


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    """A block that raises leaves neither the file nor what was written so far."""

    def fail() -> None:
        with new_file(tmp_path / "d") as handle:
            handle.write(b"abc")
            raise IntegrityError("no", kind=Kind.DIGEST)

    with pytest.raises(IntegrityError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_file_made_meanwhile_is_kept(tmp_path: Path) -> None:
    """A file that appears while the block runs is not replaced."""
    out = tmp_path / "d"

    def race() -> None:
        with new_file(out) as handle:
            handle.write(b"ours")
            out.write_bytes(b"theirs")

    with pytest.raises(ConflictError):
        race()
    assert out.read_bytes() == b"theirs"
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_refuse_existing(tmp_path: Path) -> None:
    """A file, a folder and a dangling link are in the way; a missing parent is named."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for out in (tmp_path / "file", tmp_path, tmp_path / "link"):
        with pytest.raises(ConflictError):
            refuse_existing(out)
    with pytest.raises(NotFoundError, match="nowhere"):
        refuse_existing(tmp_path / "nowhere" / "d")
    refuse_existing(tmp_path / "d")


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, Kind.DISK_FULL),
        (errno.EDQUOT, Kind.DISK_FULL),
        (errno.EACCES, Kind.UNAVAILABLE),
        (errno.EIO, Kind.UNAVAILABLE),
        (errno.ENOENT, Kind.FILE_MISSING),
        (errno.EEXIST, Kind.OUTPUT_EXISTS),
        (errno.EISDIR, Kind.PAYLOAD),
        (errno.ELOOP, Kind.NAME),
        (errno.ENAMETOOLONG, Kind.NAME),
        (errno.ENXIO, Kind.PAYLOAD),
    ],
)
def test_system_errors_are_typed(number: int, kind: Kind, tmp_path: Path) -> None:
    """What the system says becomes an error of the tree that names the path and the way out."""
    with pytest.raises(DeltastoreError) as caught, typed_errors(tmp_path / "x"):
        raise OSError(number, "says the system")
    assert caught.value.kind is kind
    assert str(tmp_path / "x") in caught.value.message
    assert caught.value.hint


def test_a_name_too_long_is_bad_input(tmp_path: Path) -> None:
    """A name that no file can have is refused before the work, as input that can never work."""
    with pytest.raises(InvalidInputError) as caught:
        refuse_existing(tmp_path / ("x" * 300))
    assert caught.value.kind is Kind.NAME


def test_a_link_to_itself_is_bad_input(tmp_path: Path) -> None:
    """A loop of links is named as one: no permission of the path would help."""
    for name, target in (("here", "there"), ("there", "here")):
        (tmp_path / name).symlink_to(target)
    with pytest.raises(InvalidInputError, match="symbolic links without end"):
        read_small(tmp_path / "here")
    with pytest.raises(InvalidInputError, match="symbolic links without end"):
        refuse_existing(tmp_path / "here" / "out")


@pytest.mark.parametrize("name", ["x" * 255, "\N{SNOWMAN}" * 85])
def test_the_longest_names_are_written(tmp_path: Path, name: str) -> None:
    """A name that a file can have is one that an output can have: what is beside it is shorter."""
    refuse_existing(tmp_path / name)
    with new_file(tmp_path / name) as handle:
        handle.write(b"abc")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_size_limit_is_a_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files is told apart from permissions: there is no room."""

    def write() -> None:
        with typed_errors(tmp_path / "d"):
            raise OSError(errno.EFBIG, "File too large")

    with pytest.raises(DeltastoreError) as caught:
        write()
    assert caught.value.kind is Kind.DISK_FULL


def test_only_small_files_are_read(tmp_path: Path) -> None:
    """A pipe is not waited for, a device and a sparse file are not read to their ends."""
    path = tmp_path / "key"
    path.write_bytes(b"abc")
    assert read_small(path) == b"abc"
    os.truncate(path, 40 << 30)
    with pytest.raises(InvalidInputError, match="key' has more than") as refused:
        read_small(path)
    assert refused.value.kind is Kind.LIMIT
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for other in (pipe, Path("/dev/zero")):
        with pytest.raises(InvalidInputError, match="no regular file"):
            read_small(other)
        with pytest.raises(InvalidInputError, match="no regular file"):
            require_regular(other)
    with pytest.raises(InvalidInputError, match="is a folder"):
        read_small(tmp_path)
    with pytest.raises(NotFoundError):
        read_small(tmp_path / "none")
