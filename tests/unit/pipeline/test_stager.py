"""One stager fetches and decodes for a host; its ranks activate what it staged, bit for bit."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace

import pytest

from deltastore.config import FollowerSettings
from deltastore.errors import IntegrityError, InvalidInputError, Kind, StorageError
from deltastore.pipeline.applier import Applier
from deltastore.pipeline.body_cache import BodyCache
from deltastore.pipeline.follower import Follower
from deltastore.pipeline.held_lock import is_locked
from deltastore.pipeline.host import HostTarget
from deltastore.pipeline.spool import SpoolFolder, map_update
from deltastore.pipeline.staged import StagedUpdate, join_updates
from deltastore.pipeline.stager import Stager
from deltastore.pipeline.stager_rank import StagedFeed
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion
from deltastore.repository.run import open_run
from deltastore.storage.memory import MemoryStore
from deltastore.storage.store import PutMode
from deltastore.testing.faults import CountingStore, FaultyStore, Op, fail_at
from tests.unit.pipeline.harness import RUN, World, change_some


class Rank:
    """One engine of the host."""

    def __init__(self, world, folder, name, active=None, state=None):
        active = active or ActiveVersion.of(load_manifest(world.run, 0))
        self.target = HostTarget(state or world.zero.copy())
        self.feed = StagedFeed(folder, world.layout, active, rank=name, clock=world.clock)
        self.applier = Applier(self.target, active, name=name, clock=world.clock)

    def advance(self):
        """Activate what is offered now."""
        self.feed.poll()
        update = self.feed.take()
        if update is not None:
            self.applier.activate(update)
        return self.applier.active.version


@pytest.fixture
def folder(tmp_path):
    """Where stager and ranks meet."""
    return tmp_path / "spool"


@pytest.fixture
def world(tmp_path):
    """A run in memory, counted."""
    return World(tmp_path / "w", home_store=CountingStore(MemoryStore()))


@pytest.fixture
def stager(world, folder):
    """The host's stager; it polls at every turn because nothing else moves the clock."""
    made = _stager(world, folder)
    yield made
    made.close()


def _stager(world, folder, *, trusted=None, **settings):
    run = open_run(world.home_store, RUN)
    return Stager(
        run,
        folder,
        name="host",
        clock=world.clock,
        settings=FollowerSettings(**settings),
        sink=world.events.append,
        trusted=trusted,
    )


def _turns(world, stager, count=12):
    for _ in range(count):
        world.clock.advance_s(2.0)
        stager.turn()


def test_two_ranks_follow_bit_for_bit(world, folder, stager):
    """Two ranks of a host reach every version; each body crosses the region's line once."""
    publisher = world.publisher()
    ranks = [Rank(world, folder, f"r{i}") for i in range(2)]
    delta_bytes = 0
    for step in range(1, 5):
        delta_bytes += world.step(publisher, step).core.delta_bytes
        _turns(world, stager)
        for rank in ranks:
            assert rank.advance() == step + 1
            assert rank.target.state.equals(world.state)
    publisher.close()
    deltas = list(world.home_store.list(f"{RUN}/deltas/"))
    assert sum(i.size_bytes for i in deltas) == delta_bytes


def test_a_body_is_fetched_once_for_all_ranks(world, folder):
    """Four ranks, one of them behind: every segment is read from the bucket once."""
    publisher = world.publisher()
    for step in range(1, 4):
        world.step(publisher, step)
    publisher.close()
    reads = []

    class Noting(CountingStore):
        def get(self, key, byte_range=None):
            reads.append(key)
            return super().get(key, byte_range)

    world.home_store = Noting(world.home_store)
    stager = _stager(world, folder)
    early = ActiveVersion.of(load_manifest(world.run, 2))
    ranks = [Rank(world, folder, f"r{i}") for i in range(3)]
    ranks.append(Rank(world, folder, "r3", early, world.replayed(2)))
    reads.clear()
    _turns(world, stager)
    for rank in ranks:
        assert rank.advance() == 4
        assert rank.target.state.equals(world.state)
    bodies = [key for key in reads if key.endswith(".seg")]
    assert len(bodies) == len(set(bodies)) > 0
    stager.close()


def test_versions_are_composed_for_ranks_that_do_not_activate(world, folder, stager):
    """What waits is one update, however many versions it covers, and the spool holds one file."""
    publisher = world.publisher()
    rank = Rank(world, folder, "r0")
    for step in range(1, 7):
        world.step(publisher, step)
        _turns(world, stager, 2)
        assert len(list(stager.folder.updates.iterdir())) == 1
    publisher.close()
    assert rank.advance() == 7
    assert rank.target.state.equals(world.state)


