"""A dropped connection must not become a lost lease, nor a retry a second effect.

One script call at a time goes out by EVALSHA, by EVAL when the server forgot it (SCRIPT FLUSH, a
restart, a failover). A call whose answer was lost is repeated, at most `RETRY_WAITS_S` times, and
the script is told so; every script gives a repeated call the answer of the first. What stays
unanswered becomes CoordinationError, and the caller goes on without Redis.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from urllib.parse import parse_qsl, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import (
    AuthenticationError,
    ClusterError,
    ConnectionError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    TimeoutError,
)
from redis.retry import Retry

from deltastore.coordination.records import check_ttl_s
from deltastore.coordination.scripts import Script, key_of
from deltastore.errors import CoordinationError, InvalidInputError, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.clock import Clock

RETRY_WAITS_S = (0.05, 0.2, 0.5)  # within the shortest sensible heartbeat period
_CLUSTER = "+cluster"
_DATABASE = re.compile(r"|/|/[0-9]+")
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
# The client's cluster errors are no RedisErrors.
_REDIS_ERRORS = (RedisError, RedisClusterException)
_LOST = (ConnectionError, TimeoutError, ReadOnlyError, ClusterError, RedisClusterException)
# What a server says that will serve again: while it loads or changes roles, lacks its replicas,
# cannot save, or runs somebody's endless script. The client has no class for most of them.
_WILL_PASS = ("READONLY", "LOADING", "MASTERDOWN", "NOREPLICAS", "MISCONF", "BUSY ", "TRYAGAIN")

Client: TypeAlias = "redis.Redis | RedisCluster"


class RedisConnection:
    """Calls scripts of one run on one Redis.

    Args:
        url: `redis://`, `rediss://` (TLS), `unix://`; `redis+cluster://` and `rediss+cluster://`
            name any node of a cluster.
        run: the run whose keys are used.
        clock: waits between repeats.
        timeout_s: how long to wait for a connection, and for an answer.
    """

    def __init__(self, url: str, run: str, clock: Clock, timeout_s: float) -> None:
        self._url = url
        self._run = run
        self._clock = clock
        self._timeout_s = check_ttl_s(timeout_s, "timeout_s")
        self._closed = False
        self._pid = os.getpid()
        self._client = self._connect()

    @property
    def where(self) -> str:
        """Host, port and database, for people; never with a secret in it."""
        parts = urlsplit(self._url)
        return (parts.netloc.rpartition("@")[2] or "localhost") + parts.path.rstrip("/")

    def _connect(self) -> Client:
        scheme, _, rest = self._url.partition("://")
        options: dict[str, Any] = {
            "socket_timeout": self._timeout_s,
            "socket_connect_timeout": self._timeout_s,
            # Repeats are ours: only we can tell a script that it is being asked again.
            "retry": Retry(NoBackoff(), 0),
        }
        _check_files(self._url)
        try:
            if scheme.endswith(_CLUSTER):
                url = f"{scheme.removesuffix(_CLUSTER)}://{rest}"
                return RedisCluster.from_url(url, **options)
            _check_database(self._url)
            client = redis.Redis.from_url(self._url, **options)
            made = client.connection_pool.make_connection()  # refuses unknown options
            str(getattr(made, "host", "")).encode("idna")  # as looking it up does: UnicodeError
        except (ValueError, TypeError) as err:
            raise InvalidInputError(
                f"this is not a Redis URL (host {self.where})",
                kind=Kind.URL,
                hint="use redis://HOST:PORT/DB, rediss:// for TLS, redis+cluster:// for a cluster",
            ) from err
        except _REDIS_ERRORS as err:
            raise self._error(err) from err
        return client

    def _here(self) -> Client:
        # After a fork the child would answer on the parent's sockets (CASE L9).
        if self._pid != os.getpid():
            self._client = self._connect()
            self._pid = os.getpid()
        return self._client

    def call(self, script: Script, *args: str | bytes | int, tell_repeat: bool = False) -> Any:
        """The script's answer. `tell_repeat` adds an argument: 1 when an answer may be lost."""
        keys = [key_of(self._run, name) for name in script.keys]

        def once(client: Any, repeat: bool) -> Any:
            sent = (*args, int(repeat)) if tell_repeat else args
            try:
                return client.evalsha(script.sha1, len(keys), *keys, *sent)
            except NoScriptError:  # CASE L7
                return client.eval(script.text, len(keys), *keys, *sent)

        return self._repeat(once)

    def get(self, name: str) -> bytes | None:
        """The string under one key of the run."""
        key = key_of(self._run, name)
        return cast("bytes | None", self._repeat(lambda client, _: client.get(key)))

    def check_policy(self) -> None:
        """Raise unless this Redis answers and never evicts (CASE L2)."""
        for memory in self._repeat(_memory_of_each_node):
            policy = memory.get("maxmemory_policy", "noeviction")
            if policy != "noeviction":
                raise CoordinationError(
                    f"Redis at {self.where} has maxmemory-policy {policy}: it would drop leases",
                    kind=Kind.REDIS_POLICY,
                    run=self._run,
                    hint="run: redis-cli CONFIG SET maxmemory-policy noeviction",
                )

    def check_role(self) -> None:
        """Raise unless this Redis is one to write to; a failover in progress is waited for."""
        self._repeat(_refuse_replica)

    def _repeat(self, once: Callable[[Any, bool], Any]) -> Any:
        """`once`'s answer; it is called again, and told so, after a lost one."""
        for attempt, wait_s in enumerate((*RETRY_WAITS_S, 0.0)):
            try:
                return once(self._here(), attempt > 0)
            except _REDIS_ERRORS as err:
                if attempt == len(RETRY_WAITS_S) or not _worth_repeating(err):
                    raise self._error(err) from err
                self._drop_connections()
            finally:
                if self._closed:
                    self._drop_connections()
            self._clock.sleep_s(wait_s)
        raise AssertionError("unreachable: the last attempt answers or raises")

    def _drop_connections(self) -> None:
        # After a failover the old connections lead to a replica or to nobody (CASE L8). Only idle
        # ones: taking a connection from under another thread breaks it in the client's parser.
        client = self._here()
        pools = (
            [node.redis_connection.connection_pool for node in _reached_nodes(client)]
            if isinstance(client, RedisCluster)
            else [client.connection_pool]
        )
        for pool in pools:
            pool.disconnect(inuse_connections=False)

    def _error(self, err: Exception) -> CoordinationError:
        kind, message, hint = Kind.REDIS_SCRIPT, f"Redis at {self.where} refused: {err}", None
        if isinstance(err, AuthenticationError) or "WRONGPASS" in str(err):
            kind, hint = Kind.REDIS_UNAVAILABLE, "check user and password of the Redis URL"
        elif isinstance(err, NoPermissionError) or "no permissions" in str(err):
            kind, hint = Kind.REDIS_SCRIPT, "its user needs its role's line of coordination/ACL.md"
        elif "CERTIFICATE_VERIFY_FAILED" in str(err):
            kind, hint = (
                Kind.REDIS_UNAVAILABLE,
                "name its authority: rediss://...?ssl_ca_certs=FILE",
            )
        elif isinstance(err, ReadOnlyError) or "READONLY" in str(err):
            kind, message = Kind.REDIS_UNAVAILABLE, f"Redis at {self.where} is a read-only replica"
            hint = "name its primary in the URL; after a failover, the new one"
        elif isinstance(err, _LOST) or _worth_repeating(err):
            kind, message = Kind.REDIS_UNAVAILABLE, f"Redis at {self.where} does not answer: {err}"
            hint = "start it, or check host, port and firewall; published versions are not affected"
        elif isinstance(err, OutOfMemoryError) or "OOM" in str(err):
            kind, message = Kind.REDIS_MEMORY, f"Redis at {self.where} is out of memory"
            hint = "raise maxmemory; no new jobs and leases until then, actors still follow"
        return CoordinationError(message, kind=kind, run=self._run, hint=hint)

    def close(self) -> None:
        """Drop idle connections now, those in use when their call ends."""
        self._closed = True
        if self._pid == os.getpid():
            self._drop_connections()


