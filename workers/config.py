"""A worker that guesses a missing setting trains the wrong run: its settings are one checked file.

The file is JSON and holds no secret: where one is needed it names the environment variable that
carries it. Unknown, missing and mistyped fields are refused by name. Nothing here reads the
environment or imports torch.
"""

from __future__ import annotations

import json
import math
import types
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from deltastore.config import require
from deltastore.errors import InvalidInputError, Kind
from deltastore.ids import check_name
from workers.vllm_settings import VLLM_DEFAULTS, VllmSettings

if TYPE_CHECKING:
    from pathlib import Path

_T = TypeVar("_T")

MAX_CONFIG_BYTES = 1 << 20
TRANSFORMERS, VLLM = "transformers", "vllm"
ENGINES = (TRANSFORMERS, VLLM)


@dataclass(frozen=True, slots=True)
class RegionConfig:
    """One bucket that holds the run.

    Args:
        name: the region's name, as leases and events say it.
        url: of the store that holds the run's folder: s3://bucket/prefix or file:///folder.
        endpoint_url, region, profile: for s3.
        access_key_env, secret_key_env: names of the environment variables with the credentials.
        streams: requests in flight to it; None: the library's default.
    """

    name: str
    url: str
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    access_key_env: str | None = None
    secret_key_env: str | None = None
    streams: int | None = None

    def __post_init__(self) -> None:
        check_name(self.name, "region")
        if self.streams is not None:
            _whole(self, "streams", 1, 256)
        both = (self.access_key_env is None) == (self.secret_key_env is None)
        require(both, "access_key_env", self.access_key_env, "give both key variables or neither")


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """How the reference trainer learns and how long it waits."""

    steps: int = 16
    lr: float = 3e-5
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    groups: int = 4  # prompts per step
    group_size: int = 8  # samples per prompt
    max_new_tokens: int = 10
    temperature: float = 1.0
    micro_batch_groups: int = 2  # groups per backward pass: bounds the logits in memory
    ratio_cap: float = 2.0  # truncates importance ratios
    max_policy_lag: int = 1
    dealt_fraction: float = 0.7  # the rest of a batch is pulled as slots free
    min_groups: int = 1  # a step that reached its deadline goes on with this many
    step_deadline_s: float = 120.0
    give_up_s: float = 600.0  # a step below min_groups after this long is an error
    wait_for_actors: int = 1  # eligible actors before the first batch is dealt
    actors_wait_s: float = 180.0
    outage_max_s: float = 60.0  # how long Redis may be away
    commit_wait_s: float = 120.0
    stop_wait_s: float = 600.0  # after the last step, until somebody says stop

    def __post_init__(self) -> None:
        for name in ("steps", "groups", "group_size", "max_new_tokens", "micro_batch_groups"):
            _whole(self, name, 1, 1 << 16)
        _whole(self, "max_policy_lag", 0, 64)
        _whole(self, "wait_for_actors", 0, 1 << 16)
        _whole(self, "min_groups", 1, self.groups)
        require(0 < self.lr < 1, "lr", self.lr, "above 0, below 1")
        for name in ("beta1", "beta2", "weight_decay"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "0 up to below 1")
        require(self.ratio_cap >= 1, "ratio_cap", self.ratio_cap, "at least 1")
        require(0 <= self.dealt_fraction <= 1, "dealt_fraction", self.dealt_fraction, "0 to 1")
        require(self.group_size >= 2, "group_size", self.group_size, "at least 2 to compare")
        _positive(self, "clip_norm", "temperature", "step_deadline_s", "give_up_s", "actors_wait_s")
        _positive(self, "outage_max_s", "commit_wait_s", "stop_wait_s")
        require(
            self.give_up_s >= self.step_deadline_s,
            "give_up_s",
            self.give_up_s,
            "at least step_deadline_s",
        )


@dataclass(frozen=True, slots=True)
class ActorConfig:
    """Who an actor is and how it works."""

    actor_id: str
    region: str
    engine: str = TRANSFORMERS
    leases_at_once: int = 2  # decoded as one batch
    lease_s: float = 60.0  # asked for while its own speed is unknown, and at most
    min_lease_s: float = (
        10.0  # a fast actor's lease outlives a pause of its machine; lease_s limits it
    )
    max_lease_s: float = 300.0  # with all renewals
    heartbeat_ttl_s: float = 15.0  # three heartbeats fit in it
    idle_s: float = 0.25  # between looks for work while there is none
    drain_max_s: float = 30.0
    catch_up_s: float = 180.0  # to the version a stop asks for
    leave_poisoned_after: int = 3  # re-anchorings in a row before it gives up
    stager_folder: str | None = None  # of this host's stager; None: the actor fetches by itself
    trusted_keys: str | None = None  # a file of keys that must have signed versions and shortcuts
    vllm: VllmSettings = VLLM_DEFAULTS  # for that engine

    def __post_init__(self) -> None:
        check_name(self.actor_id, "actor id")
        require(self.actor_id != "trainer", "actor_id", self.actor_id, "that is the trainer's name")
        check_name(self.region, "region")
        require(self.engine in ENGINES, "engine", self.engine, f"one of {', '.join(ENGINES)}")
        _whole(self, "leases_at_once", 1, 64)
        _whole(self, "leave_poisoned_after", 1, 64)
        _positive(self, "lease_s", "max_lease_s", "heartbeat_ttl_s", "idle_s", "drain_max_s")
        _positive(self, "catch_up_s")
        _positive(self, "min_lease_s")
        require(self.max_lease_s >= self.lease_s, "max_lease_s", self.max_lease_s, ">= lease_s")


