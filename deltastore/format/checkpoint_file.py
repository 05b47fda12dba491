"""A header believed before it is checked maps one tensor onto another's bytes: it is checked here.

Reads and makes the header of a safetensors file: eight bytes of length, JSON, then the tensors'
bytes without hole, overlap or remainder. Everything accepted here the safetensors library accepts
with the same meaning. Refused beyond that: duplicate names, unknown fields, space before the JSON,
and dtypes of less than a byte. Only the header is needed, so a remote file can be read by range.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from deltastore.errors import FormatError, Kind
from deltastore.format.dtypes import DType

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deltastore.format.layout import TensorEntry

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit."""
METADATA_NAME = "__metadata__"
_ALIGNMENT_BYTES = 8
_MAX_COUNT = (1 << 64) - 1
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file; `begin` and `end` count bytes from the start of the data."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Bytes that the tensor takes."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class CheckpointHeader:
    """A checked header.

    Args:
        tensors: by name, in the order in which the header names them.
        metadata: the file's own strings.
        raw: length field and JSON as they stand in the file, so that it can be written again.
    """

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    raw: bytes = field(repr=False)

    @property
    def data_start(self) -> int:
        """Where in the file the data starts."""
        return len(self.raw)

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_start + max((t.end for t in self.tensors.values()), default=0)

    def data_order(self) -> list[StoredTensor]:
        """The tensors in the order of their bytes; that of the header where they are empty."""
        return sorted(self.tensors.values(), key=lambda t: (t.begin, t.end))

    def file_range(self, name: str) -> tuple[int, int]:
        """First byte of a tensor in the file, and the one after its last."""
        tensor = self.tensors[name]
        return self.data_start + tensor.begin, self.data_start + tensor.end


def header_bytes(head: bytes | bytearray | memoryview) -> int:
    """Bytes of length field and JSON, from a file's first 8 bytes.

    Raises FormatError: `truncated` (fewer than 8 bytes), `limit` (longer than any header may be).
    """
    if len(head) < LENGTH_BYTES:
        raise FormatError(
            f"a safetensors file has {len(head)} bytes, too few for its header",
            kind=Kind.TRUNCATED,
        )
    length = int.from_bytes(bytes(head[:LENGTH_BYTES]), "little")
    if length > MAX_HEADER_BYTES:
        raise FormatError(
            f"a safetensors header claims {length} bytes, more than {MAX_HEADER_BYTES}",
            kind=Kind.LIMIT,
            hint="this is no safetensors file",
        )
    return LENGTH_BYTES + length


def parse_header(
    head: bytes | bytearray | memoryview, *, file_bytes: int | None = None
) -> CheckpointHeader:
    """Read and check the header of a safetensors file.

    Args:
        head: the file from its first byte, at least as far as the header reaches.
        file_bytes: size of the whole file; None when `head` is the whole file.

    Raises FormatError: `truncated`, `trailing`, `limit`, `magic` (no JSON object), `field` (a
    malformed entry), `encoding` (an unknown dtype), `order` (a hole or an overlap).
    """
    end = header_bytes(head)
    total = len(head) if file_bytes is None else file_bytes
    if len(head) < end or total < end:
        raise FormatError(
            f"a safetensors header of {end} bytes is cut at {min(len(head), total)}",
            kind=Kind.TRUNCATED,
        )
    raw = bytes(head[:end])
    document = _parse_json(raw)
    metadata = _parse_metadata(document.pop(METADATA_NAME, None))
    tensors = {name: _parse_tensor(name, row) for name, row in document.items()}
    header = CheckpointHeader(tensors, metadata, raw)
    _check_data(header, total - end)
    return header


def build_header(
    entries: Iterable[TensorEntry], metadata: Mapping[str, str] | None = None
) -> CheckpointHeader:
    """The header of a new file that holds the entries, named in their order.

    The data is laid out by falling element width, so that every tensor is aligned to its own
    elements (readers map them); write it in `data_order()`. Aliases are not stored.
    """
    rows = list(entries)
    places: dict[str, StoredTensor] = {}
    begin = 0
    for entry in sorted(rows, key=lambda e: -e.dtype.item_bytes):
        size = _checked_bytes(entry.name, entry.dtype, entry.shape)
        places[entry.name] = StoredTensor(
            entry.name, entry.dtype, tuple(entry.shape), begin, begin + size
        )
        begin += size
    if len(places) != len(rows) or METADATA_NAME in places:
        raise FormatError("a safetensors file cannot hold a name twice", kind=Kind.FIELD)
    tensors = {entry.name: places[entry.name] for entry in rows}
    document: dict[str, Any] = {METADATA_NAME: dict(metadata)} if metadata else {}
    for tensor in tensors.values():
        document[tensor.name] = {
            "dtype": tensor.dtype.value,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.begin, tensor.end],
        }
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(
            f"a header of {len(text)} bytes exceeds {MAX_HEADER_BYTES}",
            kind=Kind.LIMIT,
            hint="spread the tensors over several files",
        )
    raw = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return CheckpointHeader(tensors, dict(metadata or {}), raw)


