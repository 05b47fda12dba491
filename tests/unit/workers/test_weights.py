"""An actor's weights: proved at a join, unchanged by a failed update, rebuilt when in doubt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from deltastore.adapters.safetensors_dir import checkpoint_layout, load_state, scan_checkpoint
from deltastore.adapters.torch_state import ModuleTarget
from deltastore.clock import SystemClock
from deltastore.config import FollowerSettings
from deltastore.coordination.memory import MemoryCoordination
from deltastore.errors import ApplyError, IntegrityError, InvalidInputError, Kind
from deltastore.events import ActivationFailed, ActorJoined
from deltastore.format.layout import Layout
from deltastore.format.mixing import fingerprint_state
from deltastore.format.signing import SigningKey, TrustedKeys
from deltastore.pipeline.host import HostSource, HostTarget
from deltastore.pipeline.publisher import Publisher
from deltastore.pipeline.replay import JoinReport
from deltastore.repository.points import ActiveVersion
from deltastore.repository.run import create_run
from deltastore.storage.memory import MemoryStore
from deltastore.testing.checkpoints import next_checkpoint, tiny_checkpoint
from workers.actor.follow import FollowedWeights
from workers.causal_lm import load_model
from workers.weights import join, read_whole, require_at

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.format.layout import BitState
    from deltastore.repository.run import Run

CLOCK = SystemClock()


class Site:
    """A run with version 0 (`old`), 1 (the fence) and 2 (`new`)."""

    def __init__(self, old: Path, new: Path) -> None:
        self.old, self.new = old, new
        checkpoint = scan_checkpoint(old)
        self.layout = checkpoint_layout(checkpoint)
        self.run: Run = create_run(
            MemoryStore(),
            "r",
            layout=self.layout,
            files=checkpoint.files,
            fingerprint=fingerprint_state(self.state(old)),
            clock=CLOCK,
            probe=False,
        )
        live = self.state(old)
        publisher = Publisher.open(self.run, HostSource(live), clock=CLOCK)
        self.fence = ActiveVersion.of(publisher.head)
        for mine, theirs in zip(live.arrays, self.state(new).arrays, strict=True):
            mine[:] = theirs
        publication = publisher.publish(1)
        assert publication is not None
        self.head = ActiveVersion.of(publication.result(60))
        publisher.close()

    def state(self, folder: Path) -> BitState:
        """The bits of one of the folders."""
        return load_state(scan_checkpoint(folder), self.layout)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """One run for all tests of this file: nobody writes to it."""
    folder = tmp_path_factory.mktemp("site")
    old = tiny_checkpoint(folder / "old", seed=1)
    return Site(old, next_checkpoint(old, folder / "new", seed=2, density=0.05, wild=False))


def followed(site: Site, target: Any, events: list[Any], **options: Any) -> FollowedWeights:
    """Weights at the fence, as an actor holds them."""
    return FollowedWeights(
        site.run,
        target,
        site.fence,
        JoinReport("checkpoint v0", 0, 0, 0.0),
        name="a",
        coordination=MemoryCoordination(CLOCK),
        settings=FollowerSettings(),
        most_rebuilds=2,
        clock=CLOCK,
        sink=events.append,
        **options,
    )


class Failing(HostTarget):
    """A target that fails at its n-th writes."""

    def __init__(self, state: BitState, *fail_at: int) -> None:
        super().__init__(state)
        self._fail_at = fail_at
        self.writes = 0

    def scatter(self, *args: Any, **keywords: Any) -> None:
        """Write, or die before writing."""
        self.writes += 1
        if self.writes in self._fail_at:
            raise OSError("a bit of hardware fell off")
        super().scatter(*args, **keywords)


def test_a_joiner_with_a_checkpoint_starts_at_its_version(site: Site, tmp_path: Path) -> None:
    """The live weights' own fingerprint says which version a local folder is at."""
    live = join(site.run, checkpoint=site.old, scratch=tmp_path, clock=CLOCK)
    assert live.active.version == 0
    assert live.report.via == "checkpoint v0"
    newer = join(site.run, checkpoint=site.new, scratch=tmp_path, clock=CLOCK)
    assert newer.active == site.head


def test_a_joiner_without_a_checkpoint_rebuilds_head(site: Site, tmp_path: Path) -> None:
    """Config and weights come from the bucket; the live bits are HEAD's, twice in a row."""
    for _ in range(2):
        live = join(site.run, checkpoint=None, scratch=tmp_path, clock=CLOCK)
        assert live.active == site.head
        assert read_whole(live.target).equals(site.state(site.new))
        assert live.report.size_bytes > 0
    assert [p.name for p in sorted(live.folder.iterdir())] == [
        "config.json",
        "generation_config.json",
    ]


