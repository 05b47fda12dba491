"""A body damaged on its way lies in a bucket until it is read: the store can check it on arrival.

Whether a store does is found out by trying, which takes a few requests, so the answer is kept:
`hints/checksums` says of which store (by bucket, prefix and endpoint: a run may be copied to
another) and whether. Only who writes versions asks. Like every hint it may be missing or garbage,
then the store is tried again; our own SHA-256 decides in any case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.errors import FormatError, Kind, NotFoundError, StorageError
from deltastore.format.canonical import canonical_json, parse_canonical_json
from deltastore.format.keys import Hint
from deltastore.repository.resolve import MAX_HINT_BYTES
from deltastore.storage.probe import Finding, checks_bodies, enable_checksums
from deltastore.storage.store import PutMode

if TYPE_CHECKING:
    from deltastore.format.keys import RunKeys
    from deltastore.storage.store import ObjectStore


def have_bodies_checked(store: ObjectStore, keys: RunKeys) -> Finding:
    """Let the store of a run check every body it gets from now on, if it is one that does.

    One read where the run's bucket holds the answer for this store, none where the store takes no
    checksums; else it is tried and the answer kept. A store in which this identity may not try it
    goes without. Raises StorageError when the store does not answer.
    """
    inner = checks_bodies(store)
    if inner is None:
        return Finding(False, "it takes no checksums")
    known = _recorded(store, keys, inner.where)
    if known is not None:
        if known:
            inner.use_checksums()
        return Finding(known, "as was found out before")
    try:
        finding = enable_checksums(store)
        document = canonical_json({"checked": finding.ok, "store": inner.where})
        store.put(keys.hint(Hint.CHECKSUMS), document, mode=PutMode.OVERWRITE)
    except StorageError as err:
        if err.kind is not Kind.CREDENTIALS:
            raise
        return Finding(False, f"it may not be tried: {err}")
    return finding


def _recorded(store: ObjectStore, keys: RunKeys, where: str) -> bool | None:
    """What the hint says of this very store; None when it says nothing."""
    try:
        text = store.get(keys.hint(Hint.CHECKSUMS))
        document = parse_canonical_json(text, what="checksums hint", max_bytes=MAX_HINT_BYTES)
    except (NotFoundError, FormatError):
        return None
    if not isinstance(document, dict) or document.get("store") != where:
        return None
    checked = document.get("checked")
    return checked if isinstance(checked, bool) else None