def test_rank_that_rolled_back_gets_its_update_again(world, folder, stager):
    """After `reset` the same way is fetched and staged anew, from where the weights are."""
    publisher = world.publisher()
    world.step(publisher, 1)
    publisher.close()
    rank = Rank(world, folder, "r0")
    _turns(world, stager)
    rank.feed.poll()
    first = rank.feed.take()
    assert first.target.version == 2
    rank.feed.reset(rank.applier.active)
    rank.feed.poll()
    assert rank.feed.staged() is None
    _turns(world, stager)
    assert rank.advance() == 2
    assert rank.target.state.equals(world.state)


def test_dead_rank_leaves_nothing(world, folder, stager):
    """When a rank's lock is let go of, its update, its note, its offer and the lock are removed."""
    publisher = world.publisher()
    publisher.close()
    rank = Rank(world, folder, "r0")
    _turns(world, stager)
    assert stager.spool_bytes > 0
    rank.feed._held.close()
    _turns(world, stager, 1)
    assert stager.spool_bytes == 0
    for place in (stager.folder.updates, stager.folder.offers, stager.folder.ranks):
        assert list(place.iterdir()) == []


def test_dead_stager_leaves_no_more_than_the_bound(world, folder):
    """What a killed stager left is removed by the next, and mapped updates stay readable."""
    publisher = world.publisher()
    world.step(publisher, 1)
    publisher.close()
    first = _stager(world, folder)
    rank = Rank(world, folder, "r0")
    _turns(world, first)
    rank.feed.poll()
    update = rank.feed.take()
    first._lock.close()  # as the kernel does
    with pytest.raises(StorageError) as err:
        rank.feed.poll()
    assert err.value.kind is Kind.UNAVAILABLE
    second = _stager(world, folder)
    assert list(second.folder.updates.iterdir()) == []
    rank.applier.activate(update)
    assert rank.target.state.equals(world.state)
    rank.feed.poll()
    assert rank.feed.error is None or rank.feed.error.kind is Kind.UNAVAILABLE
    second.close()


def test_one_stager_per_host_and_one_process_per_rank(world, folder, stager):
    """A second stager in the folder and a second rank of a name are refused."""
    rank = Rank(world, folder, "r0")
    assert is_locked(stager.folder.stager_lock)
    for again in (lambda: _stager(world, folder), lambda: Rank(world, folder, "r0")):
        with pytest.raises(InvalidInputError) as err:
            again()
        assert err.value.kind is Kind.LEASE_HELD
    rank.feed.stop()
    Rank(world, folder, "r0").feed.stop()


def test_spool_is_bounded(world, folder):
    """The spool never grows past `stage_max_bytes`: staging waits for ranks to take what it has."""
    publisher = world.publisher()
    limit = 12_000
    stager = _stager(world, folder, stage_max_bytes=limit)
    rank = Rank(world, folder, "r0")
    for step in range(1, 9):
        world.step(publisher, step)
        _turns(world, stager, 3)
        used = sum(path.stat().st_size for path in stager.folder.updates.iterdir())
        assert used == stager.spool_bytes <= limit
    reached = rank.advance()
    assert 0 < reached < 9
    for _ in range(20):
        _turns(world, stager, 3)
        if rank.advance() == 9:
            break
    publisher.close()
    assert rank.target.state.equals(world.state)
    stager.close()


def test_update_that_never_fits_is_said(world, folder):
    """An update larger than the whole spool is an error the rank sees, not a wait without end."""
    publisher = world.publisher()
    change_some(world.state, world.rng, 0.9)
    publisher.publish(1).result(60)
    publisher.close()
    stager = _stager(world, folder, stage_max_bytes=5000)
    rank = Rank(world, folder, "r0")
    _turns(world, stager)
    rank.advance()
    _turns(world, stager)
    rank.feed.poll()
    assert (type(rank.feed.error), rank.feed.error.kind) == (StorageError, Kind.LIMIT)
    stager.close()


def test_foreign_history_reaches_the_rank_as_what_it_is(world, folder, stager, tmp_path):
    """CASE R3: for weights of another history the rank sees the stager's error by its kind."""
    publisher = world.publisher()
    world.step(publisher, 1)
    publisher.close()
    other = World(tmp_path / "other")
    rival = other.publisher()
    point = ActiveVersion.of(rival.head)
    rival.close()
    rank = Rank(world, folder, "r0", point, other.zero.copy())
    _turns(world, stager)
    rank.feed.poll()
    error = rank.feed.error
    assert isinstance(error, IntegrityError)
    assert error.kind is Kind.WRONG_BASE


