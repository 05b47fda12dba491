"""Two ways in which an engine on a CPU dies beside this package, or on a new CPU: both kept away.

Both turn a crash at start into a start and change nothing else, whatever backend an engine uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def claim_tiles() -> None:
    """Ask the kernel for the tile registers, which vLLM's kernels on x86 use unasked."""
    import torch

    torch.cpu._init_amx()


def pass_by_odd_attributes() -> None:
    """Let vLLM's search for kernels pass by objects whose `__dict__` is none.

    Before a model loads, vLLM looks through the attributes of every loaded module. numba's library
    handle answers any name, `__dict__` too, with a function, on which that search raises.
    """
    from vllm.triton_utils import dispatcher

    dispatcher.vars = _plain_vars


def _plain_vars(value: Any) -> Mapping[str, Any]:
    found = vars(value)
    return found if isinstance(found, Mapping) else {}
