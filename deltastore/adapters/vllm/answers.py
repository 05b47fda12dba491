"""Ranks that speak of "version 7" may mean two histories: points travel whole, and are checked."""

from __future__ import annotations

from typing import Any

from deltastore.errors import FormatError, Kind
from deltastore.format.fingerprint import Fingerprint
from deltastore.ids import check_version, is_sha256
from deltastore.pipeline.spool import SpooledUpdate
from deltastore.repository.points import ActiveVersion


def point_row(point: ActiveVersion) -> dict[str, Any]:
    """A version as it travels between ranks."""
    return {
        "version": point.version,
        "policy_hash": point.policy_hash,
        "fingerprint": str(point.fingerprint),
        "generation": point.generation,
    }


def point_of(row: object) -> ActiveVersion:
    """A version that travelled; FormatError(field) when it is none."""
    match row:
        case {
            "version": int(version),
            "policy_hash": str(policy_hash),
            "fingerprint": str(fingerprint),
            "generation": int(generation),
        } if is_sha256(policy_hash):
            found = Fingerprint.parse(fingerprint)
            return ActiveVersion(check_version(version), policy_hash, found, generation)
    raise FormatError("a rank named no version", kind=Kind.FIELD)


def spooled_row(spooled: SpooledUpdate) -> dict[str, Any]:
    """An update of the spool as it travels between ranks."""
    return {
        "path": spooled.path,
        "size_bytes": spooled.size_bytes,
        "sha256": spooled.sha256,
        "target": point_row(spooled.target),
    }


def spooled_of(row: object) -> SpooledUpdate:
    """An update that travelled; FormatError(field) when it is none."""
    match row:
        case {
            "path": str(path),
            "size_bytes": int(size_bytes),
            "sha256": str(sha256),
            "target": target,
        } if is_sha256(sha256):
            return SpooledUpdate(path, size_bytes, sha256, point_of(target))
    raise FormatError("a rank named no update", kind=Kind.FIELD)