def test_damaged_update_in_the_spool(world, folder, stager):
    """A spooled update that was changed by somebody is refused unused, and staged once more."""
    publisher = world.publisher()
    publisher.close()
    rank = Rank(world, folder, "r0")
    _turns(world, stager)
    _damage(stager)
    with pytest.raises(IntegrityError) as err:
        rank.feed.poll()
    assert err.value.kind is Kind.DIGEST
    _turns(world, stager)
    assert rank.advance() == publisher.head.core.version
    assert rank.feed.error is None


def test_spool_that_damages_everything_is_not_written_for_ever(world, folder, stager):
    """An update that is damaged again is not staged a third time; the rank says why it waits."""
    world.publisher().close()
    rank = Rank(world, folder, "r0")
    for _ in range(2):
        _turns(world, stager)
        _damage(stager)
        with pytest.raises(IntegrityError):
            rank.feed.poll()
    before = list(stager.folder.updates.iterdir())
    _turns(world, stager)
    assert list(stager.folder.updates.iterdir()) == before
    with pytest.raises(IntegrityError):
        rank.feed.poll()
    assert rank.feed.error is not None


def _damage(stager):
    path = next(iter(stager.folder.updates.iterdir()))
    path.chmod(0o600)
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)


def test_catch_up_waits_for_the_stager(world, folder, stager):
    """`catch_up` returns when the stager has found nothing newer, with all of it staged."""
    publisher = world.publisher()
    for step in range(1, 4):
        world.step(publisher, step)
    publisher.close()
    rank = Rank(world, folder, "r0")
    stopping = threading.Event()
    working = threading.Thread(target=stager.run, args=(stopping,))
    working.start()
    rank.feed.catch_up()
    assert rank.feed.staged().target.version == 4
    stopping.set()
    working.join(30)


def _in_trouble(world, folder):
    """A bucket that answers no get, a stager that has noticed, and a rank that was told."""
    store = FaultyStore(world.home_store)
    publisher = world.publisher()
    world.step(publisher, 1)
    publisher.close()
    stager = Stager(open_run(store, RUN), folder, name="host", clock=world.clock)
    rank = Rank(world, folder, "r0")
    store.add(fail_at(Op.GET, 1, times=1000))
    _turns(world, stager)
    rank.feed.poll()
    return store, stager, rank


def test_unreadable_version_is_a_trouble_that_passes(world, folder, tmp_path):
    """While the bucket does not answer the ranks see why, and afterwards they go on."""
    store, stager, rank = _in_trouble(world, folder)
    assert rank.feed.error.kind is Kind.UNAVAILABLE
    store.clear()
    _turns(world, stager, 40)  # after failures it looks seldom
    assert rank.advance() == 2
    assert rank.feed.error is None
    stager.close()


def test_old_trouble_is_not_held_against_a_new_question(world, folder):
    """A version that is asked for after its trouble has passed is looked for at once, and until the
    stager has looked nothing is said against it."""
    store, stager, rank = _in_trouble(world, folder)
    assert rank.feed.error is not None
    store.clear()
    rank.feed.ask(2)
    assert rank.feed.error is None
    rank.feed.poll()  # the offer that lies there answers another question
    assert rank.feed.error is None
    stager.turn()
    stager.turn()
    assert rank.advance() == 2
    stager.close()


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"active":[],"attempt":0,"until":null}'])
def test_a_note_that_cannot_be_read_is_its_ranks_trouble(world, folder, stager, caplog, text):
    """A note of another release, or a damaged one, is said once and keeps nobody else waiting."""
    odd, rank = Rank(world, folder, "a"), Rank(world, folder, "b")
    (stager.folder.ranks / "a.json").write_bytes(text)
    world.step(world.publisher(), 1)
    _turns(world, stager)
    assert rank.advance() == 2
    assert [record for record in caplog.records if "rank a" in record.getMessage()][1:] == []
    assert "rank a gets nothing staged" in caplog.text
    stager.folder.write_note("a", odd.feed._note)
    _turns(world, stager)
    assert odd.advance() == 2


def test_what_is_not_the_spools_stays(world, folder):
    """A folder that somebody keeps other things in loses none of them, whatever they are called;
    what a dead stager left among them goes."""
    theirs = [
        folder / "updates" / "thesis.txt",
        folder / "updates" / "sub" / "0000000001-0123456789ab.staged",
        folder / "offers" / "job.json",
        folder / "ranks" / "results.json",
        folder / "ranks" / "my results.json",
        folder / "ranks" / "results.lock",
        folder / "offers" / "...json",
    ]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    left = folder / "updates" / "0000000001-0123456789ab.staged"
    left.write_text("a dead stager's")
    stager = _stager(world, folder)
    rank = Rank(world, folder, "r0")
    world.step(world.publisher(), 1)
    _turns(world, stager)
    assert rank.advance() == 2
    stager.close()
    assert all(path.read_text() == "mine" for path in theirs)
    assert not left.exists()