def _reached_nodes(client: RedisCluster) -> list[Any]:
    nodes: list[Any] = client.get_nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node.redis_connection is not None]


def _check_database(url: str) -> None:
    """Refuse `redis://host/first`: the client would take database 0 without a word."""
    parts = urlsplit(url)
    if parts.scheme != "unix" and not _DATABASE.fullmatch(parts.path):
        raise ValueError(f"{parts.path} names no database")


def _check_files(url: str) -> None:
    """The client would say of a missing certificate that the server does not answer."""
    try:
        query = urlsplit(url).query
    except ValueError as err:
        raise InvalidInputError(
            f"this is not a Redis URL: {err}", kind=Kind.URL, hint="use redis://HOST:PORT/DB"
        ) from err
    for name, path in parse_qsl(query):
        if name in _FILES and not Path(path).is_file():
            raise InvalidInputError(
                f"the Redis URL names {name}={path}: there is no such file",
                kind=Kind.URL,
                hint="name a PEM file that this process can read",
            )


def _worth_repeating(err: Exception) -> bool:
    if isinstance(err, AuthenticationError):  # a ConnectionError to the client, but it stays wrong
        return False
    if "CERTIFICATE_VERIFY_FAILED" in str(err):
        return False
    # Servers before 7 wrap the reason of a failing script into a plain error.
    return isinstance(err, _LOST) or any(word in str(err) for word in _WILL_PASS)


def _refuse_replica(client: Any, _repeat: bool) -> None:
    if isinstance(client, RedisCluster):
        return  # it asks the primaries by itself
    if client.info("replication").get("role") == "slave":
        raise ReadOnlyError("READONLY it is a replica")


def _memory_of_each_node(client: Any, _repeat: bool) -> list[dict[str, Any]]:
    if isinstance(client, RedisCluster):
        nodes: Any = client.info("memory", target_nodes=RedisCluster.PRIMARIES)
        # One node answers with its fields, several with a table of them by name.
        return [nodes] if "maxmemory_policy" in nodes else list(nodes.values())
    return [client.info("memory")]