def _parse_json(raw: bytes) -> dict[str, Any]:
    if raw[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
        raise FormatError(
            "a safetensors header does not start with '{'",
            kind=Kind.MAGIC,
            hint="this is no safetensors file",
        )
    try:
        document = json.loads(
            raw[LENGTH_BYTES:].decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_parse_count,
            parse_float=_refuse_number,
            parse_constant=_refuse_number,
        )
    except FormatError:
        raise
    except (ValueError, RecursionError) as err:
        raise FormatError(f"a safetensors header is not JSON: {err}", kind=Kind.FIELD) from err
    if not isinstance(document, dict):
        raise FormatError("a safetensors header is no JSON object", kind=Kind.MAGIC)
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for name, value in pairs:
        if name in document:
            raise FormatError(f"a safetensors header names {name[:80]!r} twice", kind=Kind.FIELD)
        document[name] = value
    return document


def _parse_count(text: str) -> int:
    if text.startswith("-") or len(text) > 20 or int(text) > _MAX_COUNT:
        _refuse_number(text)
    return int(text)


def _refuse_number(text: str) -> NoReturn:
    raise FormatError(
        f"a safetensors header has the number {text[:24]}, not a count", kind=Kind.FIELD
    )


def _parse_metadata(node: Any) -> dict[str, str]:
    if node is None:
        return {}
    if not isinstance(node, dict) or not all(isinstance(v, str) for v in node.values()):
        raise FormatError("safetensors metadata is not a table of strings", kind=Kind.FIELD)
    for text in (*node.keys(), *node.values()):
        _require_utf8(text)
    return node


def _parse_tensor(name: str, row: Any) -> StoredTensor:
    _require_utf8(name)
    if not isinstance(row, dict) or set(row) != _FIELDS:
        raise FormatError(
            f"tensor {name[:80]!r} has other fields than dtype, shape and data_offsets",
            kind=Kind.FIELD,
        )
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise FormatError(
            f"tensor {name[:80]!r} has a malformed shape or data_offsets", kind=Kind.FIELD
        )
    if not isinstance(dtype, str) or dtype not in DType.__members__:
        raise FormatError(
            f"tensor {name[:80]!r} has dtype {str(dtype)[:40]!r}, which is not supported",
            kind=Kind.ENCODING,
            hint=f"supported are {', '.join(DType.__members__)}",
        )
    tensor = StoredTensor(name, DType(dtype), tuple(shape), offsets[0], offsets[1])
    if _checked_bytes(name, tensor.dtype, tensor.shape) != tensor.size_bytes:
        raise FormatError(
            f"tensor {name[:80]!r} of {dtype} {shape} has {tensor.size_bytes} bytes",
            kind=Kind.FIELD,
        )
    return tensor


def _are_counts(node: Any) -> bool:
    return isinstance(node, list) and all(type(n) is int for n in node)


def _require_utf8(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as err:
        raise FormatError(
            f"a safetensors header holds {text[:80]!r}, which is no Unicode text", kind=Kind.FIELD
        ) from err


def _checked_bytes(name: str, dtype: DType, shape: Iterable[int]) -> int:
    """Bytes of a tensor; like the library, refuses a product that 64 bits cannot hold."""
    items = 1
    for size in shape:
        items *= size
        if not 0 <= items * dtype.item_bytes * 8 <= _MAX_COUNT:
            raise FormatError(f"tensor {name[:80]!r} has an impossible shape", kind=Kind.LIMIT)
    return items * dtype.item_bytes


def _check_data(header: CheckpointHeader, data_bytes: int) -> None:
    """The tensors must tile the data: no hole, no overlap, nothing missing, nothing left."""
    position = 0
    for tensor in header.data_order():
        if tensor.begin != position:
            what = "overlaps the one before" if tensor.begin < position else "leaves a hole"
            raise FormatError(
                f"tensor {tensor.name[:80]!r} at {tensor.begin} {what} ({position})",
                kind=Kind.ORDER,
            )
        position = tensor.end
    if position > data_bytes:
        raise FormatError(
            f"a safetensors file has {data_bytes} bytes of data, its header says {position}",
            kind=Kind.TRUNCATED,
            hint="fetch or copy the file again",
        )
    if position < data_bytes:
        raise FormatError(
            f"a safetensors file has {data_bytes - position} bytes after its last tensor",
            kind=Kind.TRAILING,
        )
