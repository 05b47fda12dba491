"""Parts of uploads that nobody completes are billed for ever, and no listing shows them (S14).

Nor does one show the temporary files of puts that were killed, which fill a disk. A store that has
such things offers `IncompleteUploads`; the janitor asks for it by `incomplete_uploads_of`. Ages are
the store's own: the time of its answer against its own dates. An upload lives while parts arrive,
however long ago it began, so what counts is how long it has been idle; less than `LEAST_IDLE_S` may
be a part on its way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from deltastore.errors import InvalidInputError, Kind
from deltastore.storage.wrapper import StoreWrapper

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.storage.store import ObjectStore

LEAST_IDLE_S = 3600.0
"""Four times what a part may take; retries of a part begin anew."""


@dataclass(frozen=True, slots=True)
class IncompleteUpload:
    """An upload that was begun, and neither completed nor aborted."""

    key: str
    """What it will be; in a file store, where its temporary file lies."""
    upload_id: str
    started_s: float
    """Unix seconds by the store's own clock."""
    idle_s: float
    """Since its newest part arrived, or since it was begun, by the store's own clock."""


@runtime_checkable
class IncompleteUploads(Protocol):
    """A store that keeps what was sent of an upload until it is whole."""

    def incomplete_uploads(self, prefix: str) -> Iterator[IncompleteUpload]:
        """Every incomplete upload of a key that begins with `prefix`."""
        ...

    def abort_upload(self, upload: IncompleteUpload) -> bool:
        """Remove what it keeps; False when it is known to be running, or gone already."""
        ...


def incomplete_uploads_of(store: ObjectStore) -> IncompleteUploads | None:
    """The store's uploads, looked for under its wrappers; None where there are no such things."""
    while isinstance(store, StoreWrapper):
        store = store.inner
    return store if isinstance(store, IncompleteUploads) else None


def abort_idle_uploads(
    store: ObjectStore, prefix: str, *, idle_s: float, dry_run: bool
) -> tuple[IncompleteUpload, ...]:
    """Abort the uploads under `prefix` that are idle for `idle_s`; returns those that were.

    With `dry_run` nothing is aborted and those that would be are returned. A store without such
    uploads has none.
    """
    if not idle_s >= LEAST_IDLE_S:  # so that NaN is refused too
        raise InvalidInputError(
            f"uploads idle for {idle_s:g} s may be running",
            kind=Kind.SETTING,
            hint=f"use at least {LEAST_IDLE_S:g} s; a day is usual",
        )
    uploads = incomplete_uploads_of(store)
    if uploads is None:
        return ()
    return tuple(
        upload
        for upload in uploads.incomplete_uploads(prefix)
        if upload.idle_s >= idle_s and (dry_run or uploads.abort_upload(upload))
    )
