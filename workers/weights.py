"""Weights of an unknown version serve answers nobody can trace: a joiner proves what it holds.

A joiner with a local checkpoint computes the fingerprint of the weights as the engine holds them
and looks which version of the run that is; from there it follows by deltas. One without a
checkpoint, or with a foreign one, rebuilds HEAD from its region's bucket. Either way it ends at a
known version, proved over every live weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from deltastore.adapters.torch_state import ModuleTarget
from deltastore.errors import IntegrityError, Kind
from deltastore.format.box import MAX_BOX_ELEMENTS, Box
from deltastore.format.layout import BitState
from deltastore.pipeline.applier import write_state
from deltastore.pipeline.history import locate
from deltastore.pipeline.replay import JoinReport, replay
from deltastore.repository.fetch import load_manifest
from deltastore.repository.full import download_files
from deltastore.repository.resolve import find_head, list_versions
from workers.causal_lm import empty_model, load_model

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.clock import Clock
    from deltastore.format.signing import TrustedKeys
    from deltastore.pipeline.protocols import WeightTarget
    from deltastore.repository.points import ActiveVersion
    from deltastore.repository.run import Run

STREAMS = 8


@dataclass(frozen=True, slots=True, eq=False)
class LiveWeights:
    """A model whose weights are at a known version.

    Args:
        model: a transformers module in float32.
        target: its weights as places that deltas are written to.
        active: the version they are at.
        folder: with config.json and the tokenizer's files.
        report: from what the version was reached.
    """

    model: Any
    target: ModuleTarget
    active: ActiveVersion
    folder: Path
    report: JoinReport

    def moved(self, active: ActiveVersion, report: JoinReport) -> LiveWeights:
        """The same model after its weights were brought to `active`."""
        return replace(self, active=active, report=report)


def join(
    run: Run,
    *,
    checkpoint: Path | None,
    scratch: Path,
    clock: Clock,
    trusted: TrustedKeys | None = None,
) -> LiveWeights:
    """Make a model whose weights are at a version of `run`.

    Args:
        checkpoint: a local folder to start from, if there is one.
        scratch: where config and tokenizer files of the run go when there is none.
        trusted: keys that must have signed versions and shortcuts; None trusts the bucket.
    """
    if checkpoint is None:
        folder = _fetch_small_files(run, scratch)
        model = empty_model(folder)
        target = ModuleTarget(model, run.layout)
        active, report = rebuild(run, target, clock=clock, trusted=trusted)
        return LiveWeights(model, target, active, folder, report)
    started_s = clock.monotonic_s()
    model = load_model(checkpoint)
    target = ModuleTarget(model, run.layout)
    newest = find_head(run)
    found = locate(run, target.fingerprint(), newest=newest, streams=STREAMS, trusted=trusted)
    if found is None:
        found, report = rebuild(run, target, clock=clock, trusted=trusted)
    else:
        seconds = clock.monotonic_s() - started_s
        report = JoinReport(f"checkpoint v{found.version}", 0, 0, seconds)
    return LiveWeights(model, target, found, checkpoint, report)


def rebuild(
    run: Run, target: WeightTarget, *, clock: Clock, trusted: TrustedKeys | None = None
) -> tuple[ActiveVersion, JoinReport]:
    """Write HEAD, as the bucket has it, over all of `target`, and prove every live weight."""
    replayed = replay(run, clock=clock, streams=STREAMS, trusted=trusted)
    write_state(target, replayed.state)
    active = replayed.held.point
    require_at(target, active, run=run.name)
    return active, replayed.report


def read_whole(target: WeightTarget) -> BitState:
    """The live weights as a state of their own."""
    state = BitState.zeros(target.layout)
    for position, bits in enumerate(state.arrays):
        for low in range(0, bits.size, MAX_BOX_ELEMENTS):
            high = min(low + MAX_BOX_ELEMENTS, bits.size)
            bits[low:high] = target.gather(position, Box.run(low, high - low), None)
    return state


def require_at(target: WeightTarget, active: ActiveVersion, *, run: str) -> None:
    """Raise IntegrityError(fingerprint) unless every live weight is at `active`."""
    got = target.fingerprint()
    if got != active.fingerprint:
        raise IntegrityError(
            f"the live weights are {got}, version {active.version} is {active.fingerprint}",
            kind=Kind.FINGERPRINT,
            run=run,
            version=active.version,
            hint="restart this worker without a local checkpoint",
        )


def _fetch_small_files(run: Run, scratch: Path) -> Path:
    first = load_manifest(run, min(list_versions(run), default=0))
    folder = scratch / f"files-v{first.core.version}"
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.iterdir():
        stale.unlink()
    download_files(run, first, folder, weights=False, streams=STREAMS)
    return folder
