"""A CPU linear layer that packed its weight away serves the old one for ever: packing is kept off.

On CPUs vLLM packs linear weights into a closure while it loads them and empties the parameter: an
update fails, or, for an embedding that shares its weight with the head, succeeds with the right
bytes and the wrong outputs. Only the loading decides, so packing is off only while a model that
follows a run is loaded, or reloaded; other models of the process keep their packed layers.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def on_cpu() -> bool:
    """Whether this process's engines run on the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


@contextmanager
def unpacked_weights() -> Iterator[None]:
    """While inside, vLLM packs no linear weight. Does nothing on accelerators."""
    if not on_cpu():
        yield
        return
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    before = _custom_ops._supports_onednn, utils.check_cpu_sgl_kernel
    _custom_ops._supports_onednn, utils.check_cpu_sgl_kernel = False, _no_kernel
    try:
        yield
    finally:
        _custom_ops._supports_onednn, utils.check_cpu_sgl_kernel = before


def _no_kernel(*_shape: Any) -> bool:
    return False
