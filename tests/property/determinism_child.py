"""Says the SHA-256 of segments that another process, or another day, must make the same."""

from __future__ import annotations

import hashlib
import sys

import numpy as np

from deltastore.chain.diff import diff_tensor
from deltastore.format.dtypes import DType
from deltastore.format.layout import Layout, TensorEntry
from deltastore.format.segment import SegmentIdentity, encode_segment

ELEMENTS = 1 << 16
_STEP_SHARE = np.uint64(((1 << 24) - 1) // 3)


def digests() -> list[str]:
    """Of a segment per dtype, of steps that zstd packs: spread, regular, everywhere, and in rows
    that repeat with gaps of their own.
    """
    found = []
    for dtype in (DType.BF16, DType.F32, DType.U8):
        layout = Layout.build(TensorEntry(f"t{i}", dtype, (ELEMENTS,)) for i in range(4))
        place = np.arange(ELEMENTS, dtype=np.uint64)
        mixed = place + np.uint64(1)
        for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
        base = (mixed % np.uint64(251)).astype(dtype.bits_dtype)
        steps = [
            np.where(mixed % np.uint64(3) == 0, (mixed >> np.uint64(40)) // _STEP_SHARE, 0),
            np.where(place % np.uint64(5) == 0, np.uint64(1), 0),
            np.full(ELEMENTS, 3, np.uint64),
            np.tile(mixed[: ELEMENTS >> 6] % np.uint64(64) == 0, 1 << 6).astype(np.uint64),
        ]
        blocks = [
            block
            for tensor, step in enumerate(steps)
            for block in diff_tensor(layout, tensor, base, base + step.astype(base.dtype))
        ]
        data = encode_segment(layout, SegmentIdentity(layout.digest, 0, 1), blocks)
        found.append(hashlib.sha256(data).hexdigest())
    return found


if __name__ == "__main__":
    sys.stdout.write("\n".join(digests()))
