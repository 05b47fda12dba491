"""An engine that fills its device with cache leaves no room to change weights: room is kept aside.

vLLM gives the cache all memory that is free when it has loaded its model. So the backend takes its
scratch memory before that, holds it, and lets go of it only while weights are written: torch's
allocator hands the same memory to the temporaries, and back.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class Scratch:
    """Memory kept aside on a device; on the host, which is shared anyway, none is.

    Args:
        size_bytes: how much; at most so much is used for temporaries.
    """

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self._device = device
        self.size_bytes = 0 if device.type == "cpu" else size_bytes
        self._kept: torch.Tensor | None = None
        self._take()

    @property
    def held_bytes(self) -> int:
        """Bytes that are kept aside now."""
        return 0 if self._kept is None else self._kept.numel()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """While inside, the memory is the allocator's to give."""
        self._kept = None
        try:
            yield
        finally:
            self._take()

    def free(self) -> None:
        """Let go of it for good."""
        self._kept, self.size_bytes = None, 0

    def _take(self) -> None:
        if self.size_bytes:
            self._kept = torch.empty(self.size_bytes, dtype=torch.uint8, device=self._device)
