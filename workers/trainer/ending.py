"""A run whose last weights nobody kept proves nothing: the trainer leaves them, bit for bit.

Writes its serving state as a safetensors file and a report of version, policy hash and the
fingerprint of the live weights, then waits, not for ever, until somebody says stop: actors that
still catch up may need what it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.errors import IntegrityError, Kind
from deltastore.format.checkpoint_file import build_header
from deltastore.format.layout import TensorEntry
from deltastore.repository.points import ActiveVersion
from workers.run_folder import TRAINER, FinalReport
from workers.weights import read_whole, require_at

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    from deltastore.clock import Clock
    from deltastore.format.layout import BitState
    from deltastore.format.manifest import VersionManifest
    from deltastore.pipeline.protocols import WeightTarget
    from workers.run_folder import RunFolder

POLL_S = 0.5


def leave_final_state(
    folder: RunFolder, target: WeightTarget, manifest: VersionManifest
) -> FinalReport:
    """Prove that the live weights are the final version, and write them and the report."""
    active = ActiveVersion.of(manifest)
    require_at(target, active, run=manifest.core.run)
    write_state_file(read_whole(target), folder.trainer_state)
    report = FinalReport.of(TRAINER, active, target.fingerprint())
    folder.report(folder.trainer_done, report)
    return report


def write_state_file(state: BitState, path: Path) -> None:
    """One safetensors file with every tensor of a state, under the layout's names."""
    tensors = state.layout.tensors
    header = build_header(TensorEntry(t.name, t.dtype, t.shape) for t in tensors)
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(header.raw)
        for stored in header.data_order():
            file.write(state[stored.name].tobytes())
        written = file.tell()
    if written != header.file_bytes:
        raise IntegrityError(
            f"{part} has {written} bytes, not {header.file_bytes}", kind=Kind.DIGEST
        )
    part.replace(path)


def wait_for_stop(
    folder: RunFolder, stopping: threading.Event, *, clock: Clock, timeout_s: float
) -> bool:
    """Wait until the stop file or a signal says stop; False when nobody did in time."""
    deadline_s = clock.monotonic_s() + timeout_s
    while clock.monotonic_s() < deadline_s:
        if folder.read_stop() is not None or clock.wait(stopping, POLL_S):
            return True
    return False
