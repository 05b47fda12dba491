"""Keys pinned on day 30 lock every actor out when day 1 was unsigned: this says so beforehand.

With trusted keys every manifest's signature is checked. A signed version vouches by hash for all
below it, so what is not signed *above* the newest signed version is an error, because nobody with
these keys can follow there; what is not signed below it only keeps followers from going step by
step. Version 0 is never signed: whoever holds it is recognised by its fingerprint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.errors import IntegrityError
from deltastore.format.signing import MaySign
from deltastore.maintenance.findings import Defect, Finding, Severity
from deltastore.maintenance.fsck_shortcuts import describe
from deltastore.repository.history import require_signed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.format.signing import TrustedKeys
    from deltastore.maintenance.fsck_chain import Chain
    from deltastore.repository.run import Run


def check_signatures(run: Run, chain: Chain, trusted: TrustedKeys) -> None:
    """Add a finding for every stretch of versions, and every shortcut, that is not signed."""
    refused: dict[int, str] = {}
    for version, manifest in chain.manifests.items():
        try:
            require_signed(run, manifest, trusted)
        except IntegrityError as err:
            refused[version] = err.message
    newest = max((v for v in chain.manifests if v not in refused), default=-1)
    if newest > 0:
        refused.pop(0, None)
    for first, last in _stretches(sorted(refused)):
        above = last > newest
        which = "" if first == last else f" (and every version up to {last})"
        chain.findings.append(
            Finding(
                severity=Severity.ERROR if above else Severity.WARNING,
                defect=Defect.SIGNATURE,
                key=run.keys.version(first),
                version=first,
                message=refused[first] + which,
                remedy="followers with these keys do not go there: publish with a trusted key"
                if above
                else f"none needed for joiners: version {newest} is signed and vouches for it",
            )
        )
    chain.findings += _unsigned_shortcuts(chain, trusted)


def _unsigned_shortcuts(chain: Chain, trusted: TrustedKeys) -> Iterator[Finding]:
    for shortcut in chain.shortcuts:
        manifest = shortcut.manifest
        text = manifest.core.canonical_bytes()
        try:
            trusted.require(text, manifest.signatures, MaySign.SHORTCUTS, what=describe(shortcut))
        except IntegrityError as err:
            yield Finding(
                severity=Severity.WARNING,
                defect=Defect.SIGNATURE,
                key=shortcut.key,
                version=shortcut.version,
                message=err.message,
                remedy="followers with these keys do not use it: delete its manifest, then run"
                " `deltastore maintain --sign-key`",
            )


def _stretches(versions: list[int]) -> Iterator[tuple[int, int]]:
    first: int | None = None
    last = -1
    for version in versions:
        if first is not None and version != last + 1:
            yield first, last
            first = None
        first = version if first is None else first
        last = version
    if first is not None:
        yield first, last
