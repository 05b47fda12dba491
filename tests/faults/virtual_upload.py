"""Run by test_storage_s3_memory.py in a process of its own: puts a body that takes no memory.

Prints how far resident memory rose above what it was before the put, in bytes. The body is a
mapping of zero pages: reading it leaves nothing resident, so what rises is what the upload holds.
"""

from __future__ import annotations

import json
import mmap
import sys

from deltastore.storage.s3 import S3Store
from deltastore.storage.s3_settings import S3Settings
from deltastore.storage.store import PutMode
from tests.unit.pipeline.memory_probe import forget_peak, resident_bytes


def main(settings: dict[str, object], size_bytes: int) -> None:
    """Warm up on a body of several parts, then measure."""
    store = S3Store(S3Settings(**settings))  # type: ignore[arg-type]
    parts = store._calls.settings
    store.put("warm", bytes(parts.streams * parts.part_bytes + 1), mode=PutMode.CREATE)
    with mmap.mmap(
        -1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ
    ) as virtual:
        body = memoryview(virtual)
        before = resident_bytes("VmRSS")
        forget_peak()
        store.put("k", body, mode=PutMode.CREATE)
        grown = resident_bytes("VmHWM") - before
        body.release()
    store.close()
    sys.stdout.write(f"{grown}\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
