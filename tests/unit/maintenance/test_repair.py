"""A repair brings back exactly the bytes that manifests name, or says that it cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from deltastore.errors import IntegrityError, Kind, StorageError
from deltastore.maintenance.anchors import write_anchor
from deltastore.maintenance.composites import run_composites
from deltastore.maintenance.fsck import check_run
from deltastore.maintenance.repair import Repaired, execute_repair, mend_run, plan_repair
from deltastore.maintenance.repair_record import damaged_opening, restore_opening
from deltastore.repository.rebuild import replay
from deltastore.repository.run import Run, open_run
from deltastore.storage.memory import MemoryStore
from deltastore.storage.store import PutMode
from deltastore.testing.clock import FakeClock
from deltastore.testing.faults import FaultyStore, Op, fail_at
from tests.unit.chain_life.kit import NAME, Chain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deltastore.maintenance.findings import Report

HEAD = 10


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    """A run of 10 deltas with an anchor at 8 and the composite 0-8."""
    chain = Chain(tmp_path)
    chain.extend(HEAD)
    write_anchor(chain.run, 8, clock=chain.clock)
    run_composites(chain.run, clock=chain.clock)
    return chain


def region_of(chain: Chain, *, shortcuts: bool = False) -> Run:
    """Another region of the same run: a copy, by default without its shortcuts."""
    store = MemoryStore("other")
    for info in chain.run.store.list(""):
        shortcut = "/composites/" in info.key or f"/anchors/{8:010d}" in info.key
        if shortcuts or not shortcut:
            store.put(info.key, chain.run.store.get(info.key), mode=PutMode.CREATE)
    return open_run(store, NAME)


def objects(run: Run) -> dict[str, bytes]:
    """Everything that is in the bucket, hints left out."""
    return {i.key: run.store.get(i.key) for i in run.store.list("") if "/hints/" not in i.key}


def check(run: Run) -> Report:
    """The deep check."""
    return check_run(run, deep=True, streams=2, clock=FakeClock())


def mend(run: Run, source: Run | None) -> tuple[list[Repaired], Report]:
    """Check, mend, check again, as the command does."""
    report, done = mend_run(
        run, check(run), source, check=lambda: check(run), clock=FakeClock(), streams=2
    )
    return done, report


def flip(run: Run, key: str) -> None:
    """Flip a bit in the middle of an object."""
    body = bytearray(run.store.get(key))
    body[len(body) // 2] ^= 1
    run.store.put(key, bytes(body), mode=PutMode.OVERWRITE)


def drop(run: Run, key: str) -> None:
    """Lose an object."""
    run.store.delete([key])


def shorten(run: Run, key: str) -> None:
    """Lose the end of an object."""
    run.store.put(key, run.store.get(key)[:-7], mode=PutMode.OVERWRITE)


def segment(run: Run, version: int) -> str:
    """Key of a delta's segment."""
    (info,) = run.store.list(f"{NAME}/deltas/{version:010d}/")
    return info.key


def weights_of_zero(run: Run, version: int) -> str:
    """Key of the weights of version 0."""
    infos = run.store.list(f"{NAME}/anchors/{0:010d}/")
    return next(i.key for i in infos if i.key.endswith(".safetensors"))


def manifest_of(run: Run, version: int) -> str:
    """Key of a version's manifest."""
    return run.keys.version(version)


@pytest.mark.parametrize("damage", [flip, drop, shorten])
@pytest.mark.parametrize("what", [segment, weights_of_zero, manifest_of])
def test_objects_come_back(
    chain: Chain,
    damage: Callable[[Run, str], None],
    what: Callable[[Run, int], str],
) -> None:
    """A lost, shortened or corrupt object of a version is copied from another region, byte for
    byte, and the run is whole again."""
    before, source = objects(chain.run), region_of(chain)
    damage(chain.run, what(chain.run, 5))
    done, report = mend(chain.run, source)
    assert [one.done for one in done] == [True]
    assert report.findings == ()
    assert objects(chain.run) == before


def test_a_plan_changes_nothing(chain: Chain) -> None:
    """A plan is only a plan: until it is carried out nothing is written."""
    source = region_of(chain)
    flip(chain.run, segment(chain.run, 5))
    before = objects(chain.run)
    plan = plan_repair(chain.run, check(chain.run), source)
    assert [(step.action.value, step.key) for step in plan] == [("copy", segment(chain.run, 5))]
    assert objects(chain.run) == before


