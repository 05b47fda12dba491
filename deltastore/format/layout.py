"""An index without an agreed tensor table writes into the wrong weight: the layout is that table.

Tensors in a fixed order, each with its checkpoint (Hugging Face) name, dtype, shape, aliases and
offset in one flat element space. It is fixed when a run is created and named by its digest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deltastore.errors import FormatError, IntegrityError, InvalidInputError, Kind
from deltastore.format.box import MAX_RANK
from deltastore.format.canonical import canonical_json, parse_canonical_json
from deltastore.format.dtypes import Bits, DType

MAX_ELEMENTS = 1 << 48
MAX_TENSORS = 1 << 20
MAX_TENSOR_NAME_BYTES = 512
FORMAT = "deltastore-layout/1"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One row of the table.

    Args:
        name: the name under which the tensor is stored.
        dtype: its element type.
        shape: items per dimension, as a checkpoint states it; () is a scalar.
        first_element: offset of its first element in the flat element space.
        aliases: further checkpoint names of the same storage (tied tensors).

    What follows from these is worked out once; it is asked for at every version, of every tensor.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    first_element: int
    aliases: tuple[str, ...] = ()
    elements: int = field(init=False, repr=False, compare=False)
    """Number of elements: of complex tensors two per item."""
    element_shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The shape in elements: complex tensors gain a last dimension of 2."""

    def __post_init__(self) -> None:
        per_item = self.dtype.elements_per_item
        object.__setattr__(self, "elements", math.prod(self.shape) * per_item)
        object.__setattr__(
            self, "element_shape", (*self.shape, 2)[: len(self.shape) + per_item - 1]
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor in a checkpoint."""
        return self.elements * self.dtype.element_bits // 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What a checkpoint or a source says of one tensor, before it has a place in a layout."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()


class Layout:
    """The ordered tensor table. Immutable; equality is equality of digests."""

    __slots__ = ("_by_name", "digest", "elements", "size_bytes", "tensors")

    def __init__(self, tensors: tuple[TensorSpec, ...]) -> None:
        self.tensors = tensors
        self.elements = tensors[-1].first_element + tensors[-1].elements if tensors else 0
        self.size_bytes = sum(spec.size_bytes for spec in tensors)
        """Bytes of a dense state."""
        self._by_name = _index_names(tensors)
        self.digest = hashlib.sha256(self.canonical_bytes()).hexdigest()

    @classmethod
    def build(cls, entries: Iterable[TensorEntry]) -> Layout:
        """Lay the entries out in their order; InvalidInputError names what cannot be laid out."""
        specs: list[TensorSpec] = []
        first = 0
        for entry in entries:
            _check_entry(entry)
            aliases = tuple(sorted(entry.aliases))
            spec = TensorSpec(entry.name, entry.dtype, tuple(entry.shape), first, aliases)
            specs.append(spec)
            first += spec.elements
            if first > MAX_ELEMENTS or len(specs) > MAX_TENSORS:
                raise InvalidInputError(
                    f"layout exceeds its limits at tensor {entry.name!r}",
                    kind=Kind.LIMIT,
                    hint=f"at most {MAX_TENSORS} tensors of {MAX_ELEMENTS} elements in all",
                )
        return cls(tuple(specs))

    def __eq__(self, other: object) -> bool:
        """Same table, same order, same aliases."""
        return isinstance(other, Layout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __len__(self) -> int:
        return len(self.tensors)

    def position(self, name: str) -> int | None:
        """Where the tensor of that name or alias stands, or None."""
        return self._by_name.get(name)

    def canonical_bytes(self) -> bytes:
        """The one JSON text of this layout; its SHA-256 is the digest."""
        rows = [[s.name, s.dtype.value, list(s.shape), list(s.aliases)] for s in self.tensors]
        return canonical_json({"format": FORMAT, "tensors": rows})

    @classmethod
    def from_bytes(cls, text: bytes) -> Layout:
        """Read canonical bytes; FormatError when they are anything else."""
        document = parse_canonical_json(text, what="layout")
        if not isinstance(document, dict) or set(document) != {"format", "tensors"}:
            raise FormatError("layout has other fields than format and tensors", kind=Kind.FIELD)
        if document["format"] != FORMAT:
            raise FormatError(
                f"layout format {document['format']!r} is not {FORMAT!r}",
                kind=Kind.FORMAT_VERSION,
                hint="upgrade deltastore",
            )
        rows = document["tensors"]
        if not isinstance(rows, list):
            raise FormatError("layout tensors is not a list", kind=Kind.FIELD)
        try:
            return cls.build(_entry_of_row(row) for row in rows)
        except InvalidInputError as err:
            raise FormatError(f"layout: {err.message}", kind=Kind.FIELD) from err


class BitState(Mapping[str, Bits]):
    """One full state on the host: per tensor of the layout its flat bits, writable.

    Keys are the layout's names (not aliases); `arrays[i]` is the tensor at position i.
    """

    def __init__(self, layout: Layout, arrays: list[Bits]) -> None:
        if len(arrays) != len(layout):
            raise InvalidInputError(
                f"state has {len(arrays)} tensors, its layout {len(layout)}", kind=Kind.TENSOR_NAMES
            )
        for spec, bits in zip(layout.tensors, arrays, strict=True):
            if bits.dtype != spec.dtype.bits_dtype or bits.shape != (spec.elements,):
                raise InvalidInputError(
                    f"tensor {spec.name!r} has {bits.dtype} {bits.shape},"
                    f" not {spec.dtype.bits_dtype} ({spec.elements},)",
                    kind=Kind.TENSOR_SHAPE,
                )
        self.layout = layout
        self.arrays = arrays

    @classmethod
    def zeros(cls, layout: Layout) -> BitState:
        """A state of zero patterns."""
        return cls(layout, [np.zeros(s.elements, s.dtype.bits_dtype) for s in layout.tensors])

    def copy(self) -> BitState:
        """An independent copy."""
        return BitState(self.layout, [bits.copy() for bits in self.arrays])

    def __getitem__(self, name: str) -> Bits:
        position = self.layout.position(name)
        if position is None:
            raise KeyError(name)
        return self.arrays[position]

    def __iter__(self) -> Iterator[str]:
        return (spec.name for spec in self.layout.tensors)

    def __len__(self) -> int:
        return len(self.arrays)

    def equals(self, other: BitState) -> bool:
        """Whether every bit of every tensor is the same."""
        return self.layout == other.layout and all(
            np.array_equal(a, b) for a, b in zip(self.arrays, other.arrays, strict=True)
        )


def _index_names(tensors: tuple[TensorSpec, ...]) -> dict[str, int]:
    names: dict[str, int] = {}
    for position, spec in enumerate(tensors):
        for name in (spec.name, *spec.aliases):
            if name in names:
                raise InvalidInputError(f"name {name!r} is used twice", kind=Kind.TENSOR_NAMES)
            names[name] = position
    return names


def _check_entry(entry: TensorEntry) -> None:
    for name in (entry.name, *entry.aliases):
        size = len(name.encode("utf-8", "surrogatepass"))
        if not 0 < size <= MAX_TENSOR_NAME_BYTES or not name.isprintable():
            raise InvalidInputError(
                f"tensor name {name[:80]!r} is not allowed",
                kind=Kind.NAME,
                hint=f"use 1 to {MAX_TENSOR_NAME_BYTES} bytes of printable characters",
            )
    # Of an empty tensor the product says nothing: each dimension is bounded by itself.
    if len(entry.shape) > MAX_RANK or not all(0 <= n <= MAX_ELEMENTS for n in entry.shape):
        raise InvalidInputError(
            f"tensor {entry.name[:80]!r} has shape {str(entry.shape)[:80]}",
            kind=Kind.TENSOR_SHAPE,
            hint=f"at most {MAX_RANK} dimensions, each from 0 to {MAX_ELEMENTS}",
        )


def _entry_of_row(row: Any) -> TensorEntry:
    match row:
        case [str(name), str(dtype), list(shape), list(aliases)]:
            pass
        case _:
            raise FormatError("layout row is not [name, dtype, shape, aliases]", kind=Kind.FIELD)
    if dtype not in DType.__members__:
        raise FormatError(f"layout dtype {dtype[:40]!r} is unknown", kind=Kind.FIELD)
    sizes = [n for n in shape if isinstance(n, int) and not isinstance(n, bool)]
    names = [a for a in aliases if isinstance(a, str)]
    if len(sizes) != len(shape) or len(names) != len(aliases) or names != sorted(names):
        raise FormatError(f"layout row of {name[:80]!r} is malformed", kind=Kind.FIELD)
    return TensorEntry(name, DType(dtype), tuple(sizes), tuple(names))


def require_same_layout(expected: str, got: str, *, what: str) -> None:
    """Raise IntegrityError(layout_mismatch) unless the two layout digests are equal."""
    if expected != got:
        raise IntegrityError(
            f"{what} is of layout {got[:12]}, not {expected[:12]}",
            kind=Kind.LAYOUT_MISMATCH,
            hint="it belongs to another run or model",
        )
