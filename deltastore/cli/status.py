"""A fleet is looked at when something is wrong: this needs Redis alone, and no right to write.

Shows who takes part in a run: state, version, how far behind, speed, share, leases. Everything here
is what actors and trainer told Redis; what is true of the run, `log` and `verify` say.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit, urlunsplit

from deltastore.cli.output import Document, Output, console
from deltastore.cli.variables import secret_in
from deltastore.clock import SystemClock
from deltastore.coordination.backend import ActorState
from deltastore.coordination.outage import is_outage
from deltastore.coordination.redis import RedisCoordination
from deltastore.errors import CoordinationError, InvalidInputError, Kind
from deltastore.scheduling.ema import usable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from deltastore.clock import Clock
    from deltastore.coordination.backend import Coordination, Member

_UNKNOWN = (
    "Redis knows no run of this name: is it mistyped? else nobody has begun, or Redis lost its data"
)
_WORKING = (ActorState.ACTIVE, ActorState.JOINING)


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """How to reach Redis, as the command line said it.

    Args:
        url: without a password.
        user: of coordination/ACL.md; None is the server's default user.
        password_env: name of the variable with the password.
    """

    url: str
    user: str | None = None
    password_env: str | None = None

    def full_url(self) -> str:
        """The URL that the client takes; never to be printed."""
        try:
            parts = urlsplit(self.url)
        except ValueError as err:
            raise InvalidInputError(
                f"this is not a Redis URL: {err}", kind=Kind.URL, hint="use redis://HOST:PORT/DB"
            ) from err
        if "@" in parts.netloc:
            raise InvalidInputError(
                "the Redis URL has a user or password in it",
                kind=Kind.URL,
                hint="take it out; use --user and --password-env",
            )
        password = secret_in(
            self.password_env, hint="export it, or name the variable that holds the password"
        )
        if password is None:
            if self.user is not None:
                raise InvalidInputError(
                    "--user needs --password-env",
                    kind=Kind.SETTING,
                    hint="name the environment variable that holds the password",
                )
            return self.url
        who = f"{quote(self.user or '', safe='')}:{quote(password, safe='')}"
        return urlunsplit(parts._replace(netloc=f"{who}@{parts.netloc}"))


def show_fleet(access: RedisAccess, run: str, *, output: Output) -> None:
    """Print the fleet of a run as it is now."""
    with closing(_observed(access, run, SystemClock())) as coordination:
        document = fleet_document(coordination, run)
    output.emit(document, lambda: fleet_table(document))


def watch_fleet(
    access: RedisAccess,
    run: str,
    *,
    every_s: float,
    clock: Clock | None = None,
    looks: int | None = None,
) -> None:
    """Draw the fleet again and again; while Redis is away the last picture stays, and says so.

    Args:
        looks: how often; None is until Ctrl-C.
    """
    from rich.live import Live

    clock = SystemClock() if clock is None else clock
    with closing(_observed(access, run, clock)) as coordination:
        picture: RenderableType = fleet_table(fleet_document(coordination, run))
        done = 1
        with Live(picture, console=console(), auto_refresh=False) as live:
            while looks is None or done < looks:
                clock.sleep_s(every_s)
                try:
                    picture = fleet_table(fleet_document(coordination, run))
                    live.update(picture, refresh=True)
                except CoordinationError as err:
                    if not is_outage(err):
                        raise
                    live.update(_stale(picture, err), refresh=True)
                done += 1


def _observed(access: RedisAccess, run: str, clock: Clock) -> RedisCoordination:
    return RedisCoordination(access.full_url(), run, clock, only_reads=True)


def fleet_document(coordination: Coordination, run: str) -> Document:
    """What Redis knows of a run's fleet; the keys are stable.

    `known` is false when Redis has no trace of the run, which is what a mistyped name looks like.
    """
    now_s = coordination.now_s()
    head = coordination.head_hint()
    members = coordination.members()
    throughput = coordination.throughput()
    ends_s: dict[str, list[float]] = {}
    for lease in coordination.running_leases():
        ends_s.setdefault(lease.actor_id, []).append(lease.expires_at_s)
    rates = {
        member.actor_id: known.tokens_per_s
        for member in members
        if (known := throughput.get(member.actor_id)) is not None
    }
    whole = sum(usable(rates.get(m.actor_id)) or 0.0 for m in members if m.state in _WORKING)
    counts = coordination.job_counts()
    outcomes = {o.value: count for o, count in coordination.outcome_counts().items()}
    traces = (head, members, any(astuple(counts)), any(outcomes.values()))
    return {
        "run": run,
        "known": any(traces),
        "head": None if head is None else head.version,
        "head_policy_hash": None if head is None else head.policy_hash,
        "redis_time_s": now_s,
        "actors": [
            _actor(member, rates, whole, ends_s, None if head is None else head.version, now_s)
            for member in members
        ],
        "jobs": {
            "open": counts.open,
            "dealt": counts.assigned,
            "leased": counts.leased,
            "settled": counts.settled,
            "parked": counts.parked,
        },
        "outcomes": outcomes,
    }


def _actor(
    member: Member,
    rates: Mapping[str, float | None],
    whole: float,
    ends_s: Mapping[str, list[float]],
    head: int | None,
    now_s: float,
) -> Document:
    """One actor's row. `share` is of the speed of all who may work."""
    status, version = member.status, member.status.active_version
    rate = usable(rates.get(member.actor_id))
    mine = ends_s.get(member.actor_id, [])
    behind = status.staleness if head is None or version is None else max(0, head - version)
    share = rate / whole if rate is not None and whole and member.state in _WORKING else None
    return {
        "actor": member.actor_id,
        "region": member.record.region,
        "engine": member.record.engine,
        "state": member.state.value,
        "version": version,
        "policy_hash": status.policy_hash,
        "staged_version": status.staged_version,
        "staleness": behind,
        "tau_tokens_per_s": rate,
        "share": share,
        "leases": len(mine),
        "lease_left_s": max(0.0, min(mine) - now_s) if mine else None,
        "heartbeat_age_s": max(0.0, now_s - member.last_heartbeat_s),
        "note": status.note,
    }


def fleet_table(document: Document) -> RenderableType:
    """The same for people."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("actor", "region", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("version", "behind", "tau", "share", "leases", "lease left", "heard of"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note", overflow="ellipsis", no_wrap=True)
    for row in document["actors"]:
        table.add_row(
            row["actor"],
            row["region"],
            row["state"],
            _or_dash(row["version"], "{}"),
            str(row["staleness"]),
            _or_dash(row["tau_tokens_per_s"], "{:.3g} tok/s"),
            _or_dash(row["share"], "{:.0%}"),
            str(row["leases"]),
            _or_dash(row["lease_left_s"], "{:.0f} s"),
            f"{row['heartbeat_age_s']:.0f} s ago",
            row["note"],
        )
    head = _or_dash(document["head"], "{}")
    title = Text(f"{document['run']}: head {head}, {len(document['actors'])} actors", "bold")
    jobs = ", ".join(f"{count} {name}" for name, count in document["jobs"].items())
    results = ", ".join(f"{n} {name}" for name, n in document["outcomes"].items() if n) or "none"
    unknown = [] if document["known"] else [Text(_UNKNOWN, "yellow")]
    return Group(title, table, Text(f"jobs: {jobs}"), Text(f"results: {results}"), *unknown)


def _stale(picture: RenderableType, err: CoordinationError) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    return Group(picture, Text(f"as last seen; {err.message}", "red"))


def _or_dash(value: object, form: str) -> str:
    return "-" if value is None else form.format(value)
