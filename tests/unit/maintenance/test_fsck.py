"""fsck finds every damage, says what is lost with it, and calls nothing lost that is there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from deltastore.errors import Kind, StorageError
from deltastore.format.canonical import canonical_json
from deltastore.format.fingerprint import Fingerprint
from deltastore.format.keys import Hint
from deltastore.format.segment import SegmentIdentity, decode_segment, encode_segment
from deltastore.storage.wrapper import StoreWrapper
from tests.unit.maintenance.conftest import (
    FULL_AT,
    HEAD,
    NAME,
    Copy,
    errors,
    found,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.format.manifest import VersionManifest
    from deltastore.storage.store import ByteRange, ObjectInfo

VERSIONS = f"{NAME}/versions/"


@pytest.mark.parametrize("deep", [False, True])
def test_whole_run(copy: Copy, deep: bool) -> None:
    """A whole run has no findings, and all its versions are counted and replayed."""
    report = copy.check(deep=deep)
    assert (report.findings, report.ok, report.deep) == ((), True, deep)
    assert (report.head, report.versions) == (HEAD, HEAD + 1)
    assert report.replayed == (HEAD + 1 if deep else 0)
    objects = list(copy.store.list(""))
    assert report.objects == len(objects)
    assert report.size_bytes == sum(info.size_bytes for info in objects)


@pytest.mark.parametrize("deep", [False, True])
def test_missing_segment(copy: Copy, deep: bool) -> None:
    """A lost segment is named, with the versions that are lost with it; from the next full version
    on the run is whole again."""
    key = copy.segment(1)
    copy.store.delete([key])
    report = copy.check(deep=deep)
    assert found(report) == [
        ("error", "missing", 1, key),
        ("error", "unreachable", 1, None),
    ]
    assert "versions 1 to 2" in report.findings[1].message
    assert report.replayed == (3 if deep else 0)  # 0, 3 and 4


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_size(copy: Copy, deep: bool, change: int) -> None:
    """A segment that is shorter or longer than its manifest says is found without reading it."""
    key = copy.segment(2)
    body = copy.store.get(key)
    copy.write(key, body[:change] if change < 0 else body + b"\0")
    assert found(copy.check(deep=deep)) == [
        ("error", "size", 2, key),
        ("error", "unreachable", 2, None),
    ]


def test_flipped_bit_in_segment(copy: Copy) -> None:
    """A flipped bit is invisible to the shallow check and found by the deep one."""
    key = copy.segment(4)
    body = bytearray(copy.store.get(key))
    body[len(body) // 2] ^= 1
    copy.write(key, bytes(body))
    assert copy.check(deep=False).ok
    assert found(copy.check(deep=True)) == [
        ("error", "digest", 4, key),
        ("error", "unreachable", 4, None),
    ]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_flipped_bit_in_file(copy: Copy, name: str) -> None:
    """Every file of a full version is read by the deep check, not only weights."""
    key = copy.file(FULL_AT, name)
    body = bytearray(copy.store.get(key))
    body[-1] ^= 1
    copy.write(key, bytes(body))
    report = copy.check(deep=True)
    assert errors(report.findings)[0] == ("digest", FULL_AT)
    assert report.findings[0].key == key
    assert "versions 3 to 4" in report.findings[-1].message


def test_two_damages(copy: Copy) -> None:
    """One damage does not hide the next: both are named, even of one version."""
    config, weights = copy.file(0, "config.json"), copy.file(0, "model.safetensors")
    for key in (config, weights, copy.segment(4)):
        copy.write(key, bytes(len(copy.store.get(key))))
    report = copy.check(deep=True)
    named = {f.key for f in report.findings if f.defect.value == "digest"}
    assert named == {config, weights, copy.segment(4)}
    assert report.replayed == 1  # only the full version 3


def test_hole(copy: Copy) -> None:
    """CASE C3: manifests missing inside are one finding each run, never taken for the end."""
    copy.store.delete([f"{VERSIONS}{1:010d}.json", f"{VERSIONS}{2:010d}.json"])
    report = copy.check(deep=True)
    assert found(report) == [
        ("error", "hole", 1, f"{VERSIONS}{1:010d}.json"),
        ("error", "unreachable", 1, None),
    ]
    assert "versions 1 to 2 are missing below HEAD 4" in report.findings[0].message
    assert (report.head, report.replayed) == (HEAD, 3)


def test_stray_number_far_above(copy: Copy) -> None:
    """A stray manifest with a huge number is one hole and one unreadable object, found at once."""
    stray = f"{VERSIONS}{9_999_999_999:010d}.json"
    copy.write(stray, b"x")
    report = copy.check(deep=True)
    assert errors(report.findings) == [
        ("format", 9_999_999_999),
        ("hole", HEAD + 1),
        ("unreachable", HEAD + 1),
    ]
    assert report.replayed == HEAD + 1


def test_lost_start(copy: Copy) -> None:
    """A chain without version 0 cannot be replayed up to its first full version."""
    copy.store.delete([f"{VERSIONS}{0:010d}.json"])
    report = copy.check(deep=True)
    assert errors(report.findings) == [("hole", 1), ("unreachable", 1)]
    assert report.replayed == 2


def test_lost_head(copy: Copy) -> None:
    """A lost newest manifest leaves orphans and a hint ahead: notes, because nothing names it."""
    key = copy.segment(HEAD)
    copy.store.delete([f"{VERSIONS}{HEAD:010d}.json"])
    report = copy.check(deep=True)
    assert report.ok
    assert found(report) == [
        ("note", "orphan", HEAD, key),
        ("note", "hint", HEAD, f"{NAME}/hints/head"),
    ]


def test_unreadable_manifest(copy: Copy) -> None:
    """A manifest that is not one is named, its segments are not called orphans."""
    copy.write(f"{VERSIONS}{2:010d}.json", b"{}\n[]")
    assert errors(copy.check(deep=True).findings) == [("format", 2), ("unreachable", 2)]
    assert all(f.defect.value != "orphan" for f in copy.check(deep=True).findings)


def test_foreign_manifest(copy: Copy) -> None:
    """A manifest of another run under this run's key is called foreign."""
    _commit(copy, replace(copy.manifest(4), core=replace(copy.manifest(4).core, run_id="0" * 32)))
    assert errors(copy.check(deep=False).findings) == [("foreign", 4), ("unreachable", 4)]


