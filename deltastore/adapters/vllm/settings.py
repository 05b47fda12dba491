"""A misspelled setting that is ignored follows the wrong run in silence: unknown ones are refused.

Settings travel in `additional_config["deltastore"]` of the engine, or in the `init_info` of
`init_weight_transfer_engine`, which wins. Nothing here imports torch or vllm.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltastore.config import FollowerSettings, require
from deltastore.errors import InvalidInputError, Kind
from deltastore.format.key_files import parse_trusted_keys
from deltastore.ids import check_name
from deltastore.pipeline.rank_target import SCRATCH_MAX_BYTES
from deltastore.storage.url import split_run_url

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltastore.format.signing import TrustedKeys

SECTION = "deltastore"
SHADOW_MAX_BYTES = 8 << 30
"""The spool is often in shared memory, and every rank of a host has its own."""
STAGERS = ("own", "shared")
SERVER_KEYS = frozenset(
    {
        "policy",
        "min_interval_s",
        "jitter_s",
        "poll_s",
        "drain_max_s",
        "pause_timeout_s",
        "hold_max_s",
        "events",
    }
)
"""Settings in the same section that are the API server's, not the workers'."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine follows a run.

    Args:
        run: URL of the run in this host's region, as for the `deltastore` command.
        endpoint, profile, region: of an S3 store; None leaves them to the AWS environment.
        region_name: what events and metrics call the bucket's region; None: as the run calls home.
        folder: where the host's stager and the ranks meet; None: see `spool_folder`.
        stager: "own" (rank 0 starts one when the host has none) or "shared" (somebody else does).
        engine: name of this engine on this host, for events and the spool; None: host and process.
        checkpoint: folder whose bytes the engine has loaded; None: the model's own.
        allow_dense: whether many weights may be reloaded rather than written in place.
        unused, unfilled: patterns of checkpoint tensors that the engine does not load, and of
            parameters that no checkpoint tensor fills.
        stage_max_bytes: of updates in the spool, when this engine starts the stager.
        scratch_max_bytes: of memory for temporaries on the parameters' device, kept aside from the
            start; old bits are kept on the host.
        shadow_max_bytes: of the copies of weights that are reloaded rather than written, of each
            rank, in the spool folder.
        full_check_every_versions: activations between proofs of all live weights.
        vote_timeout_s: how long a rank waits for the others before it takes itself out.
        stage_wait_s: how long an update waits for a version that is not staged yet.
        poll_min_s: the least time between looks for a new version, when this engine starts the
            stager.
        trusted_keys: lines of a file of trusted keys; without any the bucket is trusted.
    """

    run: str
    endpoint: str | None = None
    profile: str | None = None
    region: str | None = None
    region_name: str | None = None
    folder: str | None = None
    stager: str = "own"
    engine: str | None = None
    checkpoint: str | None = None
    allow_dense: bool = False
    unused: tuple[str, ...] = ()
    unfilled: tuple[str, ...] = ()
    stage_max_bytes: int = 2 << 30
    scratch_max_bytes: int = SCRATCH_MAX_BYTES
    shadow_max_bytes: int = SHADOW_MAX_BYTES
    full_check_every_versions: int = 64
    vote_timeout_s: float = 30.0
    stage_wait_s: float = 120.0
    poll_min_s: float = 1.0
    trusted_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        split_run_url(self.run)
        require(self.stager in STAGERS, "stager", self.stager, f"one of {', '.join(STAGERS)}")
        for name, what in ((self.engine, "engine"), (self.region_name, "region_name")):
            if name is not None:
                check_name(name, what)
        require(0 < self.vote_timeout_s <= 3600, "vote_timeout_s", self.vote_timeout_s, "to 3600")
        require(0 <= self.stage_wait_s <= 86400, "stage_wait_s", self.stage_wait_s, "to 86400")
        require(self.shadow_max_bytes >= 0, "shadow_max_bytes", self.shadow_max_bytes, "0 or more")
        _ = self.follower, self.trusted  # their own rules

    @property
    def follower(self) -> FollowerSettings:
        """The settings of staging and activation."""
        return FollowerSettings(
            stage_max_bytes=self.stage_max_bytes,
            scratch_max_bytes=self.scratch_max_bytes,
            full_check_every_versions=self.full_check_every_versions,
            poll_min_s=self.poll_min_s,
            poll_hinted_s=max(FollowerSettings().poll_hinted_s, self.poll_min_s),
        )

    @property
    def trusted(self) -> TrustedKeys | None:
        """The keys that must have signed what is followed; None trusts the bucket."""
        if not self.trusted_keys:
            return None
        return parse_trusted_keys("\n".join(self.trusted_keys), what="the setting trusted_keys")

    @property
    def engine_name(self) -> str:
        """The engine's name; the default is different in every process."""
        if self.engine is not None:
            return self.engine
        host = "".join(c if c.isalnum() or c in "-_" else "-" for c in socket.gethostname())
        return f"{host or 'host'}-{os.getpid()}"

    def spool_folder(self) -> Path:
        """The folder of the host's stager for this run; made for this user alone.

        Raises InvalidInputError(setting) when somebody else owns the default one.
        """
        if self.folder is not None:
            return Path(self.folder).absolute()
        parent = Path(tempfile.gettempdir()) / f"deltastore-{os.getuid()}"
        with suppress(FileExistsError):
            parent.mkdir(mode=0o700)
        found = parent.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise InvalidInputError(
                f"{parent} is not a folder of this user alone",
                kind=Kind.SETTING,
                hint="remove it, or set `folder` to a folder of your own on a local disk",
            )
        return parent / hashlib.sha256(self.run.encode()).hexdigest()[:16]