# --- early staging


def _segments(world, version):
    return load_manifest(world.run, version).core.segments


def test_announced_segments_are_fetched_before_the_manifest_exists(world, folder):
    """Early staging: when the manifest appears, the bodies of its version are on the host."""
    cache_holder = []

    def announce(version, ref):
        assert cache_holder[0].announce(ref.key, ref.size_bytes)

    stager = _stager(world, folder)
    cache_holder.append(stager)
    rank = Rank(world, folder, "r0")
    _turns(world, stager)
    publisher = world.publisher(announce=announce)
    manifest = world.step(publisher, 1)
    publisher.close()
    stager._cache._pool.shutdown(wait=True)
    assert stager._cache.held_bytes >= manifest.core.delta_bytes
    before = world.home_store.traffic.received_bytes
    _turns(world, stager)
    read = world.home_store.traffic.received_bytes - before
    assert rank.advance() == 2
    assert rank.target.state.equals(world.state)
    manifests = sum(len(world.home_store.inner.get(world.run.keys.version(v))) for v in (1, 2))
    assert read <= manifests + 200  # and the hint
    stager.close()


def test_announcements_are_bounded_and_not_believed(world):
    """Foreign keys, far versions, wrong sizes, lies and floods cost neither memory nor truth."""
    publisher = world.publisher()
    world.step(publisher, 1)
    publisher.close()
    ref = _segments(world, 2)[0]
    cache = BodyCache(world.home_store, RUN, max_bytes=ref.size_bytes + 10)
    assert not cache.announce("other/deltas/0000000001/00000-" + "0" * 64 + ".seg", 10)
    assert not cache.announce(f"{RUN}/versions/0000000001.json", 10)
    assert not cache.announce(world.run.keys.segment(9, 0, "0" * 64), 10)
    assert not cache.announce(ref.key, ref.size_bytes + 11)
    assert not cache.announce(ref.key, 0)
    assert cache.announce(ref.key, ref.size_bytes - 1)  # too short: it has another digest
    cache._pool.shutdown(wait=True)
    assert cache.held_bytes == 0
    lying = hashlib.sha256(b"x").hexdigest()
    world.home_store.put(world.run.keys.segment(2, 5, lying), b"yy", mode=PutMode.CREATE)
    cache = BodyCache(world.home_store, RUN, max_bytes=100)
    assert cache.announce(world.run.keys.segment(2, 5, lying), 2)
    assert cache.announce(world.run.keys.segment(2, 6, lying), 2)  # it does not exist
    cache._pool.shutdown(wait=True)
    assert cache.held_bytes == 0


def test_unnamed_bodies_are_dropped_when_their_version_has_passed(world):
    """What was announced and no manifest named is forgotten with its version."""
    body = b"orphan"
    key = world.run.keys.segment(1, 0, hashlib.sha256(body).hexdigest())
    world.home_store.put(key, body, mode=PutMode.CREATE)
    cache = BodyCache(world.home_store, RUN, max_bytes=100)
    assert cache.announce(key, len(body))
    cache._pool.shutdown(wait=True)
    assert cache.held_bytes == len(body)
    cache.passed(1)
    assert cache.held_bytes == 0
    cache.get(key)
    assert cache.held_bytes == 0


def test_whole_state_goes_through_the_spool(world, folder):
    """A full version is spooled whole and mapped read-only; the delta after it joins a copy."""
    publisher = world.publisher()
    points = [ActiveVersion.of(load_manifest(world.run, 0))]
    points.append(ActiveVersion.of(world.step(publisher, 1)))
    whole = StagedUpdate(points[0], points[1], [], 7, 2, world.state.copy())
    spool = SpoolFolder(folder)
    mapped = map_update(spool.spool(world.layout, whole), world.layout, points[0])
    assert mapped.state.equals(world.state)
    assert (mapped.size_bytes, mapped.versions, mapped.target) == (7, 2, points[1])
    assert not any(bits.flags.writeable for bits in mapped.state.arrays if bits.size)
    world.step(publisher, 2)
    publisher.close()
    follower = Follower(world.run, points[1], name="a", clock=world.clock)
    follower.catch_up()
    lane = replace(mapped, state=mapped.state.copy())
    assert join_updates(world.layout, lane, follower.take()).state.equals(world.state)
