"""One unreadable manifest must not hide the ten damaged ones after it: the walk goes on.

Reads every manifest of a run, links each to the one before it where both can be read, and keeps
what later checks need: which versions are damaged, and from where the chain can start again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deltastore.errors import FormatError, IntegrityError, Kind, NotFoundError
from deltastore.format.canonical import parse_canonical_json
from deltastore.format.keys import Hint
from deltastore.format.manifest import VersionKind
from deltastore.format.shortcut import AnchorCore
from deltastore.ids import MAX_VERSION
from deltastore.maintenance.findings import RESTORE, Defect, Finding, Severity, finding_of
from deltastore.repository.fetch import load_manifest
from deltastore.repository.floor import read_floor
from deltastore.repository.points import ActiveVersion, check_link
from deltastore.repository.resolve import MAX_HINT_BYTES, list_versions, version_exists

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deltastore.format.manifest import VersionManifest
    from deltastore.format.shortcut import AnchorManifest, CompositeManifest
    from deltastore.repository.run import Run

MAX_PROBES = 1024  # numbers a listing may have forgotten in one gap: more is a stray key above HEAD


@dataclass(slots=True)
class CheckedShortcut:
    """A shortcut that agrees with the versions at its ends; checks of its bodies add to it.

    Args:
        key: of its manifest.
        base: None for an anchor.
        whole: whether all its bodies are there and, after a deep check, are what it names.
        proved: whether it leads to the state that it should.
    """

    key: str
    base: int | None
    version: int
    manifest: AnchorManifest | CompositeManifest
    whole: bool = True
    proved: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of its bodies."""
        return self.manifest.core.size_bytes

    def bodies(self) -> list[tuple[str, int, str]]:
        """Key, size and SHA-256 of its bodies."""
        core = self.manifest.core
        if isinstance(core, AnchorCore):
            return [(f.key, f.size_bytes, f.sha256) for f in core.files if f.key is not None]
        return [(s.key, s.size_bytes, s.sha256) for s in core.segments]


@dataclass(slots=True)
class Chain:
    """What is known of a run's chain so far; checks add to it.

    Args:
        first, head: lowest and newest committed version; None when there is none.
        hint: version and policy hash that the head hint names; a witness, never a judge.
        manifests: the readable ones, by version.
        damaged: versions that their own objects cannot make.
        findings: in the order in which they were made.
        replayed: versions rebuilt and proved so far.
        floor: the advertised one, where it can be meant: bodies at or below it may be gone.
        gone: versions whose bodies retention took, or that never were here: no damage.
        shortcuts: anchors and composites that agree with the versions at their ends.
    """

    first: int | None = None
    head: int | None = None
    hint: tuple[int, str] | None = None
    manifests: dict[int, VersionManifest] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    replayed: int = 0
    floor: int = 0
    gone: set[int] = field(default_factory=set)
    shortcuts: list[CheckedShortcut] = field(default_factory=list)

    def damage(self, finding: Finding) -> None:
        """Note an error, and that its version cannot be made from what is there."""
        self.findings.append(finding)
        if finding.version is not None:
            self.damaged.add(finding.version)

    def is_unread(self, version: int | None) -> bool:
        """Whether it is a committed version whose manifest is missing or cannot be read."""
        if version is None or self.first is None or self.head is None:
            return False
        return self.first <= version <= self.head and version not in self.manifests

    def reachable(self) -> set[int]:
        """Versions that can be rebuilt from this bucket, by their own bodies or by shortcuts."""
        ways: dict[int, list[int | None]] = {}
        for shortcut in self.shortcuts:
            if shortcut.whole:
                ways.setdefault(shortcut.version, []).append(shortcut.base)
        found: set[int] = set()
        for version in sorted(self.manifests):
            bases = ways.get(version, [])
            if version not in self.damaged and version not in self.gone:
                full = self.manifests[version].core.kind is VersionKind.FULL
                bases = [*bases, None if full else version - 1]
            if any(base is None or base in found for base in bases):
                found.add(version)
        return found

    def unreachable(self) -> Iterator[tuple[int, int]]:
        """Runs of versions (first, last) that cannot be rebuilt and should be."""
        if self.first is None or self.head is None:
            return
        reachable = self.reachable()
        broken_since: int | None = None
        # A gap has its first number in `damaged`; walking over its others could take for ever.
        for version in sorted(self.manifests.keys() | self.damaged):
            if version in reachable:
                if broken_since is not None:
                    yield broken_since, version - 1
                broken_since = None
            elif broken_since is None and version >= self.floor:
                broken_since = version
        if broken_since is not None:
            yield broken_since, self.head

    def report_unreachable(self) -> None:
        """Add what the damage means: which versions nobody can rebuild from this bucket."""
        for first, last in self.unreachable():
            which = f"version {first}" if first == last else f"versions {first} to {last}"
            self.findings.append(
                Finding(
                    severity=Severity.ERROR,
                    defect=Defect.UNREACHABLE,
                    key=None,
                    version=first,
                    message=f"{which} cannot be rebuilt from this bucket",
                    remedy="restore what the findings above name (`deltastore verify --repair"
                    " --from OTHER_REGION`), or publish a full version",
                )
            )


