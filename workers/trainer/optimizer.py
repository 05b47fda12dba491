"""Learning in bf16 loses every small step: masters are float32, the module holds what is served.

After a step every parameter of the module is its master rounded to the layout's dtype (round to
nearest, ties to even) and widened again, so gradients are taken at exactly the weights that
actors run. A step of 1e-6 that rounds away stays in the master and counts next time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deltastore.errors import InvalidInputError, Kind
from deltastore.format.dtypes import DType

if TYPE_CHECKING:
    from deltastore.format.layout import Layout

_TORCH = {
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.F32: torch.float32,
}


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW and the limit on the gradient's norm."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip_norm: float = 1.0


class MasterOptimizer:
    """AdamW over float32 masters of a module's parameters.

    Args:
        model: float32 module whose parameters hold exact values of the layout's dtypes.
        layout: says in which dtype each parameter is served.
    """

    def __init__(self, model: Any, layout: Layout, settings: OptimizerSettings) -> None:
        self._clip_norm = settings.clip_norm
        self._parameters: list[torch.nn.Parameter] = []
        self._serving: list[torch.dtype] = []
        for name, parameter in model.named_parameters():
            self._parameters.append(parameter)
            self._serving.append(_serving_dtype(layout, name, parameter))
        self._masters = [p.detach().clone().requires_grad_() for p in self._parameters]
        self._adam = torch.optim.AdamW(
            self._masters,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def step(self) -> float:
        """Apply the gradients on the module, clear them, and return their norm before clipping.

        Without any gradient (no group had anything to say) nothing changes and 0 is returned; a
        gradient that is not finite changes nothing either, and its norm says so.
        """
        if all(p.grad is None for p in self._parameters):
            return 0.0
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad, parameter.grad = parameter.grad, None
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self._clip_norm))
        if not math.isfinite(norm):
            self._adam.zero_grad(set_to_none=True)
            return norm
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        with torch.no_grad():
            rows = zip(self._parameters, self._masters, self._serving, strict=True)
            for parameter, master, dtype in rows:
                parameter.copy_(master.to(dtype))
        return norm


def _serving_dtype(layout: Layout, name: str, parameter: torch.nn.Parameter) -> torch.dtype:
    position = layout.position(name)
    if position is None:
        raise InvalidInputError(
            f"parameter {name!r} has no place in the run's layout",
            kind=Kind.TENSOR_NAMES,
            hint="train the model that the run was made from",
        )
    dtype = _TORCH.get(layout.tensors[position].dtype)
    if dtype is None or parameter.dtype is not torch.float32:
        raise InvalidInputError(
            f"parameter {name!r} is {parameter.dtype}, served as"
            f" {layout.tensors[position].dtype.value}: it cannot be trained",
            kind=Kind.TENSOR_DTYPE,
            hint="load the model in float32; layouts of BF16, F16 or F32 can be trained",
        )
    return dtype
