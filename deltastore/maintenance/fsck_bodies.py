"""A digest that fits proves bytes, not weights: shortcuts are proved by the state they lead to.

An anchor's files must hold, tensor by tensor, the state that its version declares. A composite is
tried on the state it starts from without writing it: what it would do to the old bits must be what
its blocks declare, and that must lead to its target.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from deltastore.chain.apply import prepare_block
from deltastore.errors import (
    DeltastoreError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    Kind,
    NotFoundError,
)
from deltastore.format.fingerprint import ZERO, Fingerprint
from deltastore.format.mixing import fingerprint_tensors
from deltastore.format.shortcut import AnchorCore, CompositeManifest
from deltastore.maintenance.findings import Severity, finding_of
from deltastore.maintenance.fsck_shortcuts import damaged_shortcut, describe
from deltastore.maintenance.shortcut_commit import is_there
from deltastore.repository.fetch import fetch_composite_blocks
from deltastore.repository.full import WEIGHTS_SUFFIX, chunks, fetch_state, require_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deltastore.format.layout import BitState
    from deltastore.maintenance.fsck_chain import Chain, CheckedShortcut
    from deltastore.repository.run import Run

OF_THE_RUN = (NotFoundError, FormatError, IntegrityError, InvalidInputError)
"""What a damaged run, as opposed to a failing store, makes a read raise."""


def check_anchor(
    run: Run, chain: Chain, shortcut: CheckedShortcut, *, streams: int
) -> BitState | None:
    """Read an anchor and prove its state; None when it does not hold."""
    core = shortcut.manifest.core
    if not shortcut.whole or not isinstance(core, AnchorCore):
        return None
    if shortcut.proved:
        return None  # read when the chain began at it
    try:
        state = fetch_state(
            run,
            core.files,
            version=shortcut.version,
            fingerprint=core.target.fingerprint,
            streams=streams,
        )
        if tuple(fingerprint_tensors(state)) != core.tensor_fingerprints:
            raise IntegrityError(
                f"{describe(shortcut)} declares other fingerprints of single tensors than it holds",
                kind=Kind.FINGERPRINT,
                key=shortcut.key,
            )
        for file in core.files:
            if file.key is not None and not file.name.endswith(WEIGHTS_SUFFIX):
                check_digest(run, file.key, file.size_bytes, file.sha256)
    except OF_THE_RUN as err:
        _note_damage(run, chain, shortcut, err)
        return None
    shortcut.proved = True
    return state


def check_composite(
    run: Run, chain: Chain, shortcut: CheckedShortcut, state: BitState | None, *, streams: int
) -> None:
    """Read a composite; where the state it starts from is there, prove where it leads."""
    manifest = shortcut.manifest
    if not shortcut.whole or not isinstance(manifest, CompositeManifest):
        return
    open_sums: dict[int, Fingerprint] = {}
    try:
        for blocks in fetch_composite_blocks(run, manifest, streams=streams):
            if state is None:
                continue
            for block in blocks:
                prepared = prepare_block(run.layout, block, state.arrays[block.tensor])
                gap = prepared.change - block.fingerprint_change
                open_sums[block.tensor] = open_sums.get(block.tensor, ZERO) + gap
        wrong = [tensor for tensor, gap in open_sums.items() if gap != ZERO]
        if wrong:
            raise IntegrityError(
                f"{describe(shortcut)} would do something else to {len(wrong)} tensors than its"
                f" blocks declare, first to {run.layout.tensors[wrong[0]].name!r}",
                kind=Kind.FINGERPRINT,
                key=shortcut.key,
            )
    except OF_THE_RUN as err:
        _note_damage(run, chain, shortcut, err)
        return
    shortcut.proved = state is not None


def bad_bodies(
    run: Run, named: Iterable[tuple[str, int, str]], known: set[str | None]
) -> Iterator[tuple[str, DeltastoreError | None]]:
    """Read objects one by one; yield the bad ones, with None for those that are known to be."""
    for key, size_bytes, sha256 in named:
        if key in known:
            yield key, None
            continue
        try:
            check_digest(run, key, size_bytes, sha256)
        except OF_THE_RUN as err:
            require_run_fault(err)
            yield key, err


def check_digest(run: Run, key: str, size_bytes: int, sha256: str) -> None:
    """Read an object in pieces and compare its SHA-256: a shard need not fit into memory.

    One of another size than the manifest says is not read.
    """
    require_size(run, key, size_bytes)
    digest = hashlib.sha256()
    for part in chunks(size_bytes):
        digest.update(run.store.get(key, part))
    if digest.hexdigest() != sha256:
        raise IntegrityError(
            "the object has another SHA-256 than its manifest says", kind=Kind.DIGEST, key=key
        )


def require_run_fault(error: DeltastoreError) -> None:
    """A bucket that vanished, or a wrong argument, says nothing of the run: let it pass."""
    shorter = error.kind is Kind.RANGE  # the object ends before its manifest says
    if error.kind is Kind.BUCKET_MISSING or (isinstance(error, InvalidInputError) and not shorter):
        raise error


def _note_damage(run: Run, chain: Chain, shortcut: CheckedShortcut, error: DeltastoreError) -> None:
    """Name every bad body of a shortcut, or the shortcut itself; nothing if it is gone by now."""
    require_run_fault(error)
    shortcut.whole = False
    if not is_there(run, shortcut.key):
        return
    known = {f.key for f in chain.findings if f.severity is Severity.ERROR}
    found = False
    for key, err in bad_bodies(run, shortcut.bodies(), known):
        found = True
        if err is not None:
            defect = finding_of(err, version=shortcut.version, key=key).defect
            chain.findings.append(damaged_shortcut(shortcut, defect, key, err.message))
    if not found:
        defect = finding_of(error, version=shortcut.version, key=shortcut.key).defect
        chain.findings.append(damaged_shortcut(shortcut, defect, shortcut.key, error.message))
