"""A delta written into a copy of a parameter changes nothing: writes land in the live storage.

A torch module as a source of weights (the trainer's) and as a target (an actor's). Everything is
done on integer views of the live parameters, so no bit passes through a float. A module in FP32
may serve a BF16 or FP16 layout: as a source it is rounded as torch rounds, as a target it holds
exact widenings, which is checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.autograd.graph import increment_version

from deltastore.adapters.float_casts import is_narrowing, narrow, narrow_exact, widen
from deltastore.adapters.torch_inventory import Inventory
from deltastore.adapters.torch_tensors import (
    ModuleLike,
    NamedTensor,
    device_patterns,
    host_bits,
    named_tensors,
)
from deltastore.chain.places import read_places, write_places
from deltastore.errors import IntegrityError, InvalidInputError, Kind
from deltastore.format.box import MAX_BOX_ELEMENTS, Box
from deltastore.format.coverage import list_names, match_entries
from deltastore.format.fingerprint import ZERO, Fingerprint
from deltastore.format.layout import TensorEntry, require_same_layout
from deltastore.format.mixing import fingerprint_run
from deltastore.pipeline.protocols import SourceBox

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from deltastore.format.dtypes import Bits, DType
    from deltastore.format.layout import BitState, Layout, TensorSpec

__all__ = ["ModuleSource", "ModuleTarget"]


class ModuleSource:
    """A module, or a state dict, as a WeightSource.

    Parameters are looked up at every call, so they may be rebound between versions.

    Args:
        module: its parameters and persistent buffers are what is published.
        layout: FP32 tensors that it has in BF16 or FP16 are rounded to that.
        serving_dtype: without a layout: round every FP32 tensor to this one.
    """

    def __init__(
        self,
        module: ModuleLike,
        *,
        layout: Layout | None = None,
        serving_dtype: DType | None = None,
    ) -> None:
        self._module = module
        self._layout = layout
        self._serving_dtype = serving_dtype
        self._inventory = Inventory(module, self._entries)

    def entries(self) -> list[TensorEntry]:
        """Checkpoint names, serving dtypes and shapes; raises what `named_tensors` raises."""
        return self._entries(named_tensors(self._module))

    def boxes(self, layout: Layout) -> Iterator[SourceBox]:
        """Flat runs in layout order, views of live memory where no cast is needed.

        Raises InvalidInputError (tensor_names, tensor_shape, tensor_dtype) when the module is not
        of the layout, IntegrityError(alias_drift) when it holds the names of one tensor of the
        layout in two storages with different bits.
        """
        whole: dict[int, Box] = {}
        widths = {spec.dtype: spec.dtype.bits_dtype for spec in layout.tensors}
        for tensor, start, patterns in self.runs(layout, most=MAX_BOX_ELEMENTS):
            bits = patterns.cpu().numpy().view(widths[layout.tensors[tensor].dtype])
            box = Box.run(start, bits.size) if start else whole.get(bits.size)
            if box is None:
                box = whole.setdefault(bits.size, Box.run(0, bits.size))
            yield SourceBox(tensor, box, bits)

    def runs(self, layout: Layout, *, most: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Position in the layout, first element and patterns of flat runs, where the tensors are.

        Of contiguous tensors `most` elements each; of others whole rows. Raises what `boxes` does.
        """
        tensors, servings = self._inventory.serving(layout)
        for tensor, serving in enumerate(servings):
            places = serving.places
            if serving.patterns is not None and serving.elements <= most:
                live = tensors[places[0].position].detach()
                yield tensor, 0, live.view(serving.patterns).view(-1)
                continue
            first, *others = (
                NamedTensor(p.names, tensors[p.position].detach(), p.dtype, p.position)
                for p in places
            )
            dtype = layout.tensors[tensor].dtype
            twins = [(other, other.patterns().reshape(-1)) for other in others]
            for start, patterns in _runs(first, dtype, most):
                for other, flat in twins:
                    run = flat[start : start + patterns.numel()]
                    _require_equal(first, other, patterns, _served(run, other, dtype))
                yield tensor, start, patterns

    def _entries(self, named: Sequence[NamedTensor]) -> list[TensorEntry]:
        return [
            TensorEntry(t.name, self._dtype(t), tuple(t.tensor.shape), t.names[1:]) for t in named
        ]

    def _dtype(self, named: NamedTensor) -> DType:
        wanted = self._serving_dtype
        if self._layout is not None:
            wanted = _layout_dtype(self._layout, named)
        narrowed = wanted is not None and is_narrowing(named.dtype, wanted)
        return wanted if narrowed and wanted is not None else named.dtype


