"""What a composite leads to is what its deltas lead to, bit for bit, however it was made."""

from __future__ import annotations

import contextlib

import pytest

from deltastore.chain.lattice import Span, superseded, wanted_composites
from deltastore.errors import StorageError
from deltastore.events import ChainLag, CompositeWritten, MaintenanceFailed
from deltastore.format.shortcut import CompositeManifest
from deltastore.maintenance.anchors import write_anchor
from deltastore.maintenance.composites import run_composites
from deltastore.maintenance.settings import MaintenanceSettings
from deltastore.repository.way import find_way
from deltastore.storage.fs import FileStore
from deltastore.storage.memory import MemoryStore
from deltastore.testing.faults import Callback, FaultyStore, LoseResponse, Op, fail_at
from tests.unit.chain_life.kit import Chain


def compose_all(chain, **options):
    """One round of composites; nothing may fail or stay missing."""
    done = run_composites(chain.run, clock=chain.clock, sink=chain.events.append, **options)
    assert done.failed == ()
    return done


def replay_composite(chain, base, version):
    """Replay along the one composite and compare."""
    replayed = chain.replay(version, held=chain.held(base))
    assert (replayed.report.composites, replayed.report.links) == (1, 0)


@pytest.mark.parametrize("parts", [1, 3])
def test_composite_equals_replay(tmp_path, parts):
    """CASE C5, LAW 1: each composite applied to its base gives its target's bits, all dtypes."""
    chain = Chain(tmp_path, parts=parts)
    chain.extend(80)
    done = compose_all(chain)
    assert done.missing == ()
    assert Span(0, 64) in done.written
    assert Span(64, 80) in done.written
    for span in done.written:
        replay_composite(chain, span.base, span.version)


@pytest.mark.parametrize("backend", ["memory", "fs", "s3"])
def test_composite_equals_replay_on_every_backend(tmp_path, backend, request):
    """CASE C5: on memory, files and a real S3 server a composite equals replay bit for bit."""
    if backend == "memory":
        store = MemoryStore()
    elif backend == "fs":
        store = FileStore(tmp_path / "store")
    else:
        store = request.getfixturevalue("s3_store")
    chain = Chain(tmp_path / "run", store=store)
    chain.extend(9)
    assert compose_all(chain).written == (Span(0, 8),)
    replay_composite(chain, 0, 8)
    assert chain.replay(9).report.via == "full v0 + 1 composite + 1 deltas"


@pytest.mark.parametrize("versions", [1, 10, 100, 1000])
def test_join_is_bounded(tmp_path, versions):
    """Hot join of a chain of any length: at most one whole state, two composites, seven deltas."""
    chain = Chain(tmp_path)
    chain.extend(versions)
    compose_all(chain)
    joined = chain.replay()
    assert joined.report.composites <= 2
    assert joined.report.links <= 7
    if versions > 100:
        write_anchor(chain.run, 960, clock=chain.clock)
        compose_all(chain)
        joined = chain.replay()
        assert joined.report.via == "anchor v960 + 1 composite"


def test_every_head_is_joined_within_the_bound(tmp_path):
    """At every HEAD from 1 to 150, with anchors and a full version between, the bound holds."""
    chain = Chain(tmp_path)
    for version in range(1, 151):
        chain.change()
        if version == 75:
            chain.publish_full()
        else:
            chain.publish()
        if version == 64:
            write_anchor(chain.run, 64, clock=chain.clock)
        compose_all(chain)
        way = find_way(chain.run, version)
        kinds = [step.kind for step in way.steps]
        assert kinds[0] in {"full", "anchor"}
        assert kinds.count("composite") <= 2
        assert kinds.count("delta") <= 7
    chain.replay()


def test_laggard_jumps_by_tiles(chain):
    """An actor that is 60 versions behind takes tiles between, not sixty deltas."""
    chain.extend(70)
    compose_all(chain)
    report = chain.replay(held=chain.held(5)).report
    assert report.via.startswith("held v5 + ")
    assert report.composites + report.links <= 16


def test_span_never_crosses_a_full_version(chain):
    """No delta leads to a full version, so no composite spans one."""
    chain.extend(12)
    chain.change()
    chain.publish_full()
    chain.extend(20)
    for span in compose_all(chain).written:
        assert not span.base < 13 <= span.version
    for version in range(34):
        chain.replay(version)


