"""A repair that copies the wrong bytes turns damage into corruption: here each byte is vouched for.

The one sanctioned overwrite: a damaged object is replaced by bytes of the same key whose SHA-256 is
the one that its manifest names; a manifest by one whose hash the version above names. What the
other region holds is believed no more than what this one does.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from deltastore.errors import (
    DeltastoreError,
    IntegrityError,
    Kind,
    NotFoundError,
    StorageError,
)
from deltastore.format.fields import FileRef
from deltastore.format.shortcut import AnchorManifest, CompositeManifest
from deltastore.maintenance.fsck_bodies import OF_THE_RUN, check_digest, require_run_fault
from deltastore.maintenance.shortcut_commit import is_there
from deltastore.repository.fetch import load_manifest
from deltastore.repository.full import stream_file
from deltastore.repository.history import require_signed
from deltastore.repository.points import ActiveVersion, check_link
from deltastore.storage.mapped import mapped_body
from deltastore.storage.store import PutMode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deltastore.format.keys import ParsedKey
    from deltastore.format.manifest import VersionManifest
    from deltastore.format.signing import TrustedKeys
    from deltastore.repository.run import Run


def require_same_run(run: Run, source: Run) -> None:
    """Raise IntegrityError(broken_chain) unless both buckets hold the same run."""
    if run.record != source.record:
        raise IntegrityError(
            f"{source.store.url} holds another run {source.name!r} ({source.record.run_id[:8]})",
            kind=Kind.BROKEN_CHAIN,
            run=run.name,
            hint="name another region of the same run",
        )


def is_whole(run: Run, key: str, size_bytes: int, sha256: str) -> bool:
    """Whether the object is there and is what its manifest names."""
    try:
        check_digest(run, key, size_bytes, sha256)
    except OF_THE_RUN as err:
        require_run_fault(err)
        return False
    return True


def copy_body(run: Run, source: Run, body: tuple[str, int, str], *, streams: int) -> bool:
    """Bring one body (key, size, SHA-256) from another region; False if it is whole already.

    Read from the source to a file without a name, its digest checked, before anything is written.
    Raises NotFoundError or IntegrityError when the source has no such bytes.
    """
    key, size_bytes, sha256 = body
    if is_whole(run, key, size_bytes, sha256):
        return False
    mode = PutMode.OVERWRITE if is_there(run, key) else PutMode.CREATE
    file = FileRef(key.rpartition("/")[2], key, size_bytes, sha256)
    try:
        with tempfile.TemporaryFile() as handle:
            for chunk in stream_file(source, file, streams):
                handle.write(chunk)
            handle.flush()
            with mapped_body(handle) as body_bytes:
                run.store.put(key, body_bytes, mode=mode)
    except OSError as err:
        raise StorageError(
            f"no room for {size_bytes} bytes in {tempfile.gettempdir()}: {err.strerror}",
            kind=Kind.DISK_FULL,
            key=key,
            hint="free space there, or point TMPDIR elsewhere",
        ) from err
    return True


def vouched_manifests(
    run: Run, source: Run, versions: Iterable[int], *, trusted: TrustedKeys | None
) -> dict[int, VersionManifest | DeltastoreError]:
    """What the other region has for damaged manifests, each vouched for, or why it is not used.

    From the top down: the version above, here or just vouched for, names the hash. Where there is
    none above (HEAD) it must continue the version below, and be signed when there are keys.
    """
    found: dict[int, VersionManifest | DeltastoreError] = {}
    damaged = set(versions)
    for version in sorted(damaged, reverse=True):
        above = found.get(version + 1)
        if version + 1 not in damaged:
            above = _readable(run, version + 1)
        try:
            manifest = load_manifest(source, version)
            if above is None:
                _check_newest(run, manifest, trusted)
            elif isinstance(above, DeltastoreError):
                raise _unvouched(version)
            else:
                check_link(ActiveVersion.of(manifest), above)
        except OF_THE_RUN as err:
            require_run_fault(err)
            found[version] = err
        else:
            found[version] = manifest
    return found


def write_manifest(run: Run, manifest: VersionManifest) -> None:
    """Put a vouched manifest where a damaged one, or none, is."""
    key = run.keys.version(manifest.core.version)
    mode = PutMode.OVERWRITE if is_there(run, key) else PutMode.CREATE
    run.store.put(key, manifest.to_bytes(), mode=mode)


def bodies_of(manifest: VersionManifest) -> list[tuple[str, int, str]]:
    """Key, size and SHA-256 of a version's own bodies."""
    core = manifest.core
    found = [(s.key, s.size_bytes, s.sha256) for s in core.segments]
    return found + [(f.key, f.size_bytes, f.sha256) for f in core.files if f.key is not None]


def shortcut_body(run: Run, parsed: ParsedKey, key: str) -> tuple[str, int, str] | None:
    """What a shortcut's manifest here says of a body; None when it cannot be read or asked."""
    version, base = parsed.version, parsed.base_version
    if version is None:
        return None
    try:
        if base is None:
            files = AnchorManifest.from_bytes(run.store.get(run.keys.anchor(version))).core.files
            named = [(str(f.key), f.size_bytes, f.sha256) for f in files]
        else:
            text = run.store.get(run.keys.composite(base, version))
            segments = CompositeManifest.from_bytes(text).core.segments
            named = [(s.key, s.size_bytes, s.sha256) for s in segments]
    except OF_THE_RUN as err:
        require_run_fault(err)
        return None
    return next((body for body in named if body[0] == key), None)


def has_object(source: Run, key: str, size_bytes: int | None) -> bool:
    """Whether the other region has an object of that name, and of that size if one is given."""
    try:
        present_bytes = source.store.head(key).size_bytes
    except NotFoundError as err:
        if err.kind is not Kind.OBJECT_MISSING:
            raise
        return False
    return size_bytes is None or present_bytes == size_bytes


def _readable(run: Run, version: int) -> VersionManifest | None:
    try:
        return load_manifest(run, version)
    except OF_THE_RUN as err:
        require_run_fault(err)
        return None


def _check_newest(run: Run, manifest: VersionManifest, trusted: TrustedKeys | None) -> None:
    require_signed(run, manifest, trusted)
    core = manifest.core
    below = _readable(run, core.version - 1) if core.version else None
    if below is not None:
        check_link(ActiveVersion.of(below), manifest)
    elif trusted is None:
        raise _unvouched(core.version)


def _unvouched(version: int) -> IntegrityError:
    return IntegrityError(
        f"nothing here vouches for the other region's version {version}",
        kind=Kind.BROKEN_CHAIN,
        version=version,
        hint="restore the manifests next to it first, or give the trusted keys",
    )
