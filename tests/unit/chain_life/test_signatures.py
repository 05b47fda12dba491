"""Actors with pinned keys follow the trainer they know, not whoever can write to the bucket."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deltastore.errors import IntegrityError, Kind
from deltastore.format.manifest import VersionManifest
from deltastore.format.shortcut import AnchorManifest, CompositeManifest
from deltastore.format.signing import SigningKey, TrustedKeys, sign_with, unsigned
from deltastore.maintenance.anchors import write_anchor
from deltastore.maintenance.composites import run_composites
from deltastore.pipeline.follower import Follower
from deltastore.repository.fetch import load_manifest
from deltastore.repository.shortcuts import load_anchor
from deltastore.storage.store import PutMode
from tests.unit.chain_life.kit import Chain

TRAINER, WORKER, THIEF, NEXT = (SigningKey(bytes([n]) * 32) for n in range(4))
TRUSTED = TrustedKeys.of([TRAINER.public], [WORKER.public])


@pytest.fixture
def signed(tmp_path):
    """A run whose versions the trainer signs."""
    return Chain(tmp_path, signer=sign_with(TRAINER))


def maintain(chain, signer):
    """An anchor and composites."""
    write_anchor(chain.run, 8, clock=chain.clock, signer=signer)
    run_composites(chain.run, clock=chain.clock, signer=signer)


def test_signed_chain_is_followed_with_its_shortcuts(signed):
    """With the trainer's and the worker's key pinned, versions and shortcuts are used."""
    signed.extend(18)
    maintain(signed, sign_with(WORKER))
    assert signed.replay(trusted=TRUSTED).report.via == "anchor v8 + 1 composite + 2 deltas"
    follower = Follower(
        signed.run, signed.held(0).point, name="a", clock=signed.clock, trusted=TRUSTED
    )
    follower.catch_up()
    assert follower.tip.version == 18


@pytest.mark.parametrize(
    "signer",
    [unsigned, sign_with(THIEF), sign_with(WORKER)],
    ids=["nobody", "thief", "worker"],
)
def test_version_that_the_trainer_did_not_sign_is_refused(tmp_path, signer):
    """An unsigned version, a stranger's, or one by the maintenance key activates nowhere."""
    chain = Chain(tmp_path, signer=sign_with(TRAINER))
    chain.extend(2)
    chain.signer = signer
    chain.extend(1)
    with pytest.raises(IntegrityError) as err:
        chain.replay(trusted=TRUSTED)
    assert err.value.kind is Kind.SIGNATURE
    follower = Follower(
        chain.run, chain.held(2).point, name="a", clock=chain.clock, trusted=TRUSTED
    )
    with pytest.raises(IntegrityError) as err:
        follower.poll()
    assert err.value.kind is Kind.SIGNATURE
    assert follower.staged() is None
    chain.replay(2, trusted=TRUSTED)
    chain.replay(3)


@pytest.mark.parametrize(
    "signer",
    [unsigned, sign_with(THIEF), sign_with(TRAINER)],
    ids=["nobody", "thief", "trainer"],
)
def test_shortcut_that_the_worker_did_not_sign_is_not_used(signed, signer):
    """Shortcuts by anybody but the pinned maintenance key are planned around."""
    signed.extend(18)
    maintain(signed, signer)
    assert signed.replay(trusted=TRUSTED).report.via == "full v0 + 18 deltas"


def test_signature_of_another_manifest_does_not_count(signed):
    """A signature moved from one manifest to another is refused."""
    signed.extend(2)
    one, two = load_manifest(signed.run, 1), load_manifest(signed.run, 2)
    forged = replace(two, signatures=one.signatures).to_bytes()
    signed.store.put(signed.run.keys.version(2), forged, mode=PutMode.OVERWRITE)
    with pytest.raises(IntegrityError):
        signed.replay(trusted=TRUSTED)


def test_history_below_a_signed_version_is_vouched_for(tmp_path):
    """A run that was unsigned once is trusted from its first signed version on."""
    chain = Chain(tmp_path)
    chain.extend(3)
    chain.signer = sign_with(TRAINER)
    chain.extend(1)
    chain.replay(trusted=TRUSTED)
    with pytest.raises(IntegrityError):
        chain.replay(3, trusted=TRUSTED)


def test_key_rotation(signed):
    """Old and new key sign for a while; readers change over at any time in between."""
    signed.extend(2)
    signed.signer = sign_with(TRAINER, NEXT)
    signed.extend(2)
    old, new = TrustedKeys.of([TRAINER.public]), TrustedKeys.of([NEXT.public])
    signed.replay(trusted=old)
    signed.replay(trusted=new)
    signed.signer = sign_with(NEXT)
    signed.extend(1)
    signed.replay(trusted=new)
    with pytest.raises(IntegrityError):
        signed.replay(trusted=old)


def test_worker_never_vouches_for_what_it_does_not_trust(signed):
    """A signing worker with pinned keys makes nothing from a stranger's shortcuts or versions."""
    signed.extend(16)
    run_composites(signed.run, clock=signed.clock, signer=sign_with(THIEF))
    signed.store.delete([signed.run.keys.composite(0, 16)])
    events = []
    done = run_composites(
        signed.run,
        clock=signed.clock,
        signer=sign_with(WORKER),
        trusted=TRUSTED,
        sink=events.append,
    )
    assert [(s.base, s.version) for s in done.written] == [(0, 16)]
    (written,) = [e for e in events if type(e).__name__ == "CompositeWritten"]
    assert written.inputs == 16
    signed.signer = sign_with(THIEF)
    signed.extend(8)
    with pytest.raises(IntegrityError):
        run_composites(signed.run, clock=signed.clock, trusted=TRUSTED)
    with pytest.raises(IntegrityError):
        write_anchor(signed.run, 24, clock=signed.clock, trusted=TRUSTED)


def test_signatures_survive_the_file(signed):
    """Version, anchor and composite manifests are read back with the signatures they had."""
    signed.extend(8)
    maintain(signed, sign_with(WORKER, NEXT))
    files = {
        signed.run.keys.version(8): VersionManifest,
        signed.run.keys.anchor(8): AnchorManifest,
        signed.run.keys.composite(0, 8): CompositeManifest,
    }
    for key, kind in files.items():
        text = signed.store.get(key)
        assert kind.from_bytes(text).to_bytes() == text
        assert kind.from_bytes(text).signatures
    load_anchor(signed.run, load_manifest(signed.run, 8), trusted=TRUSTED)
