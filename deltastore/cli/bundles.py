"""A delta applied to the wrong folder gives a model that nobody trained: a bundle names its base.

`diff` and `apply` work on plain checkpoint folders, without a run. A bundle says the layout and the
fingerprints of both ends; `apply` proves the first before it changes a bit and the last before it
writes a file.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from deltastore.adapters.safetensors_dir import (
    DirectorySource,
    checkpoint_layout,
    load_state,
    scan_checkpoint,
    write_state,
)
from deltastore.chain.apply import apply_blocks
from deltastore.chain.diff import diff_run
from deltastore.cli.files import new_file, refuse_existing, require_regular, typed_errors
from deltastore.cli.output import Document, Output, share_text, size_text
from deltastore.cli.progress import Meter, progress
from deltastore.clock import SystemClock
from deltastore.errors import IntegrityError, Kind
from deltastore.format.bundle import Bundle
from deltastore.format.layout import require_same_layout
from deltastore.format.mixing import fingerprint_state
from deltastore.format.segment import estimated_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deltastore.format.block import Block
    from deltastore.format.layout import BitState
    from deltastore.pipeline.protocols import WeightSource

SEGMENT_BYTES = 32 << 20  # as the largest segment of a run: bounds what is decoded at once


def diff_checkpoints(old: Path, new: Path, out: Path, output: Output) -> None:
    """Write the bundle that turns checkpoint `old` into checkpoint `new`."""
    clock = SystemClock()
    began_s = clock.monotonic_s()
    refuse_existing(out)
    checkpoint = scan_checkpoint(old)
    source = DirectorySource(scan_checkpoint(new))
    layout = checkpoint_layout(checkpoint)
    state = load_state(checkpoint, layout)
    with progress("diff", total=layout.size_bytes) as meter:
        groups = _groups(_changes(state, source, meter))
        bundle = Bundle.of(layout, fingerprint_state(state), groups)
    body = bundle.to_bytes()
    with new_file(out) as handle:
        handle.write(body)
    document = {
        "out": str(out),
        "size_bytes": len(body),
        "nnz": bundle.nnz,
        "density": bundle.nnz / layout.elements if layout.elements else 0.0,
        "elements": layout.elements,
        "dense_bytes": layout.size_bytes,
        **_ends(bundle),
        "seconds": round(clock.monotonic_s() - began_s, 3),
    }
    output.emit(
        document,
        lambda: (
            f"{out}: {bundle.nnz} changes ({share_text(bundle.nnz, layout.elements)}) in"
            f" {size_text(len(body))}, {share_text(len(body), layout.size_bytes)} of the"
            f" {size_text(layout.size_bytes)} that a dense copy takes"
        ),
    )


def apply_bundle(old: Path, path: Path, out: Path, output: Output) -> None:
    """Write the checkpoint that checkpoint `old` and the bundle at `path` make."""
    clock = SystemClock()
    began_s = clock.monotonic_s()
    refuse_existing(out)
    with typed_errors(path):
        require_regular(path)
        with path.open("rb") as file:
            bundle = Bundle.read(file, os.fstat(file.fileno()).st_size)
    checkpoint = scan_checkpoint(old)
    layout = checkpoint_layout(checkpoint)
    require_same_layout(layout.digest, bundle.layout_digest, what=f"bundle {path}")
    state = load_state(checkpoint, layout)
    held = fingerprint_state(state)
    if held != bundle.before:
        raise IntegrityError(
            f"bundle {path} starts from state {bundle.before}, {old} holds {held}",
            kind=Kind.WRONG_BASE,
            hint="apply it to the checkpoint it was made from",
        )
    with progress("apply"):
        apply_blocks(state, _checked_blocks(bundle, state))
    reached = fingerprint_state(state)
    if reached != bundle.after:
        raise IntegrityError(
            f"bundle {path} leads to state {reached}, not to {bundle.after}",
            kind=Kind.FINGERPRINT,
            hint="make the bundle again",
        )
    with progress(f"write {out}"):
        write_state(state, out, template=checkpoint)
    document = {
        "out": str(out),
        "nnz": bundle.nnz,
        **_ends(bundle),
        "seconds": round(clock.monotonic_s() - began_s, 3),
    }
    output.emit(document, lambda: f"{out}: {bundle.nnz} changes applied, proved by fingerprint")


def _ends(bundle: Bundle) -> Document:
    return {
        "layout_digest": bundle.layout_digest,
        "fingerprint_before": str(bundle.before),
        "fingerprint_after": str(bundle.after),
    }


def _changes(state: BitState, source: WeightSource, meter: Meter) -> Iterator[Block]:
    """What differs between the state and the source, run by run."""
    for box in source.boxes(state.layout):
        start, count = box.box.start[0], box.box.elements
        base = state.arrays[box.tensor][start : start + count]
        block = diff_run(state.layout, box.tensor, start, base, box.bits)
        if block is not None:
            yield block
        meter.advance(box.bits.nbytes)


def _groups(blocks: Iterator[Block]) -> Iterator[list[Block]]:
    """The blocks in groups, one per segment."""
    group: list[Block] = []
    group_bytes = 0
    for block in blocks:
        group.append(block)
        group_bytes += estimated_bytes(block)
        if group_bytes >= SEGMENT_BYTES:
            yield group
            group, group_bytes = [], 0
    if group:
        yield group


def _checked_blocks(bundle: Bundle, state: BitState) -> list[Block]:
    blocks = bundle.blocks(state.layout)
    found = sum(block.nnz for block in blocks)
    if found != bundle.nnz:
        raise IntegrityError(
            f"the bundle holds {found} changes, its core says {bundle.nnz}",
            kind=Kind.DIGEST,
            hint="fetch or make the bundle again",
        )
    return blocks