@dataclass(frozen=True, slots=True)
class StagerConfig:
    """What one host's stager stages from, and where.

    Args:
        region: the host's own.
        folder: where it meets its ranks: on shared memory or a local disk.
        stage_max_bytes: of decoded updates in it.
        cache_max_bytes: of bodies in memory.
        trusted_keys: a file of keys that must have signed versions and shortcuts; None trusts the
            bucket.
    """

    region: str
    folder: str
    stage_max_bytes: int = 2 << 30
    cache_max_bytes: int = 256 << 20
    trusted_keys: str | None = None

    def __post_init__(self) -> None:
        check_name(self.region, "region")
        require(self.folder.startswith("/"), "folder", self.folder, "an absolute path")
        _whole(self, "stage_max_bytes", 1 << 20, 1 << 50)
        _whole(self, "cache_max_bytes", 1 << 20, 1 << 50)


@dataclass(frozen=True, slots=True)
class ReplicateConfig:
    """How a maintenance worker brings other regions up to home.

    Args:
        poll_s: between looks for a new version in home.
        patience_s: how long after its commit a version is left to the trainer.
        folder: for large files on their way; None: the system's folder for such.
        until_current: end when every region holds what home held at the start.
    """

    poll_s: float = 5.0
    patience_s: float = 30.0
    folder: str | None = None
    until_current: bool = False

    def __post_init__(self) -> None:
        _positive(self, "poll_s")
        require(self.patience_s >= 0, "patience_s", self.patience_s, "not negative")


