"""After loading vLLM packs, frees and derives weights: a trace must know, or it trusts stale ones.

The loader trace of a vLLM model, with what the engine itself says about its weights: which are
kept in another form than the loader's, and which others are computed from once after loading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from deltastore.adapters.loader_trace import LoaderTrace, trace_loader

if TYPE_CHECKING:
    from deltastore.format.layout import Layout

DERIVED = "attention keeps something that is computed from it"


def trace_engine(model: torch.nn.Module, layout: Layout) -> LoaderTrace:
    """The trace of a loaded vLLM model; raises what `trace_loader` raises."""
    sources = {id(source) for layer in model.modules() for source in derives_from(layer, model)}
    derived = {
        name: DERIVED
        for name, module in model.named_modules(remove_duplicate=False)
        if id(module) in sources
    }
    return trace_loader(
        model,
        model.load_weights,  # type: ignore[arg-type]
        layout,
        forms=loader_forms(model),
        derived=derived,
        computed=computed_parameters(model),
    )


def loader_forms(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters that are kept in another form after loading: names -> as the loader knows them.

    The tensors are on the meta device and have the parameters' own loaders.
    """
    meta = torch.device("meta")
    forms: dict[str, torch.Tensor] = {}
    for name, layer in model.named_modules():
        recorded, _ = get_layerwise_info(layer).restore_metadata
        for key, form in recorded.items():
            live = layer._parameters.get(key)
            if live is not None and not live.is_meta and not _same_form(live, form):
                forms[f"{name}.{key}" if name else key] = loader_form(layer, form, meta)
    return forms


def loader_form(
    layer: torch.nn.Module, recorded: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """A new tensor as vLLM made it before loading, with its loader; elements are arbitrary."""
    with device:
        made: torch.Tensor = materialize_meta_tensor(recorded)
    return restore_layer_refs(made, layer)  # type: ignore[no-any-return]


def derives_from(layer: torch.nn.Module, model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules from whose weights a layer computes its own after loading.

    Written in place they would leave those stale; a reload has the layer compute them again.
    """
    if isinstance(layer, MLAAttention):
        return [layer.kv_b_proj]
    sinks = getattr(getattr(layer, "impl", None), "_sinks_source", None)
    if sinks is None or sinks.dtype == torch.float32:
        return []
    return [m for m in model.modules() if any(p is sinks for p in m._parameters.values())]


def computed_parameters(model: torch.nn.Module) -> frozenset[str]:
    """Runtime names of parameters that attention registers for what it computes."""
    return frozenset(
        f"{name}.{key}"
        for name, layer in model.named_modules()
        if isinstance(layer, MLAAttention)
        for key in layer._parameters
        if key not in get_layerwise_info(layer).restore_metadata[0]
    )


def _same_form(live: torch.Tensor, form: torch.Tensor) -> bool:
    return live.shape == form.shape and live.dtype == form.dtype and live.stride() == form.stride()
