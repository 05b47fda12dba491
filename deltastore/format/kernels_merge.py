"""Composing through old and new weights needs the weights: changes alone merge like this."""

from __future__ import annotations

from typing import Any

import numpy as np

from deltastore.format.kernels_base import Array, kernel

STEPS, BITS, DENSE = 0, 1, 2
"""What a change is; BITS and DENSE both are absolute patterns."""


@kernel
def merge_changes(
    first_at: Array,
    first_values: Array,
    first_kinds: Array,
    second_at: Array,
    second_values: Array,
    second_kinds: Array,
    at: Array,
    values: Array,
    kinds: Array,
) -> Any:
    """Merge two lists of changes, each sorted by place, the second on top; returns how many.

    Steps on steps add up and vanish at 0; steps on a pattern move it; a pattern replaces.
    """
    i = 0
    j = 0
    count = 0
    while i < first_at.size or j < second_at.size:
        if j >= second_at.size or (i < first_at.size and first_at[i] < second_at[j]):
            at[count] = first_at[i]
            values[count] = first_values[i]
            kinds[count] = first_kinds[i]
            i += 1
        elif i >= first_at.size or second_at[j] < first_at[i]:
            at[count] = second_at[j]
            values[count] = second_values[j]
            kinds[count] = second_kinds[j]
            j += 1
        else:
            at[count] = second_at[j]
            kinds[count] = max(first_kinds[i], second_kinds[j])
            if second_kinds[j] == STEPS:
                values[count] = first_values[i] + second_values[j]
                vanished = first_kinds[i] == STEPS and values[count] == 0
            else:
                values[count] = second_values[j]
                vanished = False
            i += 1
            j += 1
            if vanished:
                continue
        count += 1
    return count


@kernel
def is_increasing(at: Array) -> Any:
    """Whether every place is above the one before."""
    for i in range(1, at.size):
        if at[i] <= at[i - 1]:
            return False
    return np.bool_(True)
