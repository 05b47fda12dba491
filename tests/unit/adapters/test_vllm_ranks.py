"""Ranks of an engine move together: what takes long is met around, rank 0 decides, all or none."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltastore.adapters.placed_target import PlacedTarget
from deltastore.adapters.placements import Placement, Region
from deltastore.adapters.torch_tensors import torch_dtype
from deltastore.adapters.vllm.rank import EngineRank
from deltastore.adapters.vllm.rendezvous import meet
from deltastore.adapters.vllm.settings import EngineSettings
from deltastore.adapters.vllm.whole_spool import WholeSpool
from deltastore.clock import SystemClock
from deltastore.config import FollowerSettings
from deltastore.errors import ApplyError, IntegrityError, InvalidInputError, Kind
from deltastore.pipeline import stager_rank
from deltastore.pipeline.group import SoloGroup, ThreadGroup
from deltastore.pipeline.rank_applier import RankApplier
from deltastore.pipeline.stager import Stager
from deltastore.repository.run import open_run
from deltastore.storage.fs import FileStore
from tests.unit.pipeline.harness import RUN, World

torch = pytest.importorskip("torch")
CLOCK = SystemClock()


def _on_all(ranks, call):
    """What `call(rank)` returns or raises, of each rank in a thread of its own."""

    def outcome(rank):
        try:
            return call(rank)
        except Exception as err:  # noqa: BLE001 - it is the outcome
            return err

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(outcome, ranks))


def test_a_meeting_waits_for_work_of_any_length():
    """Everyone gets everyone's answer though the work takes longer than a vote's timeout."""
    groups = ThreadGroup.of(3, timeout_s=2.0)
    done = threading.Event()

    def work(rank):
        if rank == 1:
            CLOCK.wait(done, 3.0)
        return {"rank": rank}

    found = _on_all(groups, lambda g: meet(g, CLOCK, lambda: work(g.rank), beat_s=0.05))
    assert found == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3
    assert meet(SoloGroup(), CLOCK, lambda: {"a": 1}) == [{"a": 1}]


@pytest.mark.parametrize(
    "error",
    [
        IntegrityError("bad bytes", kind=Kind.DIGEST, hint="look"),
        InvalidInputError("no such thing", kind=Kind.SETTING),
        ValueError("a bug"),
    ],
)
def test_a_failure_in_a_meeting_is_everybodys(error):
    """The rank that failed raises its own error, the others one of the same class and kind."""
    groups = ThreadGroup.of(3, timeout_s=30)

    def work(rank):
        if rank == 2:
            raise error
        return {}

    found = _on_all(groups, lambda g: meet(g, CLOCK, lambda: work(g.rank)))
    assert found[2] is error
    for other in found[:2]:
        assert "rank 2: " in str(other)
        assert isinstance(other, type(error) if hasattr(error, "kind") else ApplyError)
        assert other.kind is getattr(error, "kind", Kind.NOT_STAGED)


def test_work_of_a_meeting_stays_in_its_callers_thread():
    """A thread's current device is its own: the work is done where it was asked for, and when the
    others do not come nothing of the meeting goes on after it."""
    groups = ThreadGroup.of(2, timeout_s=30)

    def call(group):
        found = []
        meet(group, CLOCK, lambda: found.append(threading.get_ident()) or {})
        return found == [threading.get_ident()]

    assert _on_all(groups, call) == [True, True]
    before = set(threading.enumerate())
    groups[1].leave()
    done = []
    with pytest.raises(ApplyError) as caught:
        meet(groups[0], CLOCK, lambda: done.append(1) or {})
    assert (caught.value.kind, done) == (Kind.VOTE_TIMEOUT, [1])
    assert set(threading.enumerate()) <= before


class Engine:
    """Ranks in threads: each tensor's rows are split among them, small ones are replicated."""

    def __init__(self, world, folder, size, **settings):
        self.world = world
        self.groups = ThreadGroup.of(size, timeout_s=30) if size > 1 else [SoloGroup()]
        url = f"file://{folder}/store/{RUN}"
        self.settings = EngineSettings(
            run=url, **{"stage_wait_s": 20.0, "poll_min_s": 0.02, **settings}
        )
        self.weights = []
        self.ranks = []
        for group in self.groups:
            weights, placements = _shard(world.state, group.rank, size)
            self.weights.append(weights)
            self.ranks.append(
                EngineRank(
                    open_run(world.home_store, RUN),
                    PlacedTarget(world.layout, placements),
                    group,
                    engine="e",
                    folder=folder / "spool",
                    settings=self.settings,
                    clock=CLOCK,
                )
            )

    def all(self, call):
        """What every rank answers to the same call."""
        return _on_all(self.ranks, call)

    def holds(self, state):
        """Whether the ranks together hold exactly that state."""
        wanted = [_shard(state, g.rank, g.size)[0] for g in self.groups]
        return all(
            torch.equal(_patterns(mine), _patterns(his))
            for have, want in zip(self.weights, wanted, strict=True)
            for mine, his in zip(have, want, strict=True)
        )

    def stop(self):
        """Stop all ranks."""
        for rank in self.ranks:
            rank.stop()


