"""Reloading one tensor of a fused weight leaves its siblings uninitialised, and no error says so.

Weights that the engine keeps in another form than the checkpoint's are brought up to date module
by module: the loader's form of all parameters of a closure is made, loaded, processed as after the
first load, and copied into the live parameters, which stay where they are.

vLLM's own layerwise reload does the same for all modules at once, but on CPUs it leaves experts
unpacked, it loses what a loader copies without a parameter's `weight_loader` (gpt-oss), and it
forgets buffers that were views of a weight before that was packed (Mamba). That a reload ends in
the bytes of the first load is therefore not taken on trust: `Reload.prove` shows it at start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from deltastore.adapters.torch_tensors import device_patterns, integer_view, torch_dtype
from deltastore.adapters.vllm.prepacking import on_cpu, unpacked_weights
from deltastore.adapters.vllm.tracing import derives_from, loader_form
from deltastore.errors import ApplyError, InvalidInputError, Kind
from deltastore.format.coverage import list_names

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from deltastore.adapters.loader_coverage import DenseGroup
    from deltastore.format.dtypes import Bits
    from deltastore.format.layout import Layout


class Reload:
    """Loads whole closures of tensors into the live modules.

    Args:
        model: as the engine has loaded it.
        model_config: vLLM's.
        groups: closures of the trace.
        layout: whose positions those name.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        model_config: Any,
        groups: Sequence[DenseGroup],
        layout: Layout,
    ) -> None:
        self._model = model
        self._dtype = model_config.dtype
        self._groups = tuple(groups)
        self._layout = layout

    def __call__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load these checkpoint tensors: all of one or more closures, by their layout names.

        Raises InvalidInputError(tensor_names) when a closure is not whole, before anything is
        changed: a module of which a tensor is missing would keep uninitialised memory.
        """
        given = dict(named)
        names = [spec.name for spec in self._layout.tensors]
        modules: list[str] = []
        known: set[str] = set()
        for group in self._groups:
            members = {names[tensor] for tensor in group.tensors}
            missing = sorted(members - given.keys())
            if len(missing) == len(members):
                continue
            known |= members
            modules += group.modules
            if missing:
                raise InvalidInputError(
                    f"{len(missing)} tensors of the same modules are missing:"
                    f" {list_names(missing)}",
                    kind=Kind.TENSOR_NAMES,
                    hint="a closure is reloaded as a whole",
                )
        strange = sorted(given.keys() - known)
        if strange:
            raise InvalidInputError(
                f"{len(strange)} tensors belong to no closure: {list_names(strange)}",
                kind=Kind.TENSOR_NAMES,
            )
        reload_tensors(self._model, self._dtype, modules, named)

    def prove(self, read: Callable[[int], Bits]) -> None:
        """Reload every closure with what the engine was loaded with: all bytes must come back.

        Every parameter of the modules is overwritten first, so that a reload that does nothing
        proves nothing. Takes memory for one closure.

        Args:
            read: position -> all patterns of that tensor, flat, as the engine has loaded it.

        Raises InvalidInputError(coverage): this engine's reload does not end where its first load
        did; what the reload itself raises. The weights have been put back. ApplyError(poisoned)
        when that failed.
        """
        for group in self._groups:
            live = _live(self._model, group.modules)
            before = {name: integer_view(tensor).clone() for name, tensor in live.items()}
            try:
                for tensor in live.values():
                    integer_view(tensor).bitwise_not_()
                self([_checkpoint_tensor(self._layout, t, read) for t in group.tensors])
                changed = _changed(live, before)
            except BaseException:
                _put_back(live, before)
                raise
            if changed:
                _put_back(live, before)
                raise InvalidInputError(
                    "reloading what was loaded does not give the same weights again, but others"
                    f" in {len(changed)} parameters: {list_names(changed)}",
                    kind=Kind.COVERAGE,
                    hint="this engine cannot bring them up to date; keep them as they are in the"
                    " checkpoint, or run it on another device",
                )


def reload_tensors(
    model: torch.nn.Module,
    dtype: torch.dtype,
    modules: Sequence[str],
    named: Sequence[tuple[str, torch.Tensor]],
) -> None:
    """Load checkpoint tensors into modules, in place.

    Args:
        dtype: of the model's activations, which attention is made ready for.
        modules: runtime names of all modules that the tensors go into.
        named: all tensors that go there, by checkpoint names, in layout order.
    """
    load: Any = model.load_weights
    layers = {name: model.get_submodule(name) for name in modules}
    twins: dict[int, torch.Tensor] = {}  # tied parameters have one form
    with torch.no_grad(), unpacked_weights():
        forms = [_Form(layer, twins) for layer in layers.values()]
        try:
            for form in forms:
                form.bind()
            load(iter(named))
            loaded = [
                (buffer, layer.get_parameter(key).data.reshape(buffer.shape).clone())
                for _, buffer, layer, key in _aliases(model, modules)
            ]
            for form in forms:
                form.process()
            for form in forms:
                form.write()
            for buffer, weight in loaded:
                buffer.copy_(weight)
        finally:
            for form in forms:
                form.unbind()
        reloaded = set(layers.values())
        attention: Any
        for attention in model.modules():
            if not reloaded.isdisjoint(derives_from(attention, model)):
                attention.process_weights_after_loading(dtype)


class _Form:
    """One module while the loader's form of its parameters is bound in place of the live ones."""

    def __init__(self, layer: torch.nn.Module, twins: dict[int, torch.Tensor]) -> None:
        self._layer = layer
        self._before = dict(layer._parameters)
        self._live = {k: p for k, p in self._before.items() if p is not None}
        self._made: dict[str, torch.Tensor] = {}
        recorded, _ = get_layerwise_info(layer).restore_metadata
        for key, live in self._live.items():
            if id(live) not in twins:
                twins[id(live)] = _materialised(layer, live, recorded.get(key))
            self._made[key] = twins[id(live)]

    def bind(self) -> None:
        """The loader's form in place of the live parameters."""
        self._layer._parameters.update(self._made)  # type: ignore[arg-type]

    def process(self) -> None:
        """What the engine does with a module once it is loaded."""
        method = getattr(self._layer, "quant_method", None)
        if not isinstance(method, QuantizeMethodBase):
            return
        if hasattr(self._layer, "_already_called_process_weights_after_loading"):
            del self._layer._already_called_process_weights_after_loading
        method.process_weights_after_loading(self._layer)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None and on_cpu():
            # vLLM does so after the first load only.
            kernel.fused_experts.process_weights_after_loading(self._layer)

    def write(self) -> None:
        """Copy what has been made into the live parameters."""
        for key, live in self._live.items():
            made = self._layer._parameters.get(key)
            if made is not None:
                live.data.copy_(made.data)

    def unbind(self) -> None:
        """The live parameters again, and no others."""
        self._layer._parameters.clear()
        self._layer._parameters.update(self._before)


