"""What clients leave in a store when they are killed in the middle of a put."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.storage.s3 import S3Store

PART_BYTES = 5 << 20
_WRITER = """
import os, signal, sys
from deltastore.storage import fs
from deltastore.storage.store import PutMode
folder, key, pieces, number = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
fs._WRITE_BYTES = 1000
written, real = 0, os.write
def write(descriptor, body):
    global written
    if written == pieces:
        os.kill(os.getpid(), number)
    written += 1
    return real(descriptor, body)
os.write = write
fs.FileStore(folder).put(key, bytes(5000), mode=PutMode.CREATE)
"""


def start_writer(
    folder: Path, key: str, *, pieces: int, number: signal.Signals
) -> subprocess.Popen[bytes]:
    """A process that puts 5 pieces into a file store, and gets a signal after some of them."""
    arguments = [str(folder), key, str(pieces), str(int(number))]
    return subprocess.Popen([sys.executable, "-c", _WRITER, *arguments])


def kill_writer(folder: Path, key: str, *, pieces: int = 2) -> None:
    """A put into a file store that ends by SIGKILL after that many pieces of 5."""
    writer = start_writer(folder, key, pieces=pieces, number=signal.SIGKILL)
    assert writer.wait() == -signal.SIGKILL


def leave_parts(store: S3Store, key: str) -> None:
    """An upload with one part that nobody completes."""
    calls = store._calls
    place = {"Bucket": calls.settings.bucket, "Key": calls.name(key)}
    begun = calls.once(lambda client: client.create_multipart_upload(**place))
    upload = {**place, "UploadId": begun["UploadId"], "PartNumber": 1}
    calls.once(lambda client: client.upload_part(**upload, Body=bytes(PART_BYTES)))
