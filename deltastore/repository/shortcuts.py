"""A shortcut is written by somebody else than the version it leads to: it is checked before use.

Which anchors and composites a region has, and about how large they are, comes from one listing per
kind; only those that a plan has chosen are read. Each must be of this run and layout, name keys of
its own attempt only, and agree with the manifests of the versions at both its ends, which were read
and linked by hash before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.errors import FormatError, IntegrityError, Kind, NotFoundError
from deltastore.format.keys import KeyKind, parse_key
from deltastore.format.layout import require_same_layout
from deltastore.format.shortcut import (
    AnchorCore,
    AnchorManifest,
    CompositeCore,
    CompositeManifest,
    Point,
)
from deltastore.format.signing import MaySign, TrustedKeys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.format.manifest import Signature, VersionManifest
    from deltastore.repository.run import Run
    from deltastore.storage.store import ObjectInfo


@dataclass(frozen=True, slots=True)
class Listed:
    """A shortcut that a listing shows: `base` is None for an anchor.

    `size_bytes` is that of its largest attempt: an estimate for planning.
    """

    base: int | None
    version: int
    size_bytes: int


def point_of(manifest: VersionManifest) -> Point:
    """The end of a shortcut that this version is."""
    core = manifest.core
    return Point(core.version, manifest.policy_hash, core.fingerprint_after)


def composites_prefix(run: Run) -> str:
    """Prefix of composite manifests and segments."""
    return run.keys.composite(0, 1).rpartition("/")[0] + "/"


def list_anchors(run: Run, *, first: int = 0) -> list[Listed]:
    """The anchors at version `first` or above, ascending."""
    prefix = run.keys.anchors
    after = f"{prefix}{first:010d}" if first else None  # sorts before everything of that version
    return _collect(run.store.list(prefix, start_after=after), KeyKind.ANCHOR)


def list_composites(run: Run, *, first: int = 0) -> list[Listed]:
    """The composites that begin at version `first` or above, by base and version."""
    prefix = composites_prefix(run)
    after = f"{prefix}{first:010d}" if first else None
    return _collect(run.store.list(prefix, start_after=after), KeyKind.COMPOSITE)


def load_anchor(
    run: Run, target: VersionManifest, *, trusted: TrustedKeys | None = None
) -> AnchorManifest:
    """The anchor of a version, checked against the version's manifest.

    Raises NotFoundError(gone), FormatError, IntegrityError (broken_chain, layout_mismatch,
    signature).
    """
    version = target.core.version
    key = run.keys.anchor(version)
    manifest = AnchorManifest.from_bytes(_read(run, key, version))
    core = manifest.core
    _check_core(run, core, target, key)
    if len(core.tensor_fingerprints) != len(run.layout):
        raise _contradiction(run, version, key, "has another number of tensors than the layout")
    for file in core.files:
        if file.key != run.keys.anchor_file(version, core.attempt, file.name):
            raise _foreign_key(run, version, str(file.key))
    _check_signature(trusted, core, manifest.signatures, f"anchor {version}", key)
    return manifest


def load_composite(
    run: Run,
    base: Point,
    target: VersionManifest,
    *,
    trusted: TrustedKeys | None = None,
) -> CompositeManifest:
    """The composite from a version to another, checked against both; raises like `load_anchor`."""
    version = target.core.version
    key = run.keys.composite(base.version, version)
    manifest = CompositeManifest.from_bytes(_read(run, key, version))
    core = manifest.core
    _check_core(run, core, target, key)
    if core.base != base:
        raise _contradiction(run, version, key, f"starts from another version {base.version}")
    for number, ref in enumerate(core.segments):
        expected = run.keys.composite_segment(
            base.version, version, core.attempt, number, ref.sha256
        )
        if ref.key != expected:
            raise _foreign_key(run, version, ref.key)
    what = f"composite {base.version}-{version}"
    _check_signature(trusted, core, manifest.signatures, what, key)
    return manifest


def _collect(infos: Iterator[ObjectInfo], manifest_kind: KeyKind) -> list[Listed]:
    present: set[tuple[int | None, int]] = set()
    sizes: dict[tuple[int | None, int], dict[str, int]] = {}
    for info in infos:
        try:
            parsed = parse_key(info.key)
        except FormatError:
            continue  # a stray object is fsck's business
        if parsed.version is None:
            continue
        ends = (parsed.base_version, parsed.version)
        if parsed.kind is manifest_kind:
            present.add(ends)
        elif parsed.name is not None:
            attempts = sizes.setdefault(ends, {})
            attempt = parsed.name.partition("/")[0]
            attempts[attempt] = attempts.get(attempt, 0) + info.size_bytes
    found = [
        Listed(base, version, max(sizes.get((base, version), {"": 0}).values()))
        for base, version in present
    ]
    return sorted(found, key=lambda one: (-1 if one.base is None else one.base, one.version))


def _read(run: Run, key: str, version: int) -> bytes:
    try:
        return run.store.get(key)
    except NotFoundError as err:
        if err.kind is not Kind.OBJECT_MISSING:
            raise
        raise NotFoundError(
            "the shortcut is gone",
            kind=Kind.GONE,
            run=run.name,
            version=version,
            key=key,
            hint="plan again",
        ) from err


def _check_core(
    run: Run, core: AnchorCore | CompositeCore, target: VersionManifest, key: str
) -> None:
    version = target.core.version
    if (core.run, core.run_id) != (run.name, run.record.run_id):
        raise _contradiction(run, version, key, f"is of run {core.run!r} ({core.run_id[:8]})")
    require_same_layout(run.layout.digest, core.layout_digest, what=f"shortcut to {version}")
    if core.target != point_of(target):
        raise _contradiction(run, version, key, f"leads to another version {version}")


def _check_signature(
    trusted: TrustedKeys | None,
    core: AnchorCore | CompositeCore,
    signatures: tuple[Signature, ...],
    what: str,
    key: str,
) -> None:
    if trusted is not None:
        text = core.canonical_bytes()
        trusted.require(text, signatures, MaySign.SHORTCUTS, what=what, key=key)


def _contradiction(run: Run, version: int, key: str, message: str) -> IntegrityError:
    return IntegrityError(
        f"the shortcut {message}",
        kind=Kind.BROKEN_CHAIN,
        run=run.name,
        version=version,
        key=key,
        hint="delete it: every version can be rebuilt without shortcuts",
    )


def _foreign_key(run: Run, version: int, key: str) -> FormatError:
    return FormatError(
        "the shortcut names an object outside its own attempt",
        kind=Kind.KEY,
        run=run.name,
        version=version,
        key=key[:200],
    )
