"""A shortcut nobody checks fails the joiner it was made for: each is held against its versions.

An anchor or a composite must be of this run and layout, lead to the version whose manifest is here,
start from one, and name only bodies of its own attempt that are there with their sizes. Shortcuts
come and go while a check runs: one whose manifest is gone by now is no finding.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from deltastore.errors import FormatError, IntegrityError, Kind, NotFoundError
from deltastore.format.keys import KeyKind, ParsedKey, parse_key
from deltastore.maintenance.findings import Defect, Finding, Severity, finding_of
from deltastore.maintenance.fsck_chain import CheckedShortcut
from deltastore.maintenance.shortcut_commit import is_there
from deltastore.repository.shortcuts import load_anchor, load_composite, point_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.maintenance.fsck_chain import Chain
    from deltastore.repository.run import Run

MAKE_AGAIN = "`deltastore verify --repair` deletes it; `deltastore maintain` makes it again"


def read_shortcuts(run: Run, chain: Chain, listing: dict[str, int], *, streams: int) -> None:
    """Read every listed shortcut manifest; those that hold are added to the chain."""
    keys = [(key, parsed) for key in sorted(listing) if (parsed := _shortcut_key(key))]
    with ThreadPoolExecutor(streams, thread_name_prefix="fsck") as pool:
        read = pool.map(lambda item: _read_one(run, chain, *item), keys)
        for found in read:
            if isinstance(found, Finding):
                chain.findings.append(found)
            elif found is not None:
                chain.shortcuts.append(found)


def check_bodies(run: Run, chain: Chain, size_of: Callable[[str], int | None]) -> set[str]:
    """Check that every body a shortcut names is there with its size; return their keys."""
    named: set[str] = set()
    for shortcut in chain.shortcuts:
        findings = []
        for key, size_bytes, _sha256 in shortcut.bodies():
            named.add(key)
            present_bytes = size_of(key)
            if present_bytes != size_bytes:
                findings.append(_body_finding(shortcut, key, size_bytes, present_bytes))
        if findings and is_there(run, shortcut.key):
            chain.findings += findings
        shortcut.whole = not findings
    return named


def damaged_shortcut(shortcut: CheckedShortcut, defect: Defect, key: str, message: str) -> Finding:
    """The finding that a shortcut cannot be used."""
    return Finding(
        severity=Severity.ERROR,
        defect=defect,
        key=key,
        version=shortcut.version,
        message=message,
        remedy=MAKE_AGAIN,
    )


def describe(shortcut: CheckedShortcut) -> str:
    """What people call it."""
    if shortcut.base is None:
        return f"anchor {shortcut.version}"
    return f"composite {shortcut.base}-{shortcut.version}"


def _shortcut_key(key: str) -> ParsedKey | None:
    try:
        parsed = parse_key(key)
    except FormatError:
        return None
    return parsed if parsed.kind in {KeyKind.ANCHOR, KeyKind.COMPOSITE} else None


def _read_one(
    run: Run, chain: Chain, key: str, parsed: ParsedKey
) -> CheckedShortcut | Finding | None:
    version, base = parsed.version, parsed.base_version
    if version is None or chain.head is None:
        return None
    ends = [end for end in (base, version) if end is not None]
    if max(ends) > chain.head:
        return _strange(key, version, f"the shortcut leads to a version above HEAD {chain.head}")
    absent = [end for end in ends if end not in chain.manifests]
    if absent:
        return Finding(
            severity=Severity.NOTE,
            defect=Defect.UNCHECKED,
            key=key,
            version=version,
            message=f"the manifest of version {absent[0]}, at an end of the shortcut, is not here",
            remedy="restore that manifest: then the shortcut can be checked",
        )
    target = chain.manifests[version]
    try:
        if base is None:
            return CheckedShortcut(key, None, version, load_anchor(run, target))
        start = point_of(chain.manifests[base])
        return CheckedShortcut(key, base, version, load_composite(run, start, target))
    except NotFoundError as err:
        if err.kind is not Kind.GONE:
            raise
        return None
    except (FormatError, IntegrityError) as err:
        found = finding_of(err, version=version, key=key)
        return Finding(
            severity=found.severity,
            defect=found.defect,
            key=key,
            version=version,
            message=found.message,
            remedy=MAKE_AGAIN,
        )


def _body_finding(
    shortcut: CheckedShortcut, key: str, size_bytes: int, present_bytes: int | None
) -> Finding:
    if present_bytes is None:
        message = f"{describe(shortcut)} names an object that is not there"
        return damaged_shortcut(shortcut, Defect.MISSING, key, message)
    message = f"the object has {present_bytes} bytes, {describe(shortcut)} says {size_bytes}"
    return damaged_shortcut(shortcut, Defect.SIZE, key, message)


def _strange(key: str, version: int, message: str) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        defect=Defect.FOREIGN,
        key=key,
        version=version,
        message=message,
        remedy=MAKE_AGAIN,
    )
