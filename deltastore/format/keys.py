"""Keys made by hand in five places drift apart: here they are formatted and parsed.

Formatting and parsing are exact inverses. Everything of a run lies under `<run>/` in its store (the
store adds its own prefix). Numbers have ten digits, so that lexical order is version order. Only
`hints/` is ever overwritten.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from deltastore.errors import FormatError, Kind
from deltastore.ids import check_name, check_version


class Hint(StrEnum):
    """The mutable objects of a run. Stale, ahead, missing or garbage: they decide nothing."""

    HEAD = "head"
    FLOOR = "floor"
    THROUGHPUT = "throughput"
    CHECKSUMS = "checksums"


class KeyKind(StrEnum):
    """What a key names."""

    RUN = "run"
    LAYOUT = "layout"
    SEGMENT = "segment"
    VERSION = "version"
    ANCHOR = "anchor"
    ANCHOR_FILE = "anchor_file"
    COMPOSITE = "composite"
    COMPOSITE_SEGMENT = "composite_segment"
    ROLLOUT = "rollout"
    HINT = "hint"


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """A key taken apart; fields that its kind does not have are None."""

    kind: KeyKind
    run: str
    version: int | None = None
    base_version: int | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys of one run. Names are validated by `check_name`."""

    run: str

    def __post_init__(self) -> None:
        check_name(self.run, "run name")

    @property
    def root(self) -> str:
        """Prefix of every key of the run."""
        return f"{self.run}/"

    @property
    def run_json(self) -> str:
        """The create-only record that makes the run exist."""
        return f"{self.run}/run.json"

    def layout(self, digest: str) -> str:
        """The tensor table of that digest."""
        return f"{self.run}/layout/{digest}.json"

    def segment(self, version: int, number: int, sha256: str) -> str:
        """Segment `number` of a delta; content-named, so a retry writes the same bytes."""
        return f"{self.run}/deltas/{_ten(version)}/{number:05d}-{sha256}.seg"

    @property
    def versions(self) -> str:
        """Prefix of the version manifests."""
        return f"{self.run}/versions/"

    def version(self, version: int) -> str:
        """The manifest that makes a version exist."""
        return f"{self.versions}{_ten(version)}.json"

    @property
    def anchors(self) -> str:
        """Prefix of anchor manifests and files."""
        return f"{self.run}/anchors/"

    def anchor(self, version: int) -> str:
        """The shortcut manifest of an anchor."""
        return f"{self.anchors}{_ten(version)}.json"

    def anchor_file(self, version: int, attempt: str, name: str) -> str:
        """A file of one attempt at an anchor, under the name a Hugging Face tool looks for."""
        check_name(name, "file name")
        return f"{self.anchors}{_ten(version)}/{check_name(attempt, 'attempt')}/{name}"

    def composite(self, base: int, version: int) -> str:
        """The shortcut manifest of a composite from `base` to `version`."""
        return f"{self.run}/composites/{_ten(base)}-{_ten(version)}.json"

    def composite_segment(
        self, base: int, version: int, attempt: str, number: int, sha256: str
    ) -> str:
        """Segment `number` of one attempt at a composite."""
        check_name(attempt, "attempt")
        folder = f"{self.run}/composites/{_ten(base)}-{_ten(version)}/{attempt}"
        return f"{folder}/{number:05d}-{sha256}.seg"

    def rollout(self, version: int, job_id: str, token: str, sha256: str) -> str:
        """The result of one lease."""
        check_name(job_id, "job id")
        check_name(token, "lease token")
        return f"{self.run}/rollouts/{_ten(version)}/{job_id}/{token}-{sha256}"

    def hint(self, hint: Hint) -> str:
        """One of the mutable objects."""
        return f"{self.run}/hints/{hint.value}"


_RUN = r"(?P<run>[A-Za-z0-9._-]+)"
_VERSION = r"(?P<version>\d{10})"
_BASE = r"(?P<base>\d{10})"
_NAME = r"[A-Za-z0-9._-]+"
_SHA = r"[0-9a-f]{64}"
_PATTERNS: tuple[tuple[KeyKind, re.Pattern[str]], ...] = (
    (KeyKind.RUN, re.compile(rf"{_RUN}/(?P<name>run\.json)")),
    (KeyKind.LAYOUT, re.compile(rf"{_RUN}/layout/(?P<name>{_SHA})\.json")),
    (KeyKind.SEGMENT, re.compile(rf"{_RUN}/deltas/{_VERSION}/(?P<name>\d{{5,}}-{_SHA}\.seg)")),
    (KeyKind.VERSION, re.compile(rf"{_RUN}/versions/{_VERSION}\.json")),
    (KeyKind.ANCHOR, re.compile(rf"{_RUN}/anchors/{_VERSION}\.json")),
    (KeyKind.ANCHOR_FILE, re.compile(rf"{_RUN}/anchors/{_VERSION}/(?P<name>{_NAME}/{_NAME})")),
    (KeyKind.COMPOSITE, re.compile(rf"{_RUN}/composites/{_BASE}-{_VERSION}\.json")),
    (
        KeyKind.COMPOSITE_SEGMENT,
        re.compile(rf"{_RUN}/composites/{_BASE}-{_VERSION}/(?P<name>{_NAME}/\d{{5,}}-{_SHA}\.seg)"),
    ),
    (
        KeyKind.ROLLOUT,
        re.compile(rf"{_RUN}/rollouts/{_VERSION}/(?P<name>{_NAME}/{_NAME}-{_SHA})"),
    ),
    (KeyKind.HINT, re.compile(rf"{_RUN}/hints/(?P<name>head|floor|throughput|checksums)")),
)


def parse_key(key: str) -> ParsedKey:
    """Take a key apart; FormatError(key) when no rule of this module makes it."""
    for kind, pattern in _PATTERNS:
        match = pattern.fullmatch(key)
        if match is not None:
            parts = match.groupdict()
            return ParsedKey(
                kind,
                parts["run"],
                None if parts.get("version") is None else int(parts["version"]),
                None if parts.get("base") is None else int(parts["base"]),
                parts.get("name"),
            )
    raise FormatError(f"key {key[:200]!r} is none of a run's keys", kind=Kind.KEY, key=key[:200])


def _ten(version: int) -> str:
    return f"{check_version(version):010d}"