def parse_settings(section: Mapping[str, Any], init_info: Mapping[str, Any]) -> EngineSettings:
    """The settings of an engine; `init_info` wins over `section`.

    Raises InvalidInputError(setting, url, name) naming the setting that is missing, unknown, of
    the wrong type or out of range.
    """
    rows = {**section, **init_info}
    known = {field.name: field for field in fields(EngineSettings)}
    unknown = sorted(rows.keys() - known.keys() - SERVER_KEYS)
    if unknown:
        raise InvalidInputError(
            f"there is no setting {unknown[0]!r}",
            kind=Kind.SETTING,
            hint=f"known are {', '.join(sorted(known))}",
        )
    if "run" not in rows:
        raise InvalidInputError(
            "no run to follow is given",
            kind=Kind.SETTING,
            hint='--additional-config \'{"deltastore": {"run": "s3://bucket/prefix/run"}}\'',
        )
    values = {
        name: _typed(name, str(known[name].type), value)
        for name, value in rows.items()
        if name in known
    }
    return EngineSettings(**values)


def section_of(additional_config: object) -> Mapping[str, Any]:
    """This package's part of vLLM's additional configuration; empty when there is none.

    Raises InvalidInputError(setting) when it is not a mapping.
    """
    section = additional_config.get(SECTION, {}) if isinstance(additional_config, dict) else {}
    if not isinstance(section, dict):
        raise InvalidInputError(
            f"{SECTION!r} in the additional configuration is not an object",
            kind=Kind.SETTING,
            hint='{"deltastore": {"run": "s3://bucket/prefix/run"}}',
        )
    return section


def _typed(name: str, wanted: str, value: Any) -> Any:
    """`value` as the field's type; True is no number, a string no list."""
    if value is None and wanted.endswith("| None"):
        return None
    fits = False
    match wanted.split(" |")[0]:
        case "str":
            fits = isinstance(value, str) and bool(value)
        case "bool":
            fits = isinstance(value, bool)
        case "int":
            fits = isinstance(value, int) and not isinstance(value, bool)
        case "float":
            fits = isinstance(value, int | float) and not isinstance(value, bool)
            value = float(value) if fits else value
        case "tuple[str, ...]":
            fits = isinstance(value, list | tuple) and all(isinstance(part, str) for part in value)
            value = tuple(value) if fits else value
    require(fits, name, value, f"of type {wanted.replace('tuple[str, ...]', 'list of strings')}")
    return value