def read_chain(run: Run, *, streams: int) -> Chain:
    """Every manifest of the run, read by `streams` requests at once, and linked."""
    chain = Chain(hint=_read_head_hint(run))
    present = _present_versions(run)
    if not present:
        chain.findings.append(
            Finding(
                severity=Severity.ERROR,
                defect=Defect.HOLE,
                key=run.keys.version(0),
                version=0,
                message="the run has no version at all: its creation was cut short",
                remedy="run the same `deltastore init` again to finish it",
            )
        )
        return chain
    chain.first, chain.head = min(present), max(present)
    versions = sorted(present)
    with ThreadPoolExecutor(streams, thread_name_prefix="fsck") as pool:
        read = pool.map(lambda version: _read_version(run, version), versions)
        for version, found in zip(versions, read, strict=True):
            if isinstance(found, Finding):
                chain.damage(found)
            else:
                chain.manifests[version] = found
    for finding in sorted(_contradictions(run, chain), key=lambda found: found.version or 0):
        chain.damage(finding)
    _report_holes(run, chain, present)
    _read_floor(run, chain)
    return chain


def _present_versions(run: Run) -> set[int]:
    """Committed versions: the listing, what it forgot, and what was committed since."""
    present = set(list_versions(run))
    if not present:
        return {0} if version_exists(run, 0) else set()
    above = max(present) + 1
    while above <= MAX_VERSION and version_exists(run, above):
        present.add(above)
        above += 1
    for first, last in list(_gaps(sorted(present))):
        if last - first < MAX_PROBES:
            present.update(v for v in range(first, last + 1) if version_exists(run, v))
    return present


def _read_version(run: Run, version: int) -> VersionManifest | Finding:
    try:
        return load_manifest(run, version)
    except NotFoundError as err:
        if err.kind is not Kind.VERSION_MISSING:
            raise
        return finding_of(err, version=version, key=run.keys.version(version))
    except (FormatError, IntegrityError) as err:
        # The damaged object is the manifest, whatever object it wrongly names.
        key = run.keys.version(version)
        return replace(finding_of(err, version=version, key=key), key=key, remedy=RESTORE)