def test_two_workers_at_once_are_harmless(chain):
    """CASE C5: a worker that finds another's composite committed meanwhile leaves no trace."""
    chain.extend(8)
    inner = chain.store
    commit = "composites/0000000000-0000000008.json"
    rival = Callback(lambda: run_composites(chain.open(inner), clock=chain.clock))
    store = FaultyStore(inner, [fail_at(Op.PUT, 1, rival, key_contains=commit)])
    done = run_composites(chain.open(store), clock=chain.clock)
    assert (done.written, done.lost, done.missing) == ((), (Span(0, 8),), ())
    (key,) = chain.list_keys("composites/0000000000-0000000008.json")
    core = CompositeManifest.from_bytes(inner.get(key)).core
    bodies = [k for k in chain.list_keys("/composites/") if k.endswith(".seg")]
    assert bodies == [ref.key for ref in core.segments]
    replay_composite(chain, 0, 8)


def test_crash_at_every_put_names_no_absent_object(tmp_path):
    """Whatever put a worker dies at, every composite manifest names only objects that are there."""
    for nth in range(1, 12):
        for action in (None, LoseResponse()):
            store = FaultyStore(MemoryStore())
            chain = Chain(tmp_path / f"{nth}{action is None}", store=store)
            chain.extend(20)
            store.add(fail_at(Op.PUT, nth, action, key_contains="/composites/"))
            settings = MaintenanceSettings(segment_bytes=64)
            with contextlib.suppress(StorageError):
                run_composites(chain.run, clock=chain.clock, settings=settings)
            for key in chain.list_keys("/composites/"):
                if key.endswith(".json"):
                    for ref in CompositeManifest.from_bytes(store.get(key)).core.segments:
                        assert store.head(ref.key).size_bytes == ref.size_bytes
            store.clear()
            assert compose_all(chain).missing == ()
            chain.replay()


def test_missing_delta_is_reported_and_others_are_made(chain):
    """A composite over a lost body is reported as failed; tiles beside it are made."""
    chain.extend(24)
    chain.store.delete(chain.list_keys("/deltas/0000000010/"))
    done = run_composites(chain.run, clock=chain.clock, sink=chain.events.append)
    assert Span(0, 8) in done.written
    assert Span(16, 24) in done.written
    assert Span(8, 16) in done.failed
    assert Span(8, 16) in done.missing
    failed = {e.version: e.kind for e in chain.events if isinstance(e, MaintenanceFailed)}
    assert failed[16] == "object_missing"
    (lag,) = [e for e in chain.events if isinstance(e, ChainLag)]
    assert (lag.head, lag.composite_lag_versions) == (24, 16)


def test_events_tell_what_was_spared(chain):
    """A round reports each composite with its inputs, and a lag of none."""
    chain.extend(16)
    compose_all(chain)
    written = [e for e in chain.events if isinstance(e, CompositeWritten)]
    assert {(e.base_version, e.version, e.inputs) for e in written} >= {(0, 8, 8), (8, 16, 8)}
    assert all(e.size_bytes < e.input_bytes for e in written if e.inputs == 8)
    assert [e.composites_missing for e in chain.events if isinstance(e, ChainLag)] == [0]


def test_long_chain_without_tiles_is_merged_in_parts(chain, monkeypatch):
    """No merge takes more than MAX_INPUTS links, even in the first round on an old chain."""
    monkeypatch.setattr("deltastore.maintenance.composites.MAX_INPUTS", 4)
    chain.extend(70)
    compose_all(chain)
    assert max(e.inputs for e in chain.events if isinstance(e, CompositeWritten)) <= 4
    assert chain.replay().report.composites <= 2


def test_slow_worker_gives_its_bodies_up(chain):
    """Bodies older than the deadline are never named: the janitor may be about to take them."""
    chain.extend(8)
    settings = MaintenanceSettings(commit_deadline_s=10.0)
    slow = fail_at(Op.PUT, 1, Callback(lambda: chain.clock.advance_s(11.0)), key_contains=".seg")
    store = FaultyStore(chain.store, [slow])
    with pytest.raises(StorageError, match="given up"):
        run_composites(chain.open(store), clock=chain.clock, settings=settings)
    assert chain.list_keys("/composites/") == []


def test_wanted_spans_of_a_plain_chain():
    """Tiles of 8 and 64, the newest from the whole state to 64 m, and from there to 8 k."""
    spans = wanted_composites(150, lowest=0, anchors=[], full=[0])
    assert Span(0, 128) in spans
    assert Span(128, 144) in spans
    assert Span(64, 128) in spans
    assert [s for s in spans if not s.is_tile] == [Span(128, 144), Span(0, 128)]
    assert wanted_composites(150, lowest=0, anchors=[128], full=[0])[-1] == Span(128, 144)
    assert wanted_composites(7, lowest=0, anchors=[], full=[0]) == []


def test_superseded_composites_are_those_with_a_longer_twin():
    """A cumulative composite is needless once a longer one starts at its base; tiles never are."""
    spans = [Span(0, 8), Span(0, 16), Span(0, 24), Span(0, 64), Span(64, 80)]
    assert [s for s in spans if superseded(s, spans)] == [Span(0, 16), Span(0, 24)]
