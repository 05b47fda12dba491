"""A body as large as a disk is no reason to hold it in memory: files are put as they are mapped."""

from __future__ import annotations

import mmap
import os
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def mapped_body(file: IO[bytes]) -> Iterator[memoryview]:
    """All bytes of an open file, to be put; an empty one cannot be mapped and needs not be."""
    if os.fstat(file.fileno()).st_size == 0:
        yield memoryview(b"")
        return
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view = memoryview(mapped)
    try:
        yield view
    finally:
        # The traceback of a failed put still holds parts of it, and must not be replaced.
        with suppress(BufferError):
            view.release()
            mapped.close()
