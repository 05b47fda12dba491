"""fsck holds shortcuts against the versions at their ends, and knows what retention took."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from deltastore.format.segment import SegmentIdentity, decode_segment, encode_segment
from deltastore.format.shortcut import AnchorManifest, CompositeManifest
from deltastore.format.signing import SigningKey, TrustedKeys, sign_with
from deltastore.maintenance.anchors import write_anchor
from deltastore.maintenance.composites import run_composites
from deltastore.maintenance.fsck import check_run
from deltastore.repository.floor import Floor, Raise, write_floor
from deltastore.storage.store import PutMode
from deltastore.storage.wrapper import StoreWrapper
from deltastore.testing.clock import FakeClock
from tests.unit.chain_life.kit import Chain
from tests.unit.maintenance.conftest import errors, found

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.maintenance.findings import Report
    from deltastore.storage.store import ObjectStore

HEAD = 20
ANCHOR = 16


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    """A run of 20 deltas with an anchor at 16 and composites 0-8 and 8-16 (and 0-16)."""
    chain = Chain(tmp_path)
    chain.extend(HEAD)
    write_anchor(chain.run, ANCHOR, clock=chain.clock)
    run_composites(chain.run, clock=chain.clock)
    return chain


def check(
    chain: Chain,
    *,
    deep: bool = True,
    trusted: TrustedKeys | None = None,
    store: ObjectStore | None = None,
) -> Report:
    """What fsck says of the chain."""
    run = chain.open(store)
    return check_run(run, deep=deep, streams=2, clock=FakeClock(), trusted=trusted)


def damage(chain: Chain, key: str) -> None:
    """Flip a bit in the middle of an object."""
    body = bytearray(chain.run.store.get(key))
    body[len(body) // 2] ^= 1
    chain.run.store.put(key, bytes(body), mode=PutMode.OVERWRITE)


def drop(chain: Chain, *parts: str) -> list[str]:
    """Delete the objects whose keys contain one of these; return them."""
    keys = [key for part in parts for key in chain.list_keys(part)]
    chain.run.store.delete(keys)
    return keys


@pytest.mark.parametrize("deep", [False, True])
def test_shortcuts_that_hold(chain: Chain, deep: bool) -> None:
    """Whole shortcuts are no findings; a deep check proves each by the state it leads to."""
    report = check(chain, deep=deep)
    assert report.findings == ()
    assert report.shortcuts == 4
    assert report.proved == (4 if deep else 0)
    assert report.replayed == (HEAD + 1 if deep else 0)


@pytest.mark.parametrize(
    "where", [f"/anchors/{ANCHOR:010d}/", "/composites/0000000008-0000000016/"]
)
def test_shortcut_without_a_body(chain: Chain, where: str) -> None:
    """A shortcut that names an absent object is an error, but no version is lost by it."""
    (key, *_others) = chain.list_keys(where)
    chain.run.store.delete([key])
    report = check(chain, deep=False)
    assert found(report) == [("error", "missing", ANCHOR, key)]
    assert "--repair" in report.findings[0].remedy


@pytest.mark.parametrize(
    "where", [f"/anchors/{ANCHOR:010d}/", "/composites/0000000008-0000000016/"]
)
def test_shortcut_with_a_flipped_bit(chain: Chain, where: str) -> None:
    """A flipped bit in a shortcut's body is found by the deep check, and the body is named."""
    bodies = [key for key in chain.list_keys(where) if key.endswith((".safetensors", ".seg"))]
    damage(chain, bodies[0])
    assert check(chain, deep=False).ok
    report = check(chain)
    assert found(report) == [("error", "digest", ANCHOR, bodies[0])]
    assert report.replayed == HEAD + 1
    assert report.proved == report.shortcuts


def test_unreadable_shortcut(chain: Chain) -> None:
    """A shortcut manifest that is not one is named; its bodies are not called orphans."""
    key = chain.run.keys.anchor(ANCHOR)
    chain.run.store.put(key, b"{}\n[]", mode=PutMode.OVERWRITE)
    assert found(check(chain)) == [("error", "format", ANCHOR, key)]


def test_shortcut_to_another_state(chain: Chain) -> None:
    """An anchor that leads to another version than the one of its number is an error."""
    key = chain.run.keys.anchor(ANCHOR)
    other = chain.run.keys.anchor(12)
    text = chain.run.store.get(key)
    chain.run.store.put(other, text, mode=PutMode.CREATE)
    assert found(check(chain, deep=False)) == [("error", "foreign", 12, other)]