@dataclass(frozen=True, slots=True)
class MaintenanceConfig:
    """How a maintenance worker tends buckets.

    Args:
        regions: whose buckets; empty: every region of the file.
        tasks: some of anchors, composites, retention, janitor.
        every_s: between rounds.
        rounds_max: end after so many rounds; None: when told to stop.
        delete: whether retention and the janitor delete; else they only report what they would.
        keep_versions, grace_s, rollout_keep_versions: see RetentionPolicy.
        join_seconds_max, anchor_multiple: see AnchorPolicy.
        orphan_grace_s, abandoned_s: see JanitorPolicy.
        behind: regions that home's retention does not wait for.
        streams: requests in flight.
        sign_keys: files of private keys that sign shortcuts.
        trusted_keys: a file of keys that must have signed what is built on; None trusts the bucket.
    """

    regions: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ("anchors", "composites", "retention", "janitor")
    every_s: float = 30.0
    rounds_max: int | None = None
    delete: bool = False
    keep_versions: int = 256
    grace_s: float = 6 * 3600.0
    rollout_keep_versions: int = 64
    join_seconds_max: float = 60.0
    anchor_multiple: int = 64
    orphan_grace_s: float = 3600.0
    abandoned_s: float = 7 * 86400.0
    behind: tuple[str, ...] = ()
    streams: int = 8
    sign_keys: tuple[str, ...] = ()
    trusted_keys: str | None = None

    def __post_init__(self) -> None:
        known = ("anchors", "composites", "retention", "janitor")
        odd = [name for name in self.tasks if name not in known]
        require(not odd and bool(self.tasks), "tasks", self.tasks, f"some of {', '.join(known)}")
        _positive(self, "every_s")
        if self.rounds_max is not None:
            _whole(self, "rounds_max", 1, 1 << 53)
        _whole(self, "streams", 1, 256)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker's part in one run.

    Args:
        run: the run's name.
        home: which of `regions` commits versions.
        regions: every bucket that holds the run.
        redis_url: without a password in it; empty for workers that do without (stager, replicate).
        run_dir: folder for events, final states and the stop file; made when absent.
        redis_user: its user there (coordination/ACL.md); None is the server's default user.
        redis_password_env: name of the environment variable with the password, if there is one.
        checkpoint: a local Hugging Face folder of some version; None: everything from the bucket.
        seed: of prompts and sampling.
        threads: for torch.
        metrics_port, metrics_host: where metrics are served (docs/metrics.md); None: nowhere.
        trainer, actor, stager, replicate, maintenance: the part; a process needs one of them.
    """

    run: str
    home: str
    regions: tuple[RegionConfig, ...]
    redis_url: str
    run_dir: str
    redis_user: str | None = None
    redis_password_env: str | None = None
    checkpoint: str | None = None
    seed: int = 0
    threads: int = 1
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    trainer: TrainerConfig | None = None
    actor: ActorConfig | None = None
    stager: StagerConfig | None = None
    replicate: ReplicateConfig | None = None
    maintenance: MaintenanceConfig | None = None

    def __post_init__(self) -> None:
        check_name(self.run, "run name")
        names = [region.name for region in self.regions]
        require(len(set(names)) == len(names), "regions", names, "each name once")
        require(self.home in names, "home", self.home, f"one of {names}")
        for what, part in (("actor", self.actor), ("stager", self.stager)):
            if part is not None:
                require(part.region in names, f"{what}.region", part.region, f"one of {names}")
        if self.maintenance is not None:
            tended = (*self.maintenance.regions, *self.maintenance.behind)
            odd = [name for name in tended if name not in names]
            require(not odd, "maintenance.regions", tended, f"some of {names}")
        if self.trainer is not None or self.actor is not None:
            require(bool(self.redis_url), "redis_url", self.redis_url, "trainer and actor need it")
        if self.metrics_port is not None:
            _whole(self, "metrics_port", 0, 65535)
        _whole(self, "seed", 0, (1 << 53) - 1)
        _whole(self, "threads", 1, 1024)
        if self.redis_user is not None:
            check_name(self.redis_user, "redis_user")
            named = self.redis_password_env is not None
            require(named, "redis_user", self.redis_user, "name its redis_password_env too")
        require(
            "@" not in self.redis_url,
            "redis_url",
            "(hidden)",
            "no credentials in the file: name their variable in redis_password_env",
        )

    def region(self, name: str) -> RegionConfig:
        """The region of that name."""
        return next(region for region in self.regions if region.name == name)


def load_config(path: Path) -> WorkerConfig:
    """Read a worker's file; InvalidInputError(setting) names what is wrong with it."""
    try:
        text = path.read_bytes()
    except OSError as err:
        raise InvalidInputError(
            f"cannot read the worker's file {path}: {err.strerror}", kind=Kind.SETTING
        ) from err
    return parse_config(text, what=str(path))


def parse_config(text: bytes, *, what: str) -> WorkerConfig:
    """Read the JSON of a worker's file."""
    if len(text) > MAX_CONFIG_BYTES:
        raise InvalidInputError(f"{what} has {len(text)} bytes", kind=Kind.SETTING)
    try:
        document = json.loads(text)
    except ValueError as err:
        raise InvalidInputError(f"{what} is not JSON: {err}", kind=Kind.SETTING) from err
    return _read_record(WorkerConfig, document, what)


def _read_record(cls: type[_T], document: Any, where: str) -> _T:
    assert is_dataclass(cls)
    if not isinstance(document, dict):
        raise _refuse(where, "is not an object")
    known = {field.name: field for field in fields(cls)}
    required = {
        name
        for name, field in known.items()
        if field.default is MISSING and field.default_factory is MISSING
    }
    odd = sorted((set(document) - set(known)) | (required - set(document)))
    if odd:
        raise _refuse(where, f"has missing or unknown fields: {', '.join(odd[:5])}")
    hints = get_type_hints(cls)
    values = {
        name: _read_value(hints[name], value, f"{where}: {name}")
        for name, value in document.items()
    }
    return cls(**values)


def _read_value(hint: Any, value: Any, where: str) -> Any:
    if get_origin(hint) in (types.UnionType, Union):
        if value is None:
            return None
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise _refuse(where, "is not a list")
        item = get_args(hint)[0]
        return tuple(_read_value(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if isinstance(hint, type) and is_dataclass(hint):
        return _read_record(hint, value, where)
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if type(value) is not hint or hint is float:  # a bool is no int
        raise _refuse(where, f"is {value!r:.40}, not {hint.__name__}")
    if value == "" and not where.endswith(": redis_url"):  # as a path it would be this folder
        raise _refuse(where, "is empty")
    return value


def _refuse(where: str, what: str) -> InvalidInputError:
    return InvalidInputError(f"{where} {what}", kind=Kind.SETTING)


def _whole(record: object, name: str, low: int, high: int) -> None:
    value = getattr(record, name)
    require(type(value) is int and low <= value <= high, name, value, f"{low} to {high}")


def _positive(record: object, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        require(math.isfinite(value) and value > 0, name, value, "above 0")
