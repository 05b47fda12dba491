"""A secret on a command line is in every process listing: here options name variables, not values.

Opens the store and the run behind a run URL. Keys come from the usual AWS environment and
configuration files, or from variables that the caller names.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.cli.variables import secret_in
from deltastore.clock import SystemClock
from deltastore.errors import InvalidInputError, Kind
from deltastore.ids import check_name
from deltastore.repository.run import Run, open_run
from deltastore.storage.observed import open_observed
from deltastore.storage.url import split_run_url

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deltastore.storage.observed import StoreObserver
    from deltastore.storage.s3_writer import OnPart
    from deltastore.storage.store import ObjectStore


@dataclass(frozen=True, slots=True)
class Watched:
    """Who is told what passes a store.

    Args:
        observer: of calls, bytes and retries; None: nobody.
        region: what observer and events call the store's region; None: as the run calls its home.
        on_part: told of the parts of large bodies that have arrived.
    """

    observer: StoreObserver | None = None
    region: str | None = None
    on_part: OnPart | None = None


UNWATCHED = Watched()


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach a store, as the command line said it.

    Args:
        endpoint_url, region, profile: as for any S3 tool; None leaves them to the AWS environment.
        access_key_env, secret_key_env: names of the variables that hold the keys.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    access_key_env: str | None = None
    secret_key_env: str | None = None

    @contextmanager
    def store(
        self, run_url: str, *, streams: int = 8, watched: Watched = UNWATCHED
    ) -> Iterator[tuple[ObjectStore, str]]:
        """The store that `run_url` lies in and the run's name; closed at the end of the block.

        `streams` parts of one large object are in flight at once.
        """
        _refuse_password_in(run_url)
        store_url, name = split_run_url(run_url)
        with self.store_at(store_url, streams=streams, watched=watched) as store:
            yield store, name

    @contextmanager
    def store_at(
        self, store_url: str, *, streams: int = 8, watched: Watched = UNWATCHED
    ) -> Iterator[ObjectStore]:
        """The store at that URL; closed at the end of the block."""
        _refuse_password_in(store_url)
        if (self.access_key_env is None) != (self.secret_key_env is None):
            raise InvalidInputError(
                "--access-key-env and --secret-key-env belong together",
                kind=Kind.SETTING,
                hint="give both, or neither to use the AWS environment and profiles",
            )
        store = open_observed(
            store_url,
            watched.observer,
            watched.region or "",
            clock=SystemClock(),
            endpoint_url=self.endpoint_url,
            region=self.region,
            profile=self.profile,
            access_key=_key(self.access_key_env),
            secret_key=_key(self.secret_key_env),
            streams=streams,
            on_part=watched.on_part,
        )
        try:
            yield store
        finally:
            store.close()

    @contextmanager
    def run(self, run_url: str, *, streams: int = 8, watched: Watched = UNWATCHED) -> Iterator[Run]:
        """The run at `run_url`, opened; NotFoundError(run_missing) when there is none."""
        with self.store(run_url, streams=streams, watched=watched) as (store, name):
            yield open_run(store, name, region=watched.region)

    def home_name(self, run_url: str) -> str:
        """What the run at `run_url` calls its home: what is counted under no name keeps none."""
        with self.run(run_url) as run:
            return run.record.home


def split_relays(relays: Sequence[str]) -> dict[str, str]:
    """Names and run URLs of the regions that `--relay NAME=RUN_URL` names, each once."""
    found: dict[str, str] = {}
    for relay in relays:
        _refuse_password_in(relay)
        name, separator, url = relay.partition("=")
        if not separator or name in found:
            raise InvalidInputError(
                f"{relay!r} is not a relay of its own",
                kind=Kind.SETTING,
                hint="--relay NAME=RUN_URL, each name once",
            )
        found[check_name(name, "region")] = url
    return found


def _key(variable: str | None) -> str | None:
    return secret_in(variable, hint="export it, or name the variable that holds the key")


def _refuse_password_in(run_url: str) -> None:
    """Before anything else looks at the URL: a message about it would print the password."""
    authority = run_url.partition("://")[2].partition("/")[0]
    if ":" in authority.rpartition("@")[0]:
        raise InvalidInputError(
            "the URL has a password in it",
            kind=Kind.URL,
            hint="take it out; use --profile, or --access-key-env and --secret-key-env",
        )
