"""A run's URL is enough to publish and to follow."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import deltastore
from deltastore.clock import SystemClock
from deltastore.errors import ApplyError, IntegrityError, InvalidInputError, Kind, NotFoundError
from deltastore.format.layout import Layout
from deltastore.format.mixing import fingerprint_state
from deltastore.format.signing import SigningKey, TrustedKeys, sign_with
from deltastore.pipeline.host import HostSource, HostTarget
from deltastore.repository.run import create_run
from deltastore.storage.fs import FileStore
from tests.unit.pipeline.harness import (
    ENTRIES,
    RUN,
    change_some,
    random_state,
    write_files,
)


@pytest.fixture
def made(tmp_path):
    """A run in a folder, its URL and the state of version 0."""
    layout = Layout.build(ENTRIES)
    state = random_state(layout, 1)
    create_run(
        FileStore(tmp_path / "runs"),
        RUN,
        layout=layout,
        files=write_files(state, tmp_path / "checkpoint"),
        fingerprint=fingerprint_state(state),
        clock=SystemClock(),
    )
    return f"file://{tmp_path}/runs/{RUN}", state


def test_publish_and_follow_by_url(made):
    """A trainer and an actor that know only the URL end with the same bits."""
    url, state = made
    live = state.copy()
    publisher = deltastore.connect(url).publisher(HostSource(state))
    actor = deltastore.connect(url).actor(HostTarget(live))
    change_some(state, np.random.default_rng(1))
    publisher.publish(1).result(60)
    publisher.close()
    assert actor.stage()
    assert actor.activate().version == deltastore.connect(url).head() == 2
    assert live.equals(state)
    assert not actor.stage()
    assert actor.activate().version == 2


def test_foreign_weights_are_replaced(made):
    """Weights of no version of the run become HEAD, rebuilt from the bucket."""
    url, state = made
    live = random_state(state.layout, 7)
    actor = deltastore.connect(url).actor(HostTarget(live))
    assert actor.active.version == 0
    assert live.equals(state)


def test_failed_activation_is_staged_anew(made):
    """After a rolled-back activation the same update can be staged and activated again."""
    url, state = made
    live = state.copy()
    target = _Flaky(live)
    actor = deltastore.connect(url).actor(target)
    publisher = deltastore.connect(url).publisher(HostSource(state))
    change_some(state, np.random.default_rng(1))
    publisher.publish(1).result(60)
    publisher.close()
    actor.stage()
    target.failing = True
    with pytest.raises(ApplyError) as err:
        actor.activate()
    assert err.value.kind is Kind.ROLLED_BACK
    actor.stage()
    actor.activate()
    assert live.equals(state)


def test_wrong_urls(tmp_path):
    """A URL without a run, and one of an unknown kind, are refused by name."""
    with pytest.raises(NotFoundError) as err:
        deltastore.connect(f"file://{tmp_path}/nothing")
    assert err.value.kind is Kind.RUN_MISSING
    with pytest.raises(InvalidInputError) as bad:
        deltastore.connect("memory://x/y")
    assert bad.value.kind is Kind.URL


def test_renamed_run(made, tmp_path):
    """A run that was copied under another name is called that, before anything of it is read."""
    url, _ = made
    shutil.copytree(url.removeprefix("file://"), tmp_path / "other")
    with pytest.raises(IntegrityError, match=f"is of run '{RUN}'") as err:
        deltastore.connect(f"file://{tmp_path}/other")
    assert err.value.kind is Kind.BROKEN_CHAIN


def test_unknown_attribute():
    """The package has no attribute that it does not name."""
    with pytest.raises(AttributeError, match="nothing"):
        deltastore.nothing  # noqa: B018


class _Flaky(HostTarget):
    """A target that fails once when told to."""

    failing = False

    def scatter(self, tensor, box, indices, bits):
        if self.failing:
            self.failing = False
            raise RuntimeError("the device fell over")
        super().scatter(tensor, box, indices, bits)


def test_signed_from_version_zero_on(tmp_path):
    """With a pinned key a run signed from its creation is followed, and strangers are refused."""
    key, stranger = SigningKey.generate(), SigningKey.generate()
    layout = Layout.build(ENTRIES)
    state = random_state(layout, 1)
    create_run(
        FileStore(tmp_path / "runs"),
        RUN,
        layout=layout,
        files=write_files(state, tmp_path / "checkpoint"),
        fingerprint=fingerprint_state(state),
        clock=SystemClock(),
        signer=sign_with(key),
    )
    url = f"file://{tmp_path}/runs/{RUN}"
    trusted = TrustedKeys.of(versions=[key.public])
    live = state.copy()
    assert deltastore.connect(url, trusted=trusted).replay().state.equals(state)
    actor = deltastore.connect(url, trusted=trusted).actor(HostTarget(live))
    publisher = deltastore.connect(url).publisher(HostSource(state), signer=sign_with(key))
    change_some(state, np.random.default_rng(1))
    publisher.publish(1).result(60)
    publisher.close()
    actor.stage()
    actor.activate()
    assert live.equals(state)
    deltastore.connect(url).publisher(HostSource(state), signer=sign_with(stranger)).close()
    with pytest.raises(IntegrityError) as err:
        actor.stage()
    assert err.value.kind is Kind.SIGNATURE