@pytest.mark.parametrize(
    "change",
    [{"base_policy_hash": "0" * 64}, {"generation": 1}],
    ids=["other history", "older writer"],
)
def test_broken_link(copy: Copy, change: dict[str, object]) -> None:
    """CASE R3: a version of another history, or of a writer that had lost its right, is found."""
    manifest = copy.manifest(4)
    _commit(copy, replace(manifest, core=replace(manifest.core, **change)))  # type: ignore[arg-type]
    assert errors(copy.check(deep=True).findings) == [("link", 4), ("unreachable", 4)]


def test_changed_manifest_in_the_middle(copy: Copy) -> None:
    """A manifest that the history above does not vouch for is the damaged one, not the next."""
    manifest = copy.manifest(1)
    _commit(copy, replace(manifest, core=replace(manifest.core, writer_nonce="0" * 32)))
    report = copy.check(deep=True)
    assert errors(report.findings) == [("link", 1), ("unreachable", 1)]
    assert report.findings[0].key == f"{VERSIONS}{1:010d}.json"
    assert report.replayed == 3


@pytest.mark.parametrize("hinted", [True, False])
def test_changed_manifest_below_head(copy: Copy, hinted: bool) -> None:
    """When the newest two contradict each other the one that the hint names is believed; without a
    hint it is the newest that is wrong."""
    manifest = copy.manifest(FULL_AT)
    _commit(copy, replace(manifest, core=replace(manifest.core, writer_nonce="0" * 32)))
    if not hinted:
        copy.store.delete([f"{NAME}/hints/head"])
    wrong = FULL_AT if hinted else HEAD
    assert errors(copy.check(deep=True).findings) == [("link", wrong), ("unreachable", wrong)]


def test_changed_head(copy: Copy) -> None:
    """No manifest vouches for the newest version: the hint's other hash is a warning."""
    manifest = copy.manifest(HEAD)
    _commit(copy, replace(manifest, core=replace(manifest.core, writer_nonce="0" * 32)))
    assert found(copy.check(deep=True)) == [("warning", "hint", HEAD, f"{NAME}/hints/head")]


def test_wrong_fingerprint(copy: Copy) -> None:
    """A version that declares another state than its blocks make is found by the deep check."""
    manifest = copy.manifest(4)
    core = replace(manifest.core, fingerprint_after=Fingerprint(1, 2))
    _commit(copy, replace(manifest, core=core))
    assert copy.check(deep=False).ok
    assert errors(copy.check(deep=True).findings) == [("fingerprint", 4), ("unreachable", 4)]


