"""An engine that fills its device with cache leaves no room to change weights: room is kept aside.

vLLM gives the cache all memory that is free when it has loaded its model. So the backend takes its
scratch memory before that, holds it, and lets go of it only while weights are written. torch's
allocator then has blocks of both its pools to give: those up to 1 MiB, of small pieces, come from
one pool, larger ones from the other, and neither gives to the other.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger(__name__)
SMALL_BLOCK_BYTES = 1 << 20
SMALL_BLOCKS = 16
"""A piece all of whose temporaries are small has 2^17 elements at most, and needs 12 MiB."""


class Scratch:
    """Memory kept aside on a device; on the host, which is shared anyway, none is.

    Args:
        size_bytes: how much; at most so much is used for temporaries.

    Raises what torch raises when there is not so much at the start.
    """

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self._device = device
        self._size_bytes = 0 if device.type == "cpu" else size_bytes
        self._kept: list[torch.Tensor] = []
        self._take()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """While inside, the memory is the allocator's to give.

        If somebody else has it afterwards, what was done inside has succeeded all the same: it is
        taken back after the next time.
        """
        self._kept.clear()
        try:
            yield
        finally:
            try:
                self._take()
            except torch.OutOfMemoryError as err:
                _log.warning("scratch memory is not kept aside until the next update: %s", err)

    def _take(self) -> None:
        small_bytes = min(SMALL_BLOCKS * SMALL_BLOCK_BYTES, self._size_bytes // 4)
        blocks = [SMALL_BLOCK_BYTES] * (small_bytes // SMALL_BLOCK_BYTES)
        blocks.append(self._size_bytes - sum(blocks))
        taken = [self._block(size) for size in blocks if size]  # all of it, or nothing
        self._kept = taken

    def _block(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
