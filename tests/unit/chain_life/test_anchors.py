"""An anchor is the whole version, for us and for every tool that reads checkpoints."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest

from deltastore.adapters.safetensors_dir import checkpoint_layout, load_state, scan_checkpoint
from deltastore.errors import IntegrityError, InvalidInputError, Kind, StorageError
from deltastore.events import AnchorWritten
from deltastore.format.dtypes import DType
from deltastore.format.layout import BitState, TensorEntry
from deltastore.format.mixing import fingerprint_state
from deltastore.format.shortcut import AnchorManifest
from deltastore.maintenance import anchors
from deltastore.maintenance.anchors import AnchorPolicy, ChainFacts, run_anchors, write_anchor
from deltastore.maintenance.settings import MaintenanceSettings
from deltastore.pipeline.host import HostSource
from deltastore.pipeline.publisher import Publisher
from deltastore.repository.fetch import load_manifest
from deltastore.repository.fullversion import upload_full
from deltastore.repository.run import create_run
from deltastore.repository.shortcuts import load_anchor
from deltastore.repository.template import read_template
from deltastore.storage.memory import MemoryStore
from deltastore.storage.store import PutMode
from deltastore.testing.checkpoints import next_checkpoint, tiny_checkpoint
from deltastore.testing.clock import FakeClock
from deltastore.testing.faults import Callback, FaultyStore, LoseResponse, Op, fail_at
from tests.unit.chain_life.kit import Chain

ALWAYS = AnchorPolicy(join_seconds_max=0.0, share_of_anchor_bytes_max=0.0)


def facts(**changes):
    """A chain of 100 versions that weighs as much as its anchor."""
    fields = {
        "head": 100,
        "start": 0,
        "candidate": 64,
        "anchor_bytes": 1000,
        "chain_bytes": 1000,
        "chain_links": 64,
    }
    return ChainFacts(**(fields | changes))


def download(run, files, folder):
    """An anchor's files as a folder."""
    folder.mkdir()
    for file in files:
        (folder / file.name).write_bytes(run.store.get(file.key))
    return folder


@pytest.fixture
def model(tmp_path):
    """A run of a tiny Llama with tied embeddings and odd extras at version 2."""

    def make(**options):
        first = tiny_checkpoint(tmp_path / "v0", seed=1, **options)
        second = next_checkpoint(first, tmp_path / "v1", seed=2, density=0.05)
        checkpoint = scan_checkpoint(first)
        layout = checkpoint_layout(checkpoint)
        store, clock = MemoryStore(), FakeClock()
        state = load_state(checkpoint, layout)
        run = create_run(
            store,
            "r1",
            layout=layout,
            files=checkpoint.files,
            fingerprint=fingerprint_state(state),
            clock=clock,
            probe=False,
        )
        newest = load_state(scan_checkpoint(second), layout)
        Publisher.open(run, HostSource(newest), clock=clock, step=1).close()
        return run, clock, newest

    return make


def test_policy_speaks_of_seconds_and_bytes():
    """An anchor is due when the chain costs a joiner too long, or too much of a whole state."""
    light = {"chain_bytes": 400, "chain_links": 1}
    assert AnchorPolicy(share_of_anchor_bytes_max=0.5).due(facts()) == 64
    assert AnchorPolicy(share_of_anchor_bytes_max=0.5).due(facts(**light)) is None
    assert AnchorPolicy(join_seconds_max=3.0, request_s=1.0).due(facts(**light)) is None
    slow = AnchorPolicy(join_seconds_max=3.0, bytes_per_s=100.0)
    assert slow.due(facts(**light)) == 64
    assert ALWAYS.due(facts(start=64)) is None
    assert ALWAYS.due(facts(start=70)) is None


@pytest.mark.parametrize(
    "bad",
    [
        {"join_seconds_max": -1.0},
        {"share_of_anchor_bytes_max": -0.1},
        {"bytes_per_s": 0.0},
        {"request_s": -1.0},
        {"multiple": 0},
    ],
)
def test_senseless_policy_is_refused(bad):
    """A policy that can never work is refused by the setting's name."""
    with pytest.raises(InvalidInputError, match=next(iter(bad))):
        AnchorPolicy(**bad)


