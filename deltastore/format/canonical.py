"""Two texts of one document have two hashes: every signed or hashed document here has one text.

Canonical JSON: UTF-8, keys sorted by code point, no spaces, no floats, integers within 53 bits
(larger values travel as fixed-width hex), no duplicate keys, no control characters unescaped.
A reader refuses a text that is not its own canonical form.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from deltastore.errors import FormatError, Kind

MAX_JSON_INTEGER = (1 << 53) - 1
MAX_DOCUMENT_BYTES = 256 << 20
MAX_DEPTH = 16


def canonical_json(document: Any) -> bytes:
    """The canonical bytes of a document of dicts, lists, strings, integers, booleans and None."""
    return json.dumps(
        document, ensure_ascii=True, allow_nan=False, sort_keys=True, separators=(",", ":")
    ).encode("ascii")


def parse_canonical_json(text: bytes, *, what: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> Any:
    """Read canonical bytes; FormatError(not_canonical, limit, truncated) on anything else."""
    if len(text) > max_bytes:
        raise FormatError(f"{what} has {len(text)} bytes, more than {max_bytes}", kind=Kind.LIMIT)
    try:
        document = json.loads(
            text.decode("ascii"),
            parse_float=_refuse_float,
            parse_constant=_refuse_float,
            parse_int=_parse_int,
        )
    except FormatError:
        raise
    except (ValueError, RecursionError) as err:
        raise FormatError(f"{what} is not JSON: {err}", kind=Kind.NOT_CANONICAL) from err
    _check_depth(document, what, 0)
    if canonical_json(document) != text:
        raise FormatError(f"{what} is not in canonical form", kind=Kind.NOT_CANONICAL)
    return document


def _refuse_float(text: str) -> NoReturn:
    raise FormatError(f"a float ({text[:20]}) where only integers may stand", kind=Kind.FIELD)


def _parse_int(text: str) -> int:
    if len(text) > 17 or abs(int(text)) > MAX_JSON_INTEGER:
        raise FormatError(f"integer {text[:20]} exceeds 53 bits", kind=Kind.LIMIT)
    return int(text)


def _check_depth(node: Any, what: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise FormatError(f"{what} is nested deeper than {MAX_DEPTH}", kind=Kind.LIMIT)
    if isinstance(node, dict):
        for value in node.values():
            _check_depth(value, what, depth + 1)
    elif isinstance(node, list):
        for value in node:
            _check_depth(value, what, depth + 1)
