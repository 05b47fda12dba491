"""boto3 clients made by many threads at once, or carried over a fork, fail where nobody looks.

One client per process, made on first use under a lock (S9). A forked child makes its own: it may
use neither the parent's sockets nor its pool of threads, which did not come along.
"""

from __future__ import annotations

import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.handlers import add_expect_header

from deltastore import __version__
from deltastore.storage.rules import store_closed
from deltastore.storage.s3_signing import sign_carried_digests

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

    from deltastore.storage.s3_settings import S3Settings


@dataclass(frozen=True, slots=True)
class Connection:
    """What one process uses to talk to the bucket."""

    client: S3Client
    permits: threading.BoundedSemaphore
    """One per request in flight: more would open connections that the pool throws away (S10)."""
    pool: ThreadPoolExecutor
    """Threads for the parts of large objects. Nothing that runs on it may submit to it."""


class ConnectionSource:
    """Makes the connection of this process when it is first asked for."""

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._closed = False
        self._inherited: list[Connection] = []
        _sources.add(self)

    def get(self) -> Connection:
        """The connection; raises StorageError after `close`."""
        connection = self._connection
        if connection is not None:
            return connection
        with self._lock:
            if self._closed:
                raise store_closed(self._settings.url)
            if self._connection is None:
                self._connection = _connect(self._settings)
            return self._connection

    def renew_credentials(self, refused: S3Client) -> bool:
        """Read them again from where they come from; False when they were given as they are.

        Keys in a file are read once, by a client that lives as long as the trainer: when somebody
        replaces them, the old ones expire. Threads that meet this together make one new client.
        """
        if self._settings.access_key is not None:
            return False
        with self._lock:
            current = self._connection
            if current is not None and current.client is refused:
                # The old client is left to the requests that run on it, and goes with the last one.
                self._connection = replace(current, client=_client(self._settings))
        return True

    def close(self) -> None:
        """Wait for running parts and close the connections."""
        with self._lock:
            connection, self._connection, self._closed = self._connection, None, True
        if connection is not None:
            connection.pool.shutdown(wait=True, cancel_futures=True)
            connection.client.close()

    def forget_after_fork(self) -> None:
        """In a forked child: leave the parent's connection alone, with a lock nobody holds."""
        self._lock = threading.Lock()
        if self._connection is not None:
            # Kept, never used: dropping it would shut down sockets and threads of the parent.
            self._inherited.append(self._connection)
            self._connection = None


_sources: weakref.WeakSet[ConnectionSource] = weakref.WeakSet()


def _forget_all() -> None:
    for source in list(_sources):
        source.forget_after_fork()


os.register_at_fork(after_in_child=_forget_all)


def _connect(settings: S3Settings) -> Connection:
    return Connection(
        _client(settings),
        threading.BoundedSemaphore(settings.max_connections),
        ThreadPoolExecutor(settings.streams, thread_name_prefix="s3-part"),
    )


def _client(settings: S3Settings) -> S3Client:
    style = settings.addressing_style or ("path" if settings.endpoint_url else "auto")
    # Other stores do not look at the region, but the signature needs one.
    region = settings.region or ("us-east-1" if settings.endpoint_url else None)
    session = boto3.session.Session(
        profile_name=settings.profile,
        region_name=region,
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=settings.secret_key,
        aws_session_token=settings.session_token,
    )
    client: S3Client = session.client(
        "s3",
        endpoint_url=settings.endpoint_url,
        config=Config(
            connect_timeout=settings.connect_timeout_s,
            read_timeout=settings.read_timeout_s,
            max_pool_connections=settings.max_connections,
            tcp_keepalive=True,
            retries={"total_max_attempts": 1},  # retries are ours (retry.py): they read back
            s3={"addressing_style": style},
            # Put together anew for every request, botocore's own takes a sixth of the request.
            user_agent=f"deltastore/{__version__} boto3/{boto3.__version__}",
            # Newer defaults break other stores, and only on large files (S3).
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    sign_carried_digests(client)
    # It asks before every body whether to send it: a round trip for each part.
    client.meta.events.unregister("before-call.s3", add_expect_header)
    client.meta.events.register("before-call.s3.HeadBucket", _ask_for_the_region_once)
    return client


def _ask_for_the_region_once(params: dict[str, Any], **_: object) -> None:
    """The client asks HeadBucket where a bucket is that is elsewhere: not again for that request.

    An endpoint that redirects everything, as many do from http to https, would never be done.
    """
    params["context"].setdefault("s3_redirect", {})["redirected"] = True
