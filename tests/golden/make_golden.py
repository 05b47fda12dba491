"""Writes the golden segments of format version 1: `python -m tests.golden.make_golden`.

Provenance: run once, when the format was frozen. It never overwrites a file: golden bytes are
what readers of all later versions are held to, whatever writers do by then.

Base patterns of element i of every tensor are (i x 2654435761 >> 7) mod 2^b, so no states need to
be stored; a case holds the decoded blocks, and SHA-256 of every tensor's bits after them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deltastore.chain.apply import apply_blocks
from deltastore.chain.diff import dense_block, diff_box, diff_tensor
from deltastore.format.block import Block, ValueKind
from deltastore.format.box import Box
from deltastore.format.dtypes import Bits, DType
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.segment import SegmentIdentity, encode_segment, segment_encodings

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parent / "v1"


def base_bits(elements: int, dtype: np.dtype) -> Bits:
    """The patterns every golden case starts from."""
    mixed = np.arange(elements, dtype=np.uint64) * np.uint64(2654435761) >> np.uint64(7)
    return mixed.astype(dtype)


def base_state(layout: Layout) -> BitState:
    """A state of such patterns."""
    return BitState(layout, [base_bits(s.elements, s.dtype.bits_dtype) for s in layout.tensors])


def stepped(layout: Layout, where: list[int], steps: list[int]) -> list[Block]:
    """Blocks of a one-tensor layout with those steps."""
    base = base_state(layout).arrays[0]
    new = base.copy()
    top = 1 << (base.itemsize * 8)
    new[where] += np.array([s % top for s in steps], base.dtype)
    return list(diff_tensor(layout, 0, base, new))


def absolute(block: Block, layout: Layout) -> Block:
    """The same block with patterns in place of steps."""
    base = base_state(layout).arrays[block.tensor]
    values = base[block.indices] + block.values
    change = block.fingerprint_change
    return Block(block.tensor, block.box, ValueKind.BITS, block.indices, values, change)


def cases() -> Iterator[tuple[str, Layout, list[Block], set[str]]]:
    """Name, layout, blocks, and the encodings the segment must have."""
    where = np.cumsum([1 + i * i * 7 % 19 for i in range(27)]).tolist()
    for dtype in DType:
        width = dtype.element_bits
        limits = [1, -1, 2, -2, 3, (1 << (width - 1)) - 1, -(1 << (width - 1))]
        layout = Layout.build([TensorEntry("t", dtype, (300 // dtype.elements_per_item,))])
        blocks = stepped(layout, where, (limits * 5)[: len(where)])
        yield f"ulp-{dtype.value.lower()}", layout, blocks, {"ulp", "rice"}
    for dtype in (DType.U8, DType.BF16, DType.F32, DType.F64):
        layout = Layout.build([TensorEntry("t", dtype, (300,))])
        blocks = [absolute(b, layout) for b in stepped(layout, where, [5] * len(where))]
        yield f"bits-{dtype.element_bits}", layout, blocks, {"bits", "rice"}
        bits = base_bits(300, dtype.bits_dtype)
        dense = dense_block(layout, 0, Box.run(0, 300), bits[::-1].copy(), bits)
        yield f"dense-{dtype.element_bits}", layout, [dense], {"dense"}
    layout = Layout.build([TensorEntry("t", DType.BF16, (400_000,))])
    rows = [r + c for r in (10, 70_000, 70_300, 399_000) for c in range(0, 256, 2)]
    blocks = stepped(layout, rows, [1, -1, 1, 4] * (len(rows) // 4))
    yield "gap16-wide", layout, blocks, {"ulp", "gap16"}
    gaps = [0, 127, 120, 16383, 3, 100, 16384, 90, 2097150, 64, 127, 110]
    where = (np.cumsum(np.array(gaps) + 1) - 1).tolist()
    layout = Layout.build([TensorEntry("t", DType.BF16, (4 << 20,))])
    blocks = stepped(layout, where, [1] * len(where))
    yield "leb128", layout, blocks, {"ulp", "leb128"}
    yield "boxes", *boxed(), {"ulp", "rice"}
    layout = Layout.build([TensorEntry("s", DType.F32, ()), TensorEntry("t", DType.BF16, (9,))])
    yield "scalar", layout, stepped(layout, [0], [-1]), {"dense"}
    yield "empty", layout, [], set()
    layout = Layout.build([TensorEntry(f"t{i}", DType.U8, (300_000,)) for i in range(3)])
    blocks = []
    for t, bits in enumerate(base_state(layout).arrays):
        zero = np.zeros_like(bits)
        blocks.append(dense_block(layout, t, Box.run(0, 280_000), zero[:280_000], bits[:280_000]))
        new = bits.copy()
        new[280_000 + np.unique(np.arange(300) ** 2 * 7 % 19_997)] += np.uint8(1)
        tail = Box((280_000,), (20_000,), flat=True)
        blocks += [b for b in [diff_box(layout, t, tail, bits[280_000:], new[280_000:])] if b]
    yield "frames", layout, blocks, {"ulp", "rice", "dense"}


def boxed() -> tuple[Layout, list[Block]]:
    """The four boxes of a 2 x 2 sharded matrix, one of them unchanged."""
    layout = Layout.build([TensorEntry("m", DType.BF16, (20, 30))])
    base = base_state(layout).arrays[0].reshape(20, 30)
    new = base.copy()
    new[3:17:4, 2:13:3] += np.uint16(2)
    new[12, 20:] -= np.uint16(1)
    blocks = []
    for row in (0, 10):
        for column in (0, 15):
            box = Box((row, column), (10, 15), flat=False)
            part = (slice(row, row + 10), slice(column, column + 15))
            block = diff_box(layout, 0, box, base[part], new[part])
            blocks += [block] if block else []
    return layout, blocks


def main() -> None:
    """Write every case that is not there."""
    FOLDER.mkdir(exist_ok=True)
    for name, layout, blocks, encodings in cases():
        data = encode_segment(layout, SegmentIdentity(layout.digest, 6, 7), blocks)
        if segment_encodings(data) != encodings:
            raise SystemExit(f"{name}: {segment_encodings(data)}, not {encodings}")
        state = base_state(layout)
        apply_blocks(state, blocks)
        document = {
            "layout": layout.canonical_bytes().decode(),
            "encodings": sorted(encodings),
            "blocks": [
                {
                    "tensor": b.tensor,
                    "start": b.box.start,
                    "shape": b.box.shape,
                    "boxed": not b.box.flat,
                    "kind": b.kind.value,
                    "indices": None if b.indices is None else b.indices.tolist(),
                    "values_sha256": hashlib.sha256(b.values.tobytes()).hexdigest(),
                    "change": str(b.fingerprint_change),
                }
                for b in blocks
            ],
            "after_sha256": [hashlib.sha256(a.tobytes()).hexdigest() for a in state.arrays],
        }
        segment = FOLDER / f"{name}.seg"
        if not segment.exists():
            segment.write_bytes(data)
            text = json.dumps(document, indent=None, separators=(",", ":"))
            segment.with_suffix(".json").write_text(text + "\n")


if __name__ == "__main__":
    main()