def test_an_actor_that_trusts_keys_takes_nothing_unsigned(site: Site, tmp_path: Path) -> None:
    """With trusted keys neither a join, nor a rebuild, nor what is staged may be unsigned."""
    trusted = TrustedKeys.of([SigningKey.generate().public])
    with pytest.raises(IntegrityError) as caught:
        join(site.run, checkpoint=None, scratch=tmp_path, clock=CLOCK, trusted=trusted)
    assert caught.value.kind is Kind.SIGNATURE
    weights = followed(site, HostTarget(site.state(site.old)), [], trusted=trusted)
    for work in (weights.catch_up, weights.re_anchor):
        with pytest.raises(IntegrityError) as caught:
            work()
        assert caught.value.kind is Kind.SIGNATURE
    weights.stop()


def test_a_foreign_checkpoint_is_not_believed(site: Site, tmp_path: Path) -> None:
    """A folder whose weights are no version of the run is overwritten with HEAD, live."""
    foreign = tiny_checkpoint(tmp_path / "foreign", seed=99)
    live = join(site.run, checkpoint=foreign, scratch=tmp_path, clock=CLOCK)
    assert live.active == site.head
    assert live.report.via.startswith("full v0")
    assert read_whole(live.target).equals(site.state(site.new))


def test_a_checkpoint_of_another_model_is_refused_by_name(site: Site, tmp_path: Path) -> None:
    """Names the layout does not have, or has tied, are named, not skipped (CASES R6, R9)."""
    untied = tiny_checkpoint(tmp_path / "untied", seed=1, tied=False)
    with pytest.raises(IntegrityError, match="lm_head") as drifted:
        join(site.run, checkpoint=untied, scratch=tmp_path, clock=CLOCK)
    assert drifted.value.kind is Kind.ALIAS_DRIFT
    with pytest.raises(InvalidInputError) as caught:
        ModuleTarget(load_model(site.old), Layout.build([]))
    assert caught.value.kind is Kind.TENSOR_NAMES


def test_weights_in_doubt_are_named(site: Site) -> None:
    """Weights that are not at the version they claim raise IntegrityError(fingerprint)."""
    with pytest.raises(IntegrityError) as caught:
        require_at(HostTarget(site.state(site.old)), site.head, run="r")
    assert caught.value.kind is Kind.FINGERPRINT


def test_what_exists_is_activated_before_serving(site: Site) -> None:
    """Catching up stages and activates at once, and one event says from what."""
    events: list[Any] = []
    state = site.state(site.old)
    weights = followed(site, HostTarget(state), events)
    weights.catch_up()
    assert weights.active == site.head
    assert state.equals(site.state(site.new))
    (joined,) = [event for event in events if isinstance(event, ActorJoined)]
    assert (joined.via, joined.version) == ("checkpoint v0 + 1 deltas", 2)
    assert joined.size_bytes > 0


def test_an_update_that_fails_is_tried_again(site: Site) -> None:
    """A write that dies rolls back to the base, bit for bit; the next try succeeds."""
    events: list[Any] = []
    state = site.state(site.old)
    weights = followed(site, Failing(state, 3), events)
    weights.catch_up()
    assert weights.active == site.fence
    assert not weights.poisoned
    assert state.equals(site.state(site.old))
    weights.catch_up()
    assert weights.active == site.head
    assert [e.kind for e in events if isinstance(e, ActivationFailed)] == ["rolled_back"]


def test_weights_changed_by_somebody_else_poison_until_rebuilt(site: Site) -> None:
    """A foreign write is found at the next activation; only a proved rebuild makes it serve."""
    events: list[Any] = []
    state = site.state(site.old)
    weights = followed(site, HostTarget(state), events)
    for bits in state.arrays:
        bits ^= bits.dtype.type(1)
    weights.catch_up()
    assert weights.poisoned
    assert weights.active == site.fence
    weights.re_anchor()
    assert not weights.poisoned
    assert weights.active == site.head
    assert state.equals(site.state(site.new))


def test_values_that_no_version_can_hold_poison_until_rebuilt(site: Site) -> None:
    """An FP32 weight that is no BF16 any more cannot even be read as bits: nothing is served."""
    model = load_model(site.old)
    weights = followed(site, ModuleTarget(model, site.layout), [])
    weights._prove()
    assert not weights.poisoned
    for parameter in model.parameters():
        parameter.data += 1e-7
    weights.catch_up()
    assert weights.poisoned
    weights.re_anchor()
    assert not weights.poisoned
    assert weights.active == site.head
    assert weights.fingerprint() == site.head.fingerprint


def test_a_machine_that_cannot_hold_weights_leaves(site: Site) -> None:
    """Rebuilt again and again without one activation, an actor gives up with the reason."""
    weights = followed(site, HostTarget(site.state(site.old)), [])
    weights.re_anchor()
    weights.re_anchor()
    with pytest.raises(ApplyError, match="rebuilt 2 times") as caught:
        weights.re_anchor()
    assert caught.value.kind is Kind.POISONED


def test_a_broken_memory_never_passes_for_a_rebuild(site: Site) -> None:
    """A rebuild whose live weights read back differently raises and stays poisoned."""

    class Forgetful(HostTarget):
        def scatter(self, *args: Any, **keywords: Any) -> None:
            """Write nothing."""

    weights = followed(site, Forgetful(site.state(site.old)), [])
    with pytest.raises(IntegrityError):
        weights.re_anchor()
