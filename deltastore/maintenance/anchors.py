"""Anchors by count are too many for small deltas, too few for large ones: here by what they spare.

An anchor is a version's whole state as a Hugging Face checkpoint: the full layout, whatever has
changed; any tool that reads safetensors loads it. It is made in each region from that region's own
bucket, so that no dense state crosses a WAN, and committed by one create-only put
(`shortcut_commit.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.chain.lattice import BLOCK_VERSIONS
from deltastore.config import require
from deltastore.errors import IntegrityError, Kind
from deltastore.events import AnchorWritten, discard
from deltastore.format.fingerprint import ZERO
from deltastore.format.mixing import fingerprint_tensors
from deltastore.format.shortcut import AnchorCore, AnchorManifest
from deltastore.format.signing import unsigned
from deltastore.ids import new_token
from deltastore.maintenance.settings import MaintenanceSettings
from deltastore.maintenance.shortcut_commit import commit_shortcut, is_there
from deltastore.repository.fullversion import upload_full
from deltastore.repository.rebuild import replay
from deltastore.repository.resolve import find_head
from deltastore.repository.shortcuts import point_of
from deltastore.repository.template import read_template
from deltastore.repository.way import survey

if TYPE_CHECKING:
    from deltastore.clock import Clock
    from deltastore.events import EventSink
    from deltastore.format.signing import Signer, TrustedKeys
    from deltastore.repository.rebuild import Held
    from deltastore.repository.run import Run


@dataclass(frozen=True, slots=True)
class ChainFacts:
    """What a joiner would fetch after the newest whole state.

    Args:
        head: the newest version.
        start: the newest version that is there as a whole state.
        candidate: the newest version at which an anchor may stand.
        anchor_bytes: of a whole state.
        chain_bytes, chain_links: of the cheapest way from start to candidate.
    """

    head: int
    start: int
    candidate: int
    anchor_bytes: int
    chain_bytes: int
    chain_links: int


@dataclass(frozen=True, slots=True)
class AnchorPolicy:
    """When an anchor is worth its bytes.

    Args:
        join_seconds_max: what the chain after the last whole state may cost a joiner.
        share_of_anchor_bytes_max: what it may measure, as a share of a whole state.
        bytes_per_s, request_s: of a joiner's line.
        multiple: anchors stand on multiples of it.
    """

    join_seconds_max: float = 60.0  # about what loading the engine takes anyway
    share_of_anchor_bytes_max: float = 0.5  # then a new anchor pays off at the second joiner
    bytes_per_s: float = 125e6  # 1 Gbps
    request_s: float = 0.05
    multiple: int = BLOCK_VERSIONS

    def __post_init__(self) -> None:
        require(self.join_seconds_max >= 0, "join_seconds_max", self.join_seconds_max, ">= 0")
        share = self.share_of_anchor_bytes_max
        require(share >= 0, "share_of_anchor_bytes_max", share, ">= 0")
        require(self.bytes_per_s > 0, "bytes_per_s", self.bytes_per_s, "positive")
        require(self.request_s >= 0, "request_s", self.request_s, "not negative")
        require(self.multiple >= 1, "multiple", self.multiple, "at least 1")

    def due(self, chain: ChainFacts) -> int | None:
        """The version at which an anchor should be made now, or None."""
        if chain.candidate <= chain.start:
            return None
        seconds = chain.chain_links * self.request_s + chain.chain_bytes / self.bytes_per_s
        heavy = chain.chain_bytes > self.share_of_anchor_bytes_max * chain.anchor_bytes
        return chain.candidate if heavy or seconds > self.join_seconds_max else None


def chain_facts(
    run: Run, policy: AnchorPolicy, *, streams: int, trusted: TrustedKeys | None = None
) -> ChainFacts:
    """Look at a region's chain as a joiner would."""
    head = find_head(run)
    found = survey(run, head, streams=streams, trusted=trusted)
    start = max(v for v in found.whole_states() if v <= head)
    candidate = head - head % policy.multiple
    chain_bytes = chain_links = 0
    if candidate > start:
        way = found.choose(run, base=start, version=candidate, starts=False, trusted=trusted)
        chain_bytes, chain_links = way.size_bytes, len(way.steps)
    return ChainFacts(head, start, candidate, run.dense_bytes, chain_bytes, chain_links)


def run_anchors(
    run: Run,
    policy: AnchorPolicy,
    *,
    clock: Clock,
    settings: MaintenanceSettings | None = None,
    sink: EventSink = discard,
    signer: Signer = unsigned,
    trusted: TrustedKeys | None = None,
) -> AnchorManifest | None:
    """Make an anchor if one is due; None when none is, or another worker was faster."""
    settings = settings or MaintenanceSettings()
    facts = chain_facts(run, policy, streams=settings.streams, trusted=trusted)
    version = policy.due(facts)
    if version is None:
        return None
    return write_anchor(
        run,
        version,
        clock=clock,
        settings=settings,
        sink=sink,
        signer=signer,
        trusted=trusted,
        chain_bytes=facts.chain_bytes,
    )


def write_anchor(
    run: Run,
    version: int,
    *,
    clock: Clock,
    settings: MaintenanceSettings | None = None,
    sink: EventSink = discard,
    signer: Signer = unsigned,
    trusted: TrustedKeys | None = None,
    held: Held | None = None,
    chain_bytes: int = 0,
) -> AnchorManifest | None:
    """Make the anchor of a version; None when there is one already.

    Args:
        held: a state to build on; it is changed in place.
        chain_bytes: for the event: what the anchor spares a joiner.

    Memory: the state and two shards. Raises what `replay` raises, and StorageError.
    """
    settings = settings or MaintenanceSettings()
    key = run.keys.anchor(version)
    if is_there(run, key):
        return None
    replayed = replay(
        run, version, clock=clock, held=held, streams=settings.streams, trusted=trusted
    )
    target = point_of(replayed.manifest)
    prints = tuple(fingerprint_tensors(replayed.state))
    if sum(prints, ZERO) != target.fingerprint:
        raise IntegrityError(
            f"the replayed state is not that of version {version}",
            kind=Kind.FINGERPRINT,
            run=run.name,
            version=version,
            hint="run `deltastore verify --deep`",
        )
    started_s = clock.monotonic_s()
    attempt = new_token()
    files = upload_full(
        run,
        version,
        replayed.state,
        read_template(run),
        attempt=attempt,
        shard_max_bytes=settings.shard_max_bytes,
    )
    core = AnchorCore(
        run=run.name,
        run_id=run.record.run_id,
        layout_digest=run.layout.digest,
        target=target,
        files=files,
        tensor_fingerprints=prints,
        attempt=attempt,
        created_ms=int(clock.utc_s() * 1000),
    )
    manifest = AnchorManifest(core, signer(core.canonical_bytes()))
    won = commit_shortcut(
        run,
        key,
        manifest.to_bytes(),
        [file.key for file in files if file.key is not None],
        started_s=started_s,
        deadline_s=settings.commit_deadline_s,
        clock=clock,
    )
    if not won:
        return None
    sink(AnchorWritten(version, core.size_bytes, chain_bytes, clock.monotonic_s() - started_s))
    return manifest