def _contradictions(run: Run, chain: Chain) -> Iterator[Finding]:
    """Versions that do not continue the one before them, walking down from HEAD.

    Where two manifests contradict each other the one that the history above (for HEAD, the hint)
    vouches for is believed: a changed manifest is damage of its own version, not of the next.
    """
    vouched = _is_hinted(chain)  # whether something believed names this version's hash
    disbelieved: int | None = None
    for version in sorted(chain.manifests, reverse=True):
        manifest, base = chain.manifests[version], chain.manifests.get(version - 1)
        if base is None or version == disbelieved:
            vouched = False
            continue
        if manifest.core.base_policy_hash != base.policy_hash and (
            vouched or not _continues(chain, version - 1)
        ):
            disbelieved = version - 1
            yield Finding(
                severity=Severity.ERROR,
                defect=Defect.LINK,
                key=run.keys.version(version - 1),
                version=version - 1,
                message=f"this is not the version {version - 1} that version {version} continues",
                remedy=RESTORE,
            )
            continue
        try:
            check_link(ActiveVersion.of(base), manifest)
        except IntegrityError as err:
            yield finding_of(err, version=version, key=run.keys.version(version))
            vouched = False
        else:
            vouched = True


def _is_hinted(chain: Chain) -> bool:
    head = None if chain.head is None else chain.manifests.get(chain.head)
    return head is not None and chain.hint == (head.core.version, head.policy_hash)


def _continues(chain: Chain, version: int) -> bool:
    """Whether a version names the hash of the one before it, as far as both are there."""
    base = chain.manifests.get(version - 1)
    return base is None or chain.manifests[version].core.base_policy_hash == base.policy_hash


def _report_holes(run: Run, chain: Chain, present: set[int]) -> None:
    """One finding per run of absent numbers: a lost prefix must not print a million lines."""
    for first, last in _gaps(sorted(present)):
        which = f"version {first} is" if first == last else f"versions {first} to {last} are"
        chain.damage(
            Finding(
                severity=Severity.ERROR,
                defect=Defect.HOLE,
                key=run.keys.version(first),
                version=first,
                message=f"{which} missing below HEAD {chain.head}",
                remedy="copy the manifests from another region: they are never deleted",
            )
        )


def _gaps(versions: Iterable[int]) -> Iterator[tuple[int, int]]:
    before: int | None = None
    for version in versions:
        if before is not None and version > before + 1:
            yield before + 1, version - 1
        before = version


def check_start(run: Run, chain: Chain) -> None:
    """A chain starts at version 0, or in a region that was restarted at a whole state.

    Call it when the shortcuts have been read.
    """
    if not chain.first:
        return
    manifest = chain.manifests.get(chain.first)
    if manifest is not None and manifest.core.kind is VersionKind.FULL:
        return
    if any(s.base is None and s.version == chain.first for s in chain.shortcuts):
        chain.gone.add(chain.first)  # its delta is of no use here, and need not be
        return
    chain.damage(
        Finding(
            severity=Severity.ERROR,
            defect=Defect.HOLE,
            key=run.keys.version(0),
            version=chain.first,
            message=f"the chain begins at version {chain.first}, which is no whole state here",
            remedy=RESTORE,
        )
    )


def _read_floor(run: Run, chain: Chain) -> None:
    floor = read_floor(run)
    if floor is None or chain.head is None:
        return
    if floor.version <= chain.head:
        chain.floor = floor.version
        return
    chain.findings.append(
        Finding(
            severity=Severity.WARNING,
            defect=Defect.HINT,
            key=run.keys.hint(Hint.FLOOR),
            version=floor.version,
            message=f"the floor is {floor.version}, HEAD is {chain.head}",
            remedy="none needed: it is not believed, and the next retention writes it again",
        )
    )


def _read_head_hint(run: Run) -> tuple[int, str] | None:
    """Version and policy hash that the hint names; None when it is missing or garbage."""
    try:
        text = run.store.get(run.keys.hint(Hint.HEAD))
        document = parse_canonical_json(text, what="head hint", max_bytes=MAX_HINT_BYTES)
    except FormatError:
        return None
    except NotFoundError as err:
        if err.kind is not Kind.OBJECT_MISSING:
            raise
        return None
    match document:
        case {"version": int(version), "policy_hash": str(policy_hash)}:
            return int(version), policy_hash
    return None