def _materialised(
    layer: torch.nn.Module, live: torch.Tensor, recorded: torch.Tensor | None
) -> torch.Tensor:
    """Memory in the loader's form of a parameter; holds the live elements where the form is one."""
    if recorded is None:
        made = torch.nn.Parameter(live.data.clone(), requires_grad=False)
        made.__dict__.update(live.__dict__)
        return made
    form = loader_form(layer, recorded, live.device)
    if form.shape == live.shape and form.dtype == live.dtype:
        form.data.copy_(live.data)
    return form


def _aliases(
    model: torch.nn.Module, modules: Collection[str]
) -> Iterator[tuple[str, torch.Tensor, torch.nn.Module, str]]:
    """Buffers that were views of a parameter of these modules when the model was made.

    vLLM does not record them as buffers of their own. Yields the name and the buffer, and the
    module and the key of the parameter. Packing may have parted the two since.
    """
    for name, layer in model.named_modules():
        _, recorded = get_layerwise_info(layer).restore_metadata
        hidden = layer._non_persistent_buffers_set
        for key, buffer in layer._buffers.items():
            if buffer is None or not buffer.numel() or key in recorded or key not in hidden:
                continue
            for module in modules:
                if module != name and not module.startswith(f"{name}."):
                    continue
                owner = model.get_submodule(module)
                forms, _ = get_layerwise_info(owner).restore_metadata
                for parameter, form in forms.items():
                    if form.numel() == buffer.numel() and form.dtype == buffer.dtype:
                        yield f"{name}.{key}", buffer, owner, parameter


def _live(model: torch.nn.Module, modules: Collection[str]) -> dict[str, torch.Tensor]:
    """What a reload of modules must bring up to date, by runtime names; tied parameters once."""
    found = [
        (f"{name}.{key}", parameter.data)
        for name in modules
        for key, parameter in model.get_submodule(name)._parameters.items()
        if parameter is not None
    ]
    found += [(name, buffer) for name, buffer, _, _ in _aliases(model, modules)]
    once = {tensor.data_ptr(): (name, tensor) for name, tensor in found if tensor.numel()}
    return dict(once.values())


def _changed(live: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, t in live.items() if not torch.equal(integer_view(t), before[name])]


def _put_back(live: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    """What was there before, proved; ApplyError(poisoned) when it is not."""
    try:
        for name, tensor in live.items():
            integer_view(tensor).copy_(before[name])
        changed, cause = _changed(live, before), None
    except Exception as err:  # noqa: BLE001 - raised below: the weights are in doubt
        changed, cause = sorted(live), err
    if changed:
        raise ApplyError(
            f"a reload has changed weights that could not be put back: {list_names(changed)}",
            kind=Kind.POISONED,
            hint="start the engine again, and do not let it follow",
        ) from cause


def _checkpoint_tensor(
    layout: Layout, tensor: int, read: Callable[[int], Bits]
) -> tuple[str, torch.Tensor]:
    spec = layout.tensors[tensor]
    patterns = device_patterns(read(tensor), torch.device("cpu"))
    return spec.name, patterns.view(torch_dtype(spec.dtype)).view(spec.shape)