class ModuleTarget:
    """Live parameters and buffers as a WeightTarget: read and written in place.

    An FP32 module serves a BF16 or FP16 layout if every value is exactly one of that dtype.

    Args:
        module: neither it nor its parameters may be rebound while the target is in use.
        layout: of the run that it follows.
        initial: a whole state to write into the module first, whatever it held before.

    Raises InvalidInputError when the module is not of the layout, ties what the layout keeps apart
    or holds values that the layout's dtype does not have; IntegrityError(alias_drift) when names of
    one tensor of the layout are two storages with different bits.
    """

    def __init__(
        self, module: ModuleLike, layout: Layout, *, initial: BitState | None = None
    ) -> None:
        self._places = _find_places(module, layout)
        self._layout = layout
        self._hosted = [
            places[0].hosted(spec) if len(places) == 1 else None
            for spec, places in zip(layout.tensors, self._places, strict=True)
        ]
        if initial is not None:
            require_same_layout(layout.digest, initial.layout.digest, what="the initial state")
            for tensor, bits in enumerate(initial.arrays):
                for box in _boxes(bits.size):
                    start = box.start[0]
                    self.scatter(tensor, box, None, bits[start : start + box.elements])
        self._check_values()

    @property
    def layout(self) -> Layout:
        """The tensor table that positions refer to."""
        return self._layout

    def gather(self, tensor: int, box: Box, indices: NDArray[np.uint32] | None) -> Bits:
        """The patterns at those indices of the box (None: the whole box), as a flat copy.

        Raises IntegrityError(fingerprint) when an FP32 parameter holds a value that the layout's
        dtype does not have: somebody else wrote to it.
        """
        spec = self._layout.tensors[tensor]
        hosted = self._hosted[tensor]
        if hosted is not None and indices is not None and box.flat:
            picked = read_places(hosted, box, indices)
            if picked is None:
                raise _outside(spec, box)
            return picked
        _check_box(spec, box, indices)
        bits = host_bits(self._read(tensor, box, indices), spec.dtype)
        return bits.copy() if indices is None else bits

    def scatter(
        self, tensor: int, box: Box, indices: NDArray[np.uint32] | None, bits: Bits
    ) -> None:
        """Write patterns there, in place, into every storage that has one of the tensor's names."""
        spec = self._layout.tensors[tensor]
        hosted = self._hosted[tensor]
        if hosted is None or indices is None or not box.flat:
            _check_box(spec, box, indices)
        count = box.elements if indices is None else indices.size
        if bits.dtype != spec.dtype.bits_dtype or bits.shape != (count,):
            raise InvalidInputError(
                f"{bits.dtype} {bits.shape} written to {count} elements of {spec.name!r}",
                kind=Kind.TENSOR_SHAPE,
            )
        if hosted is not None and indices is not None and box.flat:
            if not write_places(hosted, box, indices, bits):
                raise _outside(spec, box)
            # As every other write in place does: a graph that saved the weights must not miss it.
            increment_version(self._places[tensor][0].flat)
            return
        with torch.no_grad():
            for place in self._places[tensor]:
                place.write(spec, box, indices, device_patterns(bits, place.flat.device))

    def fingerprint(self) -> Fingerprint:
        """One pass over all live weights, at most 2^22 elements at a time."""
        total = ZERO
        for tensor, spec in enumerate(self._layout.tensors):
            for box in _boxes(spec.elements):
                bits = host_bits(self._read(tensor, box, None), spec.dtype)
                total = total + fingerprint_run(bits, spec.first_element + box.start[0])
        return total

    def _read(self, tensor: int, box: Box, indices: NDArray[np.uint32] | None) -> torch.Tensor:
        """Patterns of the first storage, after comparing them with those of any other."""
        spec = self._layout.tensors[tensor]
        first, *others = self._places[tensor]
        patterns = first.read(spec, box, indices)
        for other in others:
            _require_equal(first.named, other.named, patterns, other.read(spec, box, indices))
        return patterns

    def _check_values(self) -> None:
        """Whether every FP32 value can be narrowed, and storages of one tensor agree."""
        inexact: list[str] = []
        for tensor, spec in enumerate(self._layout.tensors):
            try:
                for box in _boxes(spec.elements):
                    self._read(tensor, box, None)
            except IntegrityError as err:
                if err.kind is not Kind.FINGERPRINT:
                    raise
                inexact.append(f"{spec.name} {spec.dtype.value}")
        if inexact:
            raise InvalidInputError(
                f"{len(inexact)} FP32 tensors hold values that the layout's dtype does not have:"
                f" {list_names(inexact)}",
                kind=Kind.TENSOR_DTYPE,
                hint="load the module from a checkpoint in the layout's dtypes, then widen it",
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """One live storage of a tensor, as a window of patterns.

    Args:
        named: the tensor.
        flat: one-dimensional patterns over the storage, from its first to its last element.
        strides: per dimension of the element shape, in elements; None when it is contiguous.
    """

    named: NamedTensor
    flat: torch.Tensor
    strides: tuple[int, ...] | None

    @classmethod
    def of(cls, named: NamedTensor) -> _Place:
        """The place of a tensor."""
        patterns = named.patterns()
        if patterns.is_contiguous():
            return cls(named, patterns.view(-1), None)
        reach = 1 + sum((n - 1) * s for n, s in zip(patterns.shape, patterns.stride(), strict=True))
        window = patterns.as_strided((reach,), (1,), patterns.storage_offset())
        return cls(named, window, patterns.stride())

    def hosted(self, spec: TensorSpec) -> Bits | None:
        """The live memory as an array, where that is all there is to it: torch's own calls take
        longer than the bits of a small tensor.
        """
        plain = self.strides is None and self.named.dtype is spec.dtype
        return host_bits(self.flat, spec.dtype) if plain and self.flat.is_cpu else None

    def read(self, spec: TensorSpec, box: Box, indices: NDArray[np.uint32] | None) -> torch.Tensor:
        """Patterns of the layout's dtype; of a whole contiguous run a view of live memory."""
        if indices is None and box.flat and self.strides is None:
            found = self.flat[box.start[0] : box.start[0] + box.elements]
        else:
            found = self.flat.index_select(0, self._offsets(spec, box, indices))
        if self.named.dtype is spec.dtype:
            return found
        exact = narrow_exact(found, spec.dtype)
        if exact is None:
            raise IntegrityError(
                f"FP32 tensor {self.named.name!r} holds a value that {spec.dtype.value} has not",
                kind=Kind.FINGERPRINT,
                hint="something else writes to the live weights: load them again",
            )
        return exact

    def write(
        self,
        spec: TensorSpec,
        box: Box,
        indices: NDArray[np.uint32] | None,
        patterns: torch.Tensor,
    ) -> None:
        """Write patterns of the layout's dtype."""
        if self.named.dtype is not spec.dtype:
            patterns = widen(patterns, spec.dtype)
        if indices is None and box.flat and self.strides is None:
            self.flat[box.start[0] : box.start[0] + box.elements].copy_(patterns)
        else:
            self.flat.index_copy_(0, self._offsets(spec, box, indices), patterns)

    def _offsets(
        self, spec: TensorSpec, box: Box, indices: NDArray[np.uint32] | None
    ) -> torch.Tensor:
        """Where in `flat` the elements of the box are."""
        chosen = np.arange(box.elements, dtype=np.int64) if indices is None else indices
        offsets = box.tensor_offsets(chosen, spec.element_shape)
        if self.strides is not None:
            coordinates = np.unravel_index(offsets, spec.element_shape)
            offsets = np.zeros(offsets.shape, np.int64)
            for coordinate, stride in zip(coordinates, self.strides, strict=True):
                offsets += coordinate * stride
        return torch.from_numpy(offsets).to(self.flat.device)


def _find_places(module: ModuleLike, layout: Layout) -> list[tuple[_Place, ...]]:
    """Per tensor of the layout the live storages that have one of its names."""
    named = named_tensors(module)
    source = ModuleSource(module, layout=layout)
    matches = match_entries(layout, source.entries())
    served: dict[int, str] = {}
    for spec, found in zip(layout.tensors, matches, strict=True):
        for position in found:
            if position in served:
                raise InvalidInputError(
                    f"the module ties {served[position]!r} and {spec.name!r},"
                    " which the layout keeps apart",
                    kind=Kind.TENSOR_NAMES,
                    hint="load the model with tie_word_embeddings false",
                )
            served[position] = spec.name
    return [tuple(_Place.of(named[position]) for position in found) for found in matches]


def _layout_dtype(layout: Layout, named: NamedTensor) -> DType | None:
    places = [place for name in named.names if (place := layout.position(name)) is not None]
    return layout.tensors[places[0]].dtype if places else None


def _runs(named: NamedTensor, dtype: DType, most: int) -> Iterator[tuple[int, torch.Tensor]]:
    """First element and patterns of consecutive flat runs, in the serving dtype.

    Of a contiguous tensor at most `most` elements each; of another whole rows, as copies.
    """
    patterns = named.patterns()
    total = patterns.numel()
    contiguous = patterns.is_contiguous() or not total
    rows = patterns.reshape(-1) if contiguous else patterns
    per_row = total // rows.shape[0] if total else 1
    step = max(1, most // per_row)
    for first in range(0, rows.shape[0] if total else 0, step):
        run = rows[first : first + step].reshape(-1)
        yield first * per_row, _served(run, named, dtype)


def _served(run: torch.Tensor, named: NamedTensor, dtype: DType) -> torch.Tensor:
    return run if named.dtype is dtype else narrow(run, dtype)


def _boxes(elements: int) -> Iterator[Box]:
    for start in range(0, elements, MAX_BOX_ELEMENTS):
        yield Box.run(start, min(MAX_BOX_ELEMENTS, elements - start))


def _check_box(spec: TensorSpec, box: Box, indices: NDArray[np.uint32] | None) -> None:
    outside = not box.fits(spec.element_shape)
    if outside or (indices is not None and indices.size and int(indices.max()) >= box.elements):
        raise _outside(spec, box)


def _outside(spec: TensorSpec, box: Box) -> InvalidInputError:
    return InvalidInputError(
        f"box {box.start} {box.shape} or an index in it is outside of {spec.name!r}"
        f" {list(spec.element_shape)}",
        kind=Kind.BOX,
    )


def _require_equal(
    first: NamedTensor, other: NamedTensor, a: torch.Tensor, b: torch.Tensor
) -> None:
    if not torch.equal(a, b.to(a.device)):
        raise IntegrityError(
            f"tied tensors {first.name!r} and {other.name!r} hold different bits",
            kind=Kind.ALIAS_DRIFT,
            hint="tie them in the module; if they are meant to differ, start a run that keeps them"
            " apart",
        )