def test_shortcut_above_head(chain: Chain) -> None:
    """A shortcut to a version that nobody committed is an error."""
    key = chain.run.keys.composite(HEAD, HEAD + 4)
    chain.run.store.put(key, b"x", mode=PutMode.CREATE)
    assert found(check(chain, deep=False)) == [("error", "foreign", HEAD + 4, key)]


def test_composite_whose_blocks_lie(chain: Chain) -> None:
    """Blocks that declare the right sum and do something else are found on the state they start
    from: a digest and a sum that fit prove nothing of the weights."""
    import hashlib

    run, key = chain.run, chain.run.keys.composite(8, 16)
    manifest = CompositeManifest.from_bytes(run.store.get(key))
    (ref,) = manifest.core.segments
    identity = SegmentIdentity(run.layout.digest, 8, 16)
    first, *others = decode_segment(run.layout, run.store.get(ref.key)).blocks
    lies = [replace(first, values=first.values + first.values), *others]
    body = encode_segment(run.layout, identity, lies)
    digest = hashlib.sha256(body).hexdigest()
    segment = run.keys.composite_segment(8, 16, manifest.core.attempt, 0, digest)
    run.store.put(segment, body, mode=PutMode.CREATE)
    lying = replace(ref, key=segment, size_bytes=len(body), sha256=digest)
    core = replace(manifest.core, segments=(lying,))
    run.store.put(key, CompositeManifest(core).to_bytes(), mode=PutMode.OVERWRITE)
    assert errors(check(chain, deep=False).findings) == []
    report = check(chain)
    assert [(f.defect.value, f.key) for f in report.findings if f.severity.value == "error"] == [
        ("fingerprint", key)
    ]


def test_anchor_that_lies_about_a_tensor(chain: Chain) -> None:
    """An anchor whose fingerprints of single tensors add up and are wrong is found."""
    key = chain.run.keys.anchor(ANCHOR)
    core = AnchorManifest.from_bytes(chain.run.store.get(key)).core
    first, second, *others = core.tensor_fingerprints
    lying = AnchorManifest(replace(core, tensor_fingerprints=(second, first, *others)))
    chain.run.store.put(key, lying.to_bytes(), mode=PutMode.OVERWRITE)
    assert found(check(chain)) == [("error", "fingerprint", ANCHOR, key)]


def test_damage_that_a_composite_bridges(chain: Chain) -> None:
    """A lost delta loses the versions up to the next shortcut, not those after it."""
    (key,) = drop(chain, f"/deltas/{11:010d}/")
    report = check(chain)
    assert found(report) == [("error", "missing", 11, key), ("error", "unreachable", 11, None)]
    assert "versions 11 to 15 cannot" in report.findings[1].message
    assert report.replayed == HEAD + 1 - 5


def test_orphaned_attempts(chain: Chain) -> None:
    """Bodies of an attempt that lost, or is being made, are orphans: notes."""
    lost = chain.run.keys.anchor_file(ANCHOR, "f" * 32, "model.safetensors")
    ahead = chain.run.keys.anchor_file(HEAD, "f" * 32, "model.safetensors")
    for key in (lost, ahead):
        chain.run.store.put(key, b"x", mode=PutMode.CREATE)
    assert found(check(chain)) == [
        ("note", "orphan", ANCHOR, lost),
        ("note", "orphan", HEAD, ahead),
    ]


def test_shortcut_that_went_meanwhile(chain: Chain) -> None:
    """What retention deletes while the check runs is no finding."""

    class Vanishing(StoreWrapper):
        def list(self, prefix, *, start_after=None):
            listed = list(super().list(prefix, start_after=start_after))
            if prefix == chain.run.keys.root:
                drop(chain, "/composites/0000000008-0000000016", f"/anchors/{ANCHOR:010d}")
            return iter(listed)

    report = check(chain, store=Vanishing(chain.run.store))
    assert report.findings == ()


