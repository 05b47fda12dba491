"""Reloading one tensor of a fused weight leaves its siblings uninitialised, and no error says so.

vLLM's layerwise reload brings checkpoint tensors into modules whose weights are kept in another
form, in place. Here it is used for closures only: all tensors of the modules in question at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def reload_tensors(
    model: torch.nn.Module, model_config: Any, named: Sequence[tuple[str, torch.Tensor]]
) -> None:
    """Load exactly these checkpoint tensors, in place; addresses of all parameters stay.

    Args:
        named: all tensors of one or more closures, by checkpoint names, in layout order. A module
            of which a tensor is missing would keep uninitialised memory in its place.
    """
    with torch.no_grad():
        initialize_layerwise_reload(model)
        try:
            model.load_weights(iter(named))  # type: ignore[operator]
        finally:
            finalize_layerwise_reload(model, model_config)