def test_anchor_when_due_and_only_once(chain):
    """Anchors are cut on multiples of 64 as the chain grows, and not again."""
    chain.extend(63)
    assert run_anchors(chain.run, ALWAYS, clock=chain.clock) is None
    chain.extend(2)
    made = run_anchors(chain.run, ALWAYS, clock=chain.clock, sink=chain.events.append)
    assert made is not None
    assert made.core.target.version == 64
    (event,) = [e for e in chain.events if isinstance(e, AnchorWritten)]
    assert event.size_bytes == made.core.size_bytes
    assert event.chain_bytes > 0
    assert run_anchors(chain.run, ALWAYS, clock=chain.clock) is None
    assert write_anchor(chain.run, 64, clock=chain.clock) is None
    assert chain.replay().report.via == "anchor v64 + 1 deltas"
    chain.replay(64)
    chain.replay(63)


def test_anchor_of_an_unchanged_chain_holds_everything(chain):
    """CASE R11: anchors hold the full layout even when no version changed anything."""
    for _ in range(3):
        chain.publish()
    manifest = write_anchor(chain.run, 3, clock=chain.clock)
    assert manifest is not None
    assert len(manifest.core.tensor_fingerprints) == len(chain.layout)
    assert chain.replay(3).report.via == "anchor v3"


@pytest.mark.parametrize("shard_max_bytes", [1 << 30, 4096])
def test_safetensors_library_reads_an_anchor(model, tmp_path, shard_max_bytes):
    """The safetensors library finds every tensor of an anchor with the trainer's bits."""
    from safetensors.numpy import load

    run, clock, newest = model(extras=True, dtype=DType.F32)
    settings = MaintenanceSettings(shard_max_bytes=shard_max_bytes)
    manifest = write_anchor(run, 1, clock=clock, settings=settings)
    held = {}
    shards = [f for f in manifest.core.files if f.name.endswith(".safetensors")]
    for file in shards:
        held |= load(run.store.get(file.key))
    assert (len(shards) > 1) == (shard_max_bytes == 4096)
    for spec, bits in zip(newest.layout.tensors, newest.arrays, strict=True):
        got = np.ascontiguousarray(held.pop(spec.name)).reshape(-1)
        assert np.array_equal(got.view(bits.dtype), bits)
    assert held == {}


def test_transformers_loads_an_anchor(model, tmp_path):
    """transformers loads an anchor in shards by its index, with configuration, bit for bit."""
    import torch
    from transformers import AutoModelForCausalLM

    run, clock, newest = model()
    settings = MaintenanceSettings(shard_max_bytes=8192)
    manifest = write_anchor(run, 1, clock=clock, settings=settings)
    names = {file.name for file in manifest.core.files}
    assert {"config.json", "generation_config.json", "model.safetensors.index.json"} <= names
    folder = download(run, manifest.core.files, tmp_path / "anchor")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    weights = loaded.state_dict()
    for spec, bits in zip(newest.layout.tensors, newest.arrays, strict=True):
        got = weights[spec.name].reshape(-1).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(got, bits), spec.name


def test_anchor_is_a_checkpoint_of_ours(model, tmp_path):
    """An anchor's folder scans as a checkpoint with the run's layout and the version's state."""
    run, clock, newest = model(extras=True)
    manifest = write_anchor(run, 1, clock=clock, settings=MaintenanceSettings(shard_max_bytes=9000))
    folder = download(run, manifest.core.files, tmp_path / "anchor")
    assert load_state(scan_checkpoint(folder), run.layout).equals(newest)
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    assert set(index["weight_map"].values()) <= {f.name for f in manifest.core.files}


def test_both_tied_names_are_kept_where_the_template_has_them(tmp_path):
    """A checkpoint that stores both names of a tied tensor gets anchors with both names."""
    chain = Chain(tmp_path)
    template = read_template(chain.run)
    (embed,) = [entry for entry in template.entries if entry.name == "embed"]
    twice = (*template.entries, TensorEntry("head", embed.dtype, embed.shape))
    both = type(template)(twice, template.metadata, template.headers, template.extras)
    (shard, _config) = upload_full(chain.run, 5, chain.state, both)
    assert b'"head"' in chain.store.get(shard.key)
    assert b'"embed"' in chain.store.get(shard.key)


def test_template_that_lacks_a_tensor_is_refused(chain):
    """Files that would not hold every tensor are never uploaded."""
    template = read_template(chain.run)
    short = type(template)(template.entries[1:], {}, {}, ())
    with pytest.raises(InvalidInputError) as err:
        upload_full(chain.run, 1, chain.state, short)
    assert err.value.kind is Kind.TENSOR_NAMES