def test_what_retention_took_is_not_missing(chain: Chain) -> None:
    """CASE C5: below the floor bodies may be gone; above it nothing may."""
    drop(chain, *(f"/deltas/{v:010d}/" for v in range(1, ANCHOR + 1)), "/composites/")
    write_floor(chain.run, Floor((Raise(ANCHOR, 0),)))
    report = check(chain)
    assert (report.findings, report.floor, report.gone) == ((), ANCHOR, ANCHOR)
    assert report.replayed == 1 + HEAD - ANCHOR + 1  # version 0, and from the floor up
    (_key,) = drop(chain, f"/deltas/{ANCHOR + 1:010d}/")
    assert errors(check(chain).findings) == [("missing", ANCHOR + 1), ("unreachable", ANCHOR + 1)]


def test_floor_without_a_whole_state(chain: Chain) -> None:
    """A floor that nothing whole stands at loses everything from there on, and says so."""
    drop(
        chain,
        *(f"/deltas/{v:010d}/" for v in range(1, ANCHOR + 1)),
        "/composites/",
        "/anchors/00000000",
    )
    write_floor(chain.run, Floor((Raise(ANCHOR, 0),)))
    report = check(chain, deep=False)
    assert errors(report.findings)[-1] == ("unreachable", ANCHOR)


def test_floor_above_head_is_not_believed(chain: Chain) -> None:
    """A hint decides nothing: a floor above HEAD hides no damage."""
    (_key,) = drop(chain, f"/deltas/{19:010d}/")
    write_floor(chain.run, Floor((Raise(HEAD + 100, 0),)))
    assert errors(check(chain).findings) == [("missing", 19), ("unreachable", 19)]


def test_region_that_starts_at_an_anchor(chain: Chain) -> None:
    """A region that was restarted holds a chain from an anchor on: that is whole."""
    keep = [
        f"/{what}/{v:010d}" for what in ("versions", "deltas") for v in range(ANCHOR + 1, HEAD + 1)
    ]
    keep += [
        f"/anchors/{ANCHOR:010d}",
        f"/versions/{ANCHOR:010d}",
        "/run.json",
        "/layout/",
        "/hints/",
    ]
    chain.run.store.delete([k for k in chain.list_keys() if not any(part in k for part in keep)])
    report = check(chain)
    assert (report.findings, report.replayed) == ((), HEAD - ANCHOR + 1)
    drop(chain, f"/anchors/{ANCHOR:010d}")
    report = check(chain)
    assert errors(report.findings)[0] == ("hole", ANCHOR)


@pytest.fixture(scope="module")
def keys() -> dict[str, SigningKey]:
    """One key for each role, and a stranger's."""
    return {name: SigningKey.generate() for name in ("trainer", "worker", "stranger")}


def trust(keys: dict[str, SigningKey]) -> TrustedKeys:
    """The trainer may sign versions, the worker shortcuts."""
    return TrustedKeys.of([keys["trainer"].public], [keys["worker"].public])


def test_signed_run(tmp_path: Path, keys: dict[str, SigningKey]) -> None:
    """A run whose manifests are signed as they should be has no findings."""
    chain = Chain(tmp_path, signer=sign_with(keys["trainer"]))
    chain.extend(9)
    run_composites(chain.run, clock=chain.clock, signer=sign_with(keys["worker"]))
    assert check(chain, trusted=trust(keys)).findings == ()


def test_unsigned_head_is_an_error(tmp_path: Path, keys: dict[str, SigningKey]) -> None:
    """Unsigned versions above the newest signed one are an error, below it a warning."""
    chain = Chain(tmp_path)
    chain.extend(3)
    chain.signer = sign_with(keys["trainer"])
    chain.extend(2)
    chain.signer = sign_with(keys["stranger"])
    chain.extend(2)
    report = check(chain, deep=False, trusted=trust(keys))
    version = chain.run.keys.version
    assert found(report) == [
        ("warning", "signature", 1, version(1)),
        ("error", "signature", 6, version(6)),
    ]
    assert "up to 3" in report.findings[0].message
    assert keys["stranger"].public.key_id in report.findings[1].message


def test_shortcut_with_the_wrong_role(tmp_path: Path, keys: dict[str, SigningKey]) -> None:
    """A shortcut that the trainer's key signed, which may not, is a warning."""
    chain = Chain(tmp_path, signer=sign_with(keys["trainer"]))
    chain.extend(9)
    run_composites(chain.run, clock=chain.clock, signer=sign_with(keys["trainer"]))
    report = check(chain, deep=False, trusted=trust(keys))
    assert [(f.severity.value, f.defect.value) for f in report.findings] == [
        ("warning", "signature")
    ]
    assert "may not sign shortcuts" in report.findings[0].message