def test_blocks_that_lie(copy: Copy) -> None:
    """Blocks whose declared change adds up but is not what they do to the weights are found."""
    import hashlib

    run, manifest = copy.run(), copy.manifest(4)
    (ref,) = manifest.core.segments
    identity = SegmentIdentity(run.layout.digest, 3, 4)
    blocks = decode_segment(run.layout, copy.store.get(ref.key)).blocks
    lies = [replace(blocks[0], values=blocks[0].values + blocks[0].values), *blocks[1:]]
    body = encode_segment(run.layout, identity, lies)
    digest = hashlib.sha256(body).hexdigest()
    key = run.keys.segment(4, 0, digest)
    copy.write(key, body)
    lying = replace(ref, key=key, size_bytes=len(body), sha256=digest)
    _commit(copy, replace(manifest, core=replace(manifest.core, segments=(lying,))))
    assert copy.check(deep=False).ok
    assert errors(copy.check(deep=True).findings) == [("fingerprint", 4), ("unreachable", 4)]


def test_orphans_and_strays(copy: Copy) -> None:
    """What nobody names is a note or a warning, never an error."""
    segment = f"{NAME}/deltas/{2:010d}/00007-{'a' * 64}.seg"
    ahead = f"{NAME}/deltas/{9:010d}/00000-{'a' * 64}.seg"
    anchor = f"{NAME}/anchors/{0:010d}/attempt/x"
    layout = f"{NAME}/layout/{'a' * 64}.json"
    for key in (segment, ahead, anchor, layout, f"{NAME}/notes.txt"):
        copy.write(key, b"x")
    report = copy.check(deep=True)
    assert report.ok
    assert sorted(found(report), key=str) == sorted(
        [
            ("note", "orphan", 0, anchor),
            ("note", "orphan", 2, segment),
            ("note", "orphan", 9, ahead),
            ("note", "orphan", None, layout),
            ("warning", "foreign", None, f"{NAME}/notes.txt"),
        ],
        key=str,
    )


def test_rollouts_are_left_alone(copy: Copy) -> None:
    """Results of rollouts belong to no version and are no orphans."""
    copy.write(f"{NAME}/rollouts/{2:010d}/job/{'1' * 32}-{'a' * 64}", b"x")
    assert copy.check(deep=True).findings == ()


@pytest.mark.parametrize("text", [b"", b"garbage", b"[]", canonical_json({"version": 1})])
def test_hints_decide_nothing(copy: Copy, text: bytes) -> None:
    """A stale or garbage hint is no finding at all."""
    copy.write(f"{NAME}/hints/{Hint.HEAD}", text)
    assert copy.check(deep=True).findings == ()


def test_no_version(copy: Copy) -> None:
    """A run whose creation was cut short is said to be that."""
    copy.store.delete([f"{VERSIONS}{v:010d}.json" for v in range(HEAD + 1)])
    report = copy.check(deep=True)
    assert (report.head, report.ok) == (None, False)
    assert errors(report.findings) == [("hole", 0)]
    assert "init" in report.findings[0].remedy


def test_stale_listing(copy: Copy) -> None:
    """CASE S8: what a listing forgets is looked for by its key before it is called missing."""
    hidden = {copy.segment(1), f"{VERSIONS}{2:010d}.json", f"{VERSIONS}{HEAD:010d}.json"}
    report = copy.check(deep=True, store=_Forgetful(copy.store, hidden))
    assert report.findings == ()
    assert (report.head, report.replayed) == (HEAD, HEAD + 1)


def test_store_failure_is_not_damage(copy: Copy) -> None:
    """A store that fails says nothing of the run: the error passes through."""
    with pytest.raises(StorageError, match="down"):
        copy.check(deep=True, store=_Failing(copy.store, ".seg"))


def test_progress_reaches_its_total(copy: Copy) -> None:
    """Progress grows and ends at the bytes of all versions."""
    from deltastore.maintenance.fsck import check_run
    from deltastore.testing.clock import FakeClock

    seen: list[tuple[int, int]] = []
    check_run(
        copy.run(),
        deep=True,
        streams=1,
        clock=FakeClock(),
        progress=lambda done, total: seen.append((done, total)),
    )
    total = sum(copy.manifest(v).core.delta_bytes for v in range(HEAD + 1))
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


def _commit(copy: Copy, manifest: VersionManifest) -> None:
    copy.write(f"{VERSIONS}{manifest.core.version:010d}.json", manifest.to_bytes())


class _Forgetful(StoreWrapper):
    """A store whose listings lack some keys."""

    def __init__(self, inner: object, hidden: set[str]) -> None:
        super().__init__(inner)  # type: ignore[arg-type]
        self._hidden = hidden

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        listed = super().list(prefix, start_after=start_after)
        return (info for info in listed if info.key not in self._hidden)


class _Failing(StoreWrapper):
    """A store that is down for some keys."""

    def __init__(self, inner: object, ending: str) -> None:
        super().__init__(inner)  # type: ignore[arg-type]
        self._ending = ending

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        if key.endswith(self._ending):
            raise StorageError("the store is down", kind=Kind.UNAVAILABLE)
        return super().get(key, byte_range)
