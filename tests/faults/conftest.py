"""Stores on a line to a real server that breaks on command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deltastore.storage.s3 import S3Store
from deltastore.storage.s3_settings import S3Settings
from deltastore.testing.clock import FakeClock
from deltastore.testing.s3_proxy import S3Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
