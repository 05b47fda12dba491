"""After loading vLLM packs, frees and derives weights: a trace must know, or it trusts stale ones.

The loader trace of a vLLM model, with what the engine itself says about its weights: which are
kept in another form than the loader's, and which others are computed from once after loading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from deltastore.adapters.loader_trace import LoaderTrace, trace_loader

if TYPE_CHECKING:
    from deltastore.format.layout import Layout


def trace_engine(model: torch.nn.Module, layout: Layout) -> LoaderTrace:
    """The trace of a loaded vLLM model; raises what `trace_loader` raises."""
    return trace_loader(
        model,
        model.load_weights,  # type: ignore[arg-type]
        layout,
        forms=loader_forms(model),
        derived=derived_from(model),
    )


def loader_forms(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters that are kept in another form after loading: names -> as the loader knows them.

    The tensors are on the meta device and have the parameters' own loaders.
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


def derived_from(model: torch.nn.Module) -> dict[str, str]:
    """Modules whose weights others are computed from after loading: names -> what.

    Written in place they would leave those others stale; a reload computes them again.
    """
    found: dict[int, str] = {}
    for layer in model.modules():
        if isinstance(layer, MLAAttention):
            found[id(layer.kv_b_proj)] = "attention keeps products of it"
    converted = {id(source) for source in map(_converted_sinks, model.modules()) if source}
    names: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in found:
            names[name] = found[id(module)]
        elif any(id(p) in converted for p in module._parameters.values() if p is not None):
            names[name] = "attention keeps a converted copy of it"
    return names


def _converted_sinks(layer: torch.nn.Module) -> Any:
    """The sinks of an attention layer whose implementation keeps them as FP32; else None."""
    source = getattr(getattr(layer, "impl", None), "_sinks_source", None)
    return source if source is not None and source.dtype != torch.float32 else None


def _same_form(live: torch.Tensor, form: torch.Tensor) -> bool:
    return live.shape == form.shape and live.dtype == form.dtype and live.stride() == form.stride()


def _copy(form: torch.Tensor) -> torch.Tensor:
    """A meta tensor of its own with the class and the attributes of another."""
    made: torch.Tensor = form.data.clone()
    made.__class__ = form.__class__
    made.__dict__ = form.__dict__.copy()
    return made
