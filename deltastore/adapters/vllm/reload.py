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
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

if TYPE_CHECKING:
    from collections.abc import Sequence


def loader_forms(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters that are kept in another form after loading: names -> as the loader knows them.

    For `trace_loader`. The tensors are on the meta device and have the loaders of the parameters.
    """
    forms: dict[str, torch.Tensor] = {}
    for name, layer in model.named_modules():
        parameters, _ = get_layerwise_info(layer).restore_metadata
        for key, form in parameters.items():
            live = layer._parameters.get(key)
            if live is None or live.is_meta or _same_form(live, form):
                continue
            forms[f"{name}.{key}" if name else key] = restore_layer_refs(_copy(form), layer)
    return forms


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


def _same_form(live: torch.Tensor, form: torch.Tensor) -> bool:
    return live.shape == form.shape and live.dtype == form.dtype and live.stride() == form.stride()


def _copy(form: torch.Tensor) -> torch.Tensor:
    """A meta tensor of its own with the class and the attributes of another."""
    made: torch.Tensor = form.data.clone()
    made.__class__ = form.__class__
    made.__dict__ = form.__dict__.copy()
    return made