def test_template_survives_version_zero(chain):
    """After version 0's files are gone the newest anchor says how a checkpoint looks."""
    chain.extend(2)
    before = read_template(chain.run)
    write_anchor(chain.run, 2, clock=chain.clock)
    chain.store.delete(chain.list_keys("anchors/0000000000/"))
    after = read_template(chain.run)
    assert {e.name for e in after.entries} == {e.name for e in before.entries}
    assert [e.name for e in after.extras] == ["config.json"]
    assert chain.replay().report.via == "anchor v2"


def test_crash_at_every_put_names_no_absent_file(tmp_path):
    """Whatever put a worker dies at, an anchor's manifest names only files that are there."""
    for nth in range(1, 6):
        for action in (None, LoseResponse()):
            store = FaultyStore(MemoryStore())
            chain = Chain(tmp_path / f"{nth}{action is None}", store=store)
            chain.extend(3)
            store.add(fail_at(Op.PUT, nth, action, key_contains="/anchors/"))
            with contextlib.suppress(StorageError):
                write_anchor(chain.run, 3, clock=chain.clock)
            for key in chain.list_keys("anchors/0000000003.json"):
                for file in AnchorManifest.from_bytes(store.get(key)).core.files:
                    assert store.head(file.key).size_bytes == file.size_bytes
            store.clear()
            write_anchor(chain.run, 3, clock=chain.clock)
            assert chain.replay().report.via == "anchor v3"


def test_two_workers_cut_one_anchor(chain):
    """The loser of a race for an anchor deletes what it uploaded and reports nothing made."""
    chain.extend(3)
    inner = chain.store
    rival = Callback(lambda: write_anchor(chain.open(inner), 3, clock=chain.clock))
    store = FaultyStore(inner, [fail_at(Op.PUT, 1, rival, key_contains="0000000003.json")])
    assert write_anchor(chain.open(store), 3, clock=chain.clock) is None
    (key,) = chain.list_keys("anchors/0000000003.json")
    files = AnchorManifest.from_bytes(inner.get(key)).core.files
    assert sorted(chain.list_keys("anchors/0000000003/")) == sorted(file.key for file in files)


def test_worker_that_stood_still_takes_its_anchor_back(chain):
    """A worker stopped before its commit, whose bodies were taken meanwhile, leaves no anchor."""
    chain.extend(3)

    def stand_still():
        chain.clock.advance_s(10_000.0)
        chain.store.delete(chain.list_keys("anchors/0000000003/"))

    pause = fail_at(Op.PUT, 1, Callback(stand_still), key_contains="0000000003.json")
    store = FaultyStore(chain.store, [pause])
    with pytest.raises(StorageError, match="given up"):
        write_anchor(chain.open(store), 3, clock=chain.clock)
    assert chain.list_keys("anchors/0000000003") == []


def test_anchor_of_another_history_is_refused(chain, tmp_path):
    """CASE R3: an anchor that names another policy hash or run is not used, and planned around."""
    other = Chain(tmp_path / "other")
    chain.extend(4)
    other.extend(4)
    write_anchor(other.run, 4, clock=other.clock)
    for key in other.list_keys("anchors/0000000004"):
        chain.store.put(key, other.store.get(key), mode=PutMode.CREATE)
    with pytest.raises(IntegrityError):
        load_anchor(chain.run, load_manifest(chain.run, 4))
    assert chain.replay().report.via == "full v0 + 4 deltas"


def test_state_that_is_not_the_version_is_never_anchored(chain, monkeypatch):
    """A replay that went wrong is noticed before anything is uploaded."""
    chain.extend(2)
    wrong = [np.array(bits) for bits in chain.state.arrays]
    wrong[0][0] ^= 1
    replayed = chain.replay(2)
    lie = type(replayed)(BitState(chain.layout, wrong), replayed.manifest, replayed.report)
    monkeypatch.setattr(anchors, "replay", lambda *_args, **_options: lie)
    with pytest.raises(IntegrityError) as err:
        write_anchor(chain.run, 2, clock=chain.clock)
    assert err.value.kind is Kind.FINGERPRINT
    assert chain.list_keys("anchors/0000000002") == []