def _patterns(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _shard(state, rank, size):
    """A rank's own tensors of a state, and where they are placed."""
    weights, placements = [], []
    for position, spec in enumerate(state.layout.tensors):
        whole = torch.from_numpy(state.arrays[position].copy().view("u1"))
        whole = whole.view(torch_dtype(spec.dtype)).reshape(spec.shape)
        rows = spec.shape[0] if spec.shape else 0
        split = bool(rows) and rows % size == 0 and spec.elements > 16
        count = rows // size if split else rows
        part = whole[rank * count : (rank + 1) * count].clone() if split else whole.clone()
        weights.append(part)
        if not spec.elements:
            continue
        live = part.reshape(-1)
        sizes, strides = ((live.numel(),), (1,)) if live.numel() > 1 else ((), ())
        offset = rank * live.numel() if split else 0
        region = Region(position, offset, sizes, strides)
        placements.append(Placement(region, live.reshape(sizes), spec.name, "m"))
    return weights, placements


@pytest.fixture
def world(tmp_path):
    """A run in a folder."""
    return World(tmp_path / "w", home_store=FileStore(tmp_path / "store"))


@pytest.fixture
def stager(world, tmp_path):
    """The host's stager, in a thread."""
    made = Stager(
        open_run(world.home_store, RUN),
        tmp_path / "spool",
        name="stager",
        clock=CLOCK,
        settings=FollowerSettings(poll_min_s=0.02),
    )
    stopping = threading.Event()
    thread = threading.Thread(target=made.run, args=(stopping,))
    thread.start()
    yield made
    stopping.set()
    thread.join()


@pytest.mark.parametrize("size", [1, 3])
def test_all_ranks_move_to_the_version_asked_for(world, stager, tmp_path, size):
    """From their own version to one by one, to a number in between, and to the newest: each time
    all ranks hold exactly that version, though more is staged."""
    engine = Engine(world, tmp_path, size)
    publisher = world.publisher()
    assert engine.all(lambda rank: rank.begin()) == [None] * size
    assert {rank.active.version for rank in engine.ranks} == {0}
    states = {1: world.state.copy()}
    for version in range(2, 7):
        world.step(publisher, version)
        states[version] = world.state.copy()
    for version in (1, 3, 3, 4):
        found = engine.all(lambda rank, v=version: rank.update(v).version)
        assert found == [version] * size
        assert engine.holds(states[version])
    _until_staged(engine, 6)
    assert engine.all(lambda rank: rank.update("newest").version) == [6] * size
    assert engine.holds(states[6])
    assert engine.all(lambda rank: rank.update("newest").version) == [6] * size
    refused = engine.all(lambda rank: rank.update(5))
    assert {error.kind for error in refused} == {Kind.NOT_STAGED}
    assert not any(rank.poisoned for rank in engine.ranks)
    engine.stop()
    publisher.close()


def _until_staged(engine, version):
    deadline_s = CLOCK.monotonic_s() + 20
    never = threading.Event()
    while {rank.staged for rank in engine.ranks} != {version}:
        assert CLOCK.monotonic_s() < deadline_s
        CLOCK.wait(never, 0.01)


@pytest.mark.parametrize("size", [1, 2])
def test_strange_weights_are_written_whole(world, stager, tmp_path, size):
    """Ranks whose weights are no version of the run begin at HEAD, rebuilt once for all of them,
    and nothing of it is left in the spool."""
    engine = Engine(world, tmp_path, size)
    publisher = world.publisher()
    world.step(publisher, 2)
    for weights in engine.weights:
        weights[1].view(torch.int16).add_(1)
    assert engine.all(lambda rank: rank.begin()) == [None] * size
    assert [rank.active.version for rank in engine.ranks] == [2] * size
    assert engine.holds(world.state)
    assert list((tmp_path / "spool" / "whole").glob("*/updates/*")) == []
    engine.stop()
    publisher.close()


@pytest.mark.parametrize("size", [1, 2])
def test_weights_that_could_not_be_read_are_not_rewritten(
    world, stager, tmp_path, monkeypatch, size
):
    """A first pass that fails on one rank is no proof of strange weights: all ranks fail, nothing
    is written, nobody is in doubt, and the next beginning finds the version."""
    engine = Engine(world, tmp_path, size)
    publisher = world.publisher()
    before = world.state.copy()
    world.step(publisher, 2)

    def exhausted():
        raise MemoryError

    last = engine.ranks[-1]
    with monkeypatch.context() as patch:
        patch.setattr(last._target, "whole", exhausted)
        found = engine.all(lambda rank: rank.begin())
    assert isinstance(found.pop(), MemoryError)
    assert [error.kind for error in found] == [Kind.NOT_STAGED] * (size - 1)
    assert engine.holds(before)
    assert {rank.poisoned for rank in engine.ranks} == {""}
    engine.stop()
    assert engine.all(lambda rank: rank.begin()) == [None] * size
    assert [rank.active.version for rank in engine.ranks] == [0] * size
    engine.stop()
    publisher.close()


def test_a_rank_that_missed_the_beginning_is_met_again(world, stager, tmp_path):
    """Who does not come to the first pass leaves the others in doubt; once all have renewed their
    group the same ranks begin, at the version that they hold."""
    engine = Engine(world, tmp_path, 2)
    publisher = world.publisher()
    engine.groups[1].leave()
    with pytest.raises(ApplyError) as caught:
        engine.ranks[0].begin()
    assert caught.value.kind is Kind.VOTE_TIMEOUT
    assert "did not come" in engine.ranks[0].poisoned
    engine.stop()
    assert _on_all(engine.groups, lambda group: group.renew()) == [None] * 2
    assert engine.all(lambda rank: rank.begin()) == [None] * 2
    assert [rank.active.version for rank in engine.ranks] == [0] * 2
    assert engine.all(lambda rank: rank.update(1).version) == [1] * 2
    engine.stop()
    publisher.close()


@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_in_doubt_stops_all_until_re_anchored(world, stager, tmp_path, size):
    """When one rank's weights are known to be gone every rank refuses, and nothing is written;
    after re-anchoring all of them follow again."""
    engine = Engine(world, tmp_path, size)
    publisher = world.publisher()
    engine.all(lambda rank: rank.begin())
    world.step(publisher, 2)
    engine.ranks[-1].doubt("they slept")
    for call in (lambda rank: rank.update("newest"), lambda rank: rank.require_sound()):
        found = engine.all(call)
        assert {error.kind for error in found} == {Kind.POISONED}
        assert "they slept" in str(found[0])
    assert {rank.active.version for rank in engine.ranks} == {0}
    assert engine.all(lambda rank: rank.re_anchor()) == [None] * size
    assert [rank.active.version for rank in engine.ranks] == [2] * size
    assert engine.holds(world.state)
    world.step(publisher, 3)
    assert engine.all(lambda rank: rank.update(3).version) == [3] * size
    assert engine.holds(world.state)
    engine.stop()
    publisher.close()


def test_a_version_that_never_comes_is_waited_for_no_longer_than_set(world, stager, tmp_path):
    """Waiting for a version that is not published ends alike on all ranks, and they go on."""
    engine = Engine(world, tmp_path, 2, stage_wait_s=0.2)
    publisher = world.publisher()
    engine.all(lambda rank: rank.begin())
    found = engine.all(lambda rank: rank.update(7))
    assert {error.kind for error in found} == {Kind.NOT_STAGED}
    _until_staged(engine, 1)
    assert engine.all(lambda rank: rank.update("newest").version) == [1, 1]
    engine.stop()
    publisher.close()


@pytest.mark.parametrize("what", ["map_update", "prepare"])
def test_a_bug_in_the_background_is_shown_and_tried_again(
    world, stager, tmp_path, monkeypatch, what
):
    """What nobody expected ends no background thread: the rank says so in its trouble, tries again
    and has the version ready."""
    engine = Engine(world, tmp_path, 1)
    publisher = world.publisher()
    (rank,) = engine.ranks
    owner = stager_rank if what == "map_update" else RankApplier
    works, failed = getattr(owner, what), []

    def fails_once(*arguments):
        if not failed:
            failed.append(threading.current_thread().name)
            raise ValueError("a bug")
        return works(*arguments)

    monkeypatch.setattr(owner, what, fails_once)
    rank.begin()
    never = threading.Event()
    deadline_s = CLOCK.monotonic_s() + 20
    while "ValueError: a bug" not in rank.trouble:
        assert CLOCK.monotonic_s() < deadline_s
        CLOCK.wait(never, 0.01)
    _until_staged(engine, 1)
    assert rank.trouble == ""
    assert failed[0] in {"stager-feed", "prepare"}
    assert rank.update("newest").version == 1
    engine.stop()
    publisher.close()


def test_a_damaged_update_is_staged_anew(world, stager, tmp_path):
    """An update that is damaged in the spool between two ranks' looks is refused by all, nothing
    is written, and it is fetched and activated afterwards."""
    engine = Engine(world, tmp_path, 2)
    publisher = world.publisher()
    engine.all(lambda rank: rank.begin())
    world.step(publisher, 2)
    _until_staged(engine, 2)
    damaged = engine.ranks[0]._feed.offered
    engine.ranks[1]._feed._forget()
    engine.ranks[1]._feed._refused = damaged  # so that it must be mapped anew
    path = Path(damaged.path)
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.chmod(0o600)
    path.unlink()
    path.write_bytes(bytes(body))
    found = engine.all(lambda rank: rank.update("newest"))
    assert {error.kind for error in found} == {Kind.DIGEST}
    assert {rank.active.version for rank in engine.ranks} == {0}
    assert engine.all(lambda rank: rank.update(2).version) == [2, 2]
    assert engine.holds(world.state)
    engine.stop()
    publisher.close()


@pytest.mark.parametrize("size", [1, 2])
def test_a_taken_name_stops_all_ranks(world, stager, tmp_path, size):
    """An engine whose name is another's begins on no rank, and the other one goes on."""
    first, second = Engine(world, tmp_path, size), Engine(world, tmp_path, size)
    publisher = world.publisher()
    assert first.all(lambda rank: rank.begin()) == [None] * size
    refused = second.all(lambda rank: rank.begin())
    assert {error.kind for error in refused} == {Kind.LEASE_HELD}
    second.stop()
    assert first.all(lambda rank: rank.update(1).version) == [1] * size
    first.stop()
    publisher.close()


def test_an_engines_name_is_its_own(tmp_path):
    """Two engines of one name on a host are refused; what a dead one left is removed."""
    first = WholeSpool(tmp_path, "e")
    with pytest.raises(InvalidInputError, match="'e'") as caught:
        WholeSpool(tmp_path, "e")
    assert caught.value.kind is Kind.LEASE_HELD
    left = tmp_path / "whole" / "dead" / "updates"
    left.mkdir(parents=True)
    (tmp_path / "whole" / "dead.lock").touch()
    other = WholeSpool(tmp_path, "f")
    assert {path.name for path in (tmp_path / "whole").iterdir()} == {"e.lock", "f.lock"}
    first.close()
    WholeSpool(tmp_path, "e").close()
    other.close()
