"""A half-written output that looks finished is worse than none: outputs appear whole or not at all.

What the system says about a file becomes a typed error that names the file.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from deltastore.errors import (
    ConflictError,
    DeltastoreError,
    InvalidInputError,
    Kind,
    NotFoundError,
    StorageError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO


def refuse_existing(out: Path) -> None:
    """Raise unless `out` can be created: before the work, not after it."""
    parent = out.absolute().parent
    with typed_errors(out):
        taken, has_parent = _is_taken(out), parent.is_dir()
    if taken:
        raise _exists(out)
    if not has_parent:
        raise NotFoundError(
            f"folder {str(parent)!r} does not exist",
            kind=Kind.FILE_MISSING,
            hint="make it, or choose another --out",
        )


def _is_taken(out: Path) -> bool:
    """Whether anything has the name, a link to nothing too; raises if nothing ever can."""
    try:
        out.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextmanager
def new_file(out: Path) -> Iterator[BinaryIO]:
    """A file that appears as `out` when the block ends without an error, and never replaces one."""
    with typed_errors(out):
        # Cut: a name that `out` can have must not be too long with what is added here.
        fd, name = tempfile.mkstemp(prefix=f".{out.name[:50]}-", dir=out.absolute().parent)
        unfinished = Path(name)
        try:
            with os.fdopen(fd, "wb") as handle:
                yield handle
                handle.flush()
                os.fsync(handle.fileno())
            unfinished.chmod(0o644)
            # link, not rename: it fails when somebody made `out` in the meantime.
            os.link(unfinished, out)
        finally:
            unfinished.unlink(missing_ok=True)


@contextmanager
def typed_errors(path: Path) -> Iterator[None]:
    """Turn what the system says about `path` into an error of deltastore's tree."""
    try:
        yield
    except DeltastoreError:
        raise
    except FileExistsError as err:
        raise _exists(path) from err
    except (FileNotFoundError, NotADirectoryError) as err:
        raise NotFoundError(
            f"{str(path)!r} does not exist", kind=Kind.FILE_MISSING, hint="check the path"
        ) from err
    except IsADirectoryError as err:
        raise InvalidInputError(
            f"{str(path)!r} is a folder, not a file", kind=Kind.PAYLOAD, hint="name a file"
        ) from err
    except OSError as err:
        if err.errno in {errno.ENAMETOOLONG, errno.EILSEQ}:
            raise InvalidInputError(
                f"{str(path)!r}: {err.strerror}",
                kind=Kind.NAME,
                hint="choose a shorter, plainer name",
            ) from err
        if err.errno == errno.ELOOP:
            raise InvalidInputError(
                f"{str(path)!r} leads through symbolic links without end",
                kind=Kind.NAME,
                hint="a link points back to itself: name the file, or mend the link",
            ) from err
        if err.errno in {errno.ENXIO, errno.ENODEV}:
            raise InvalidInputError(
                f"{str(path)!r} is a pipe, a socket or a device, not a file",
                kind=Kind.PAYLOAD,
                hint="name a file",
            ) from err
        full = err.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
        raise StorageError(
            f"{str(path)!r}: {err.strerror or err}",
            kind=Kind.DISK_FULL if full else Kind.UNAVAILABLE,
            hint="free some space" if full else "check the permissions of the path",
        ) from err


def _exists(out: Path) -> ConflictError:
    return ConflictError(
        f"{str(out)!r} exists already",
        kind=Kind.OUTPUT_EXISTS,
        hint="choose another --out, or remove it first: nothing is overwritten",
    )


def require_regular(path: Path) -> None:
    """Refuse what is there and no file: a pipe would be waited for, a device read for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise InvalidInputError(
            f"{str(path)!r} is no regular file", kind=Kind.PAYLOAD, hint="name a file"
        )


def read_small(path: Path, max_bytes: int = 1 << 20) -> bytes:
    """A file that is small if it is what it should be; InvalidInputError(limit) if it is not."""
    with typed_errors(path):
        require_regular(path)
        with path.open("rb") as file:
            body = file.read(max_bytes + 1)
    if len(body) > max_bytes:
        raise InvalidInputError(
            f"{str(path)!r} has more than {max_bytes} bytes",
            kind=Kind.LIMIT,
            hint="this is another file than was meant",
        )
    return body