def test_a_hole_is_filled_with_its_bodies(chain: Chain) -> None:
    """A hole of several manifests, whose bodies were lost with them, is filled."""
    before, source = objects(chain.run), region_of(chain)
    for version in (4, 5, 6):
        drop(chain.run, segment(chain.run, version))
        drop(chain.run, manifest_of(chain.run, version))
    done, report = mend(chain.run, source)
    assert [(one.repair.version, one.done) for one in done] == [(4, True), (5, True), (6, True)]
    assert report.ok
    assert objects(chain.run) == before


def test_one_damage_hides_another(chain: Chain) -> None:
    """A manifest that is wrong and still can be read is found only when the one above it is back:
    the repair goes on until a check finds nothing new."""
    before, source = objects(chain.run), region_of(chain)
    key = manifest_of(chain.run, 3)
    text = chain.run.store.get(key)
    chain.run.store.put(
        key, text.replace(b'"step_last":3', b'"step_last":4'), mode=PutMode.OVERWRITE
    )
    drop(chain.run, manifest_of(chain.run, 4))
    done, report = mend(chain.run, source)
    assert sorted((one.repair.version, one.done) for one in done) == [(3, True), (4, True)]
    assert report.findings == ()
    assert objects(chain.run) == before


def test_wrong_bytes_are_never_written(chain: Chain) -> None:
    """What the other region has is believed only if its digest is the manifest's: the damaged
    object stays as it is, and the chain goes on from an anchor."""
    source = region_of(chain)
    for run in (chain.run, source):
        flip(run, segment(run, 9))
    other = bytearray(source.store.get(segment(source, 9)))
    other[0] ^= 1
    source.store.put(segment(source, 9), bytes(other), mode=PutMode.OVERWRITE)
    damaged = chain.run.store.get(segment(chain.run, 9))
    done, report = mend(chain.run, source)
    assert [one.done for one in done] == [False]
    assert "SHA-256" in done[0].message
    assert chain.run.store.get(segment(chain.run, 9)) == damaged
    assert not report.ok


def test_a_forged_manifest_is_not_taken(chain: Chain) -> None:
    """A manifest whose hash the version above does not name is not copied."""
    source = region_of(chain)
    text = source.store.get(manifest_of(source, 6))
    forged = text.replace(b'"step_last":6', b'"step_last":7')
    assert forged != text
    source.store.put(manifest_of(source, 6), forged, mode=PutMode.OVERWRITE)
    drop(chain.run, manifest_of(chain.run, 6))
    done, report = mend(chain.run, source)
    assert [(one.repair.action.value, one.done) for one in done] == [("copy_manifest", False)]
    assert ("hole", 6) in [(f.defect.value, f.version) for f in report.findings]


def test_another_run_is_refused(chain: Chain, tmp_path: Path) -> None:
    """A source that holds another run of the same name is refused before anything is done."""
    stranger = Chain(tmp_path / "stranger")
    flip(chain.run, segment(chain.run, 5))
    report = check(chain.run)
    with pytest.raises(IntegrityError, match="another run") as err:
        plan_repair(chain.run, report, stranger.run)
    assert err.value.kind is Kind.BROKEN_CHAIN


@pytest.mark.parametrize("part", ["weights", "config", "manifest"])
def test_a_damaged_anchor_is_cut_again(chain: Chain, part: str) -> None:
    """A damaged anchor is given up and cut again, from this region's own chain."""
    key = chain.run.keys.anchor(8)
    if part != "manifest":
        suffix = {"weights": ".safetensors", "config": "config.json"}[part]
        infos = chain.run.store.list(f"{NAME}/anchors/{8:010d}/")
        key = next(i.key for i in infos if i.key.endswith(suffix))
    flip(chain.run, key)
    done, report = mend(chain.run, None)
    assert [(one.repair.action.value, one.done) for one in done] == [("cut_anchor", True)]
    assert "from here" in done[0].message
    assert report.ok
    assert (report.shortcuts, report.proved) == (2, 2)
    assert replay(chain.run, 8, clock=FakeClock()).state.equals(chain.states[8])


