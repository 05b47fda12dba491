"""Stores on a line to a real server that breaks on command."""

from __future__ import annotations

import os
import resource
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from deltastore.storage.s3 import S3Store
from deltastore.storage.s3_settings import S3Settings
from deltastore.testing.clock import FakeClock
from deltastore.testing.s3_proxy import S3Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from deltastore.testing.servers import SeaweedServer

PART_BYTES = 5 << 20


@pytest.fixture
def proxy(s3_server: SeaweedServer) -> Iterator[S3Proxy]:
    """A line to the real server."""
    with S3Proxy(s3_server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def open_s3(
    s3_server: SeaweedServer, s3_bucket: str, proxy: S3Proxy
) -> Iterator[Callable[..., S3Store]]:
    """Makes stores on the proxy that wait on a FakeClock; settings may be replaced."""
    opened: list[S3Store] = []

    def make(clock: FakeClock | None = None, **settings: object) -> S3Store:
        fields: dict[str, object] = {
            "bucket": s3_bucket,
            "endpoint_url": proxy.endpoint,
            "access_key": s3_server.access_key,
            "secret_key": s3_server.secret_key,
            "part_bytes": PART_BYTES,
            "streams": 2,
            **settings,
        }
        opened.append(S3Store(S3Settings(**fields), clock=clock or FakeClock()))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def s3_store(open_s3: Callable[..., S3Store]) -> S3Store:
    """One of them."""
    return open_s3()


@dataclass
class SmallDisk:
    """A folder in which little more than `room_bytes` fit from `limit` on, until `grow`."""

    folder: Path
    room_bytes: int
    limit: Callable[[], None]
    grow: Callable[[], None]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A real file system that is full at 256 KiB; without root no file may grow beyond that."""
    folder, room_bytes = tmp_path / "disk", 256 << 10
    folder.mkdir()

    def mount(options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    if os.geteuid() == 0 and mount(f"size={room_bytes}"):

        def grow() -> None:
            assert mount(f"remount,size={64 * room_bytes}")

        try:
            yield SmallDisk(folder, room_bytes, lambda: None, grow)
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def set_limit(soft: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, before[1]))

    try:
        yield SmallDisk(
            folder, room_bytes, lambda: set_limit(room_bytes), lambda: set_limit(before[0])
        )
    finally:
        set_limit(before[0])