def test_a_damaged_composite_is_deleted(chain: Chain) -> None:
    """A damaged composite is given up; the next round of maintenance makes it again."""
    (info,) = [i for i in chain.run.store.list(f"{NAME}/composites/") if i.key.endswith(".seg")]
    flip(chain.run, info.key)
    done, report = mend(chain.run, None)
    assert [(one.repair.action.value, one.done) for one in done] == [("delete_shortcut", True)]
    assert report.ok
    run_composites(chain.run, clock=chain.clock)
    assert check(chain.run).proved == 2


def test_a_shortcut_that_the_other_region_has_is_copied(chain: Chain) -> None:
    """Where the other region holds the same shortcut its bodies are copied like any other."""
    before, source = objects(chain.run), region_of(chain, shortcuts=True)
    for info in list(chain.run.store.list(f"{NAME}/composites/")):
        if info.key.endswith(".seg"):
            flip(chain.run, info.key)
    done, report = mend(chain.run, source)
    assert [(one.repair.action.value, one.done) for one in done] == [("copy", True)]
    assert report.findings == ()
    assert objects(chain.run) == before


def test_the_chain_goes_on_from_an_anchor(chain: Chain) -> None:
    """What no region has any more is lost, but an anchor of the newest version, cut from the state
    that the other region can still make, lets the chain go on."""
    source = region_of(chain, shortcuts=True)
    for run in (chain.run, source):
        drop(run, segment(run, 9))
    write_anchor(source, HEAD, clock=chain.clock, held=chain.held(HEAD))
    done, report = mend(chain.run, source)
    assert [(one.repair.action.value, one.done) for one in done] == [
        ("copy", False),
        ("cut_anchor", True),
    ]
    assert report.lost == ((9, 9),)
    assert replay(chain.run, HEAD, clock=FakeClock()).state.equals(chain.states[HEAD])


def test_without_another_region_lost_bytes_stay_lost(chain: Chain) -> None:
    """Without a source nothing is made up: there is no step for a lost delta."""
    drop(chain.run, segment(chain.run, 9))
    done, report = mend(chain.run, None)
    assert done == []
    assert report.lost == ((9, HEAD),)


@pytest.mark.parametrize("damage", [flip, drop, shorten])
@pytest.mark.parametrize("what", ["run.json", "layout"])
def test_a_run_that_cannot_be_opened(
    chain: Chain, damage: Callable[[Run, str], None], what: str
) -> None:
    """A damaged run.json or layout is copied from another region of the same run."""
    before, source = objects(chain.run), region_of(chain)
    keys = chain.run.keys
    key = keys.run_json if what == "run.json" else keys.layout(chain.layout.digest)
    damage(chain.run, key)
    assert damaged_opening(chain.run.store, NAME, source) == [key]
    assert restore_opening(chain.run.store, NAME, source) == [key]
    assert restore_opening(chain.run.store, NAME, source) == []
    assert objects(chain.run) == before


def test_a_bucket_is_not_made_into_another_run(chain: Chain, tmp_path: Path) -> None:
    """A bucket whose versions are of another run, or that has none, is given no run.json."""
    stranger = Chain(tmp_path / "stranger")
    drop(chain.run, chain.run.keys.run_json)
    for store in (chain.run.store, MemoryStore()):
        with pytest.raises(IntegrityError, match="nothing in this bucket says"):
            restore_opening(store, NAME, stranger.run)
        assert "r1/run.json" not in {info.key for info in store.list("")}


def test_a_repair_can_be_repeated(chain: Chain) -> None:
    """A plan carried out twice does nothing the second time: whole objects are left alone."""
    source = region_of(chain)
    flip(chain.run, segment(chain.run, 5))
    plan = plan_repair(chain.run, check(chain.run), source)
    for expected in ("copied", "is whole already"):
        (one,) = execute_repair(chain.run, plan, source, clock=FakeClock(), streams=2)
        assert one.done
        assert expected in one.message


def test_a_store_that_fails_is_not_damage(chain: Chain) -> None:
    """A source that is down ends the repair with its error; nothing was written."""
    source = region_of(chain)
    flip(chain.run, segment(chain.run, 5))
    before = objects(chain.run)
    plan = plan_repair(chain.run, check(chain.run), source)
    down = FaultyStore(source.store, [fail_at(Op.GET, 1)])
    with pytest.raises(StorageError):
        execute_repair(chain.run, plan, replace(source, store=down), clock=FakeClock())
    assert objects(chain.run) == before
