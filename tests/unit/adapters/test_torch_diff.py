"""Changes found where the weights lie are the changes that the host finds, block for block."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deltastore.adapters import torch_diff
from deltastore.adapters.torch_diff import DeviceSource, diff_chunk
from deltastore.adapters.torch_tensors import device_patterns
from deltastore.chain.diff import diff_run, diff_tensor
from deltastore.chain.diff_many import SHORT_RUN_ELEMENTS
from deltastore.errors import StorageError
from deltastore.format.box import Box
from deltastore.format.dtypes import DType
from deltastore.format.fingerprint import ZERO
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.mixing import fingerprint_change
from deltastore.pipeline.publisher import Publisher
from deltastore.storage.memory import MemoryStore
from deltastore.testing.faults import FaultyStore, Op, fail_at
from tests.unit.pipeline.harness import World, change_some

CPU = torch.device("cpu")
TORCH = {
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.F32: torch.float32,
    DType.I64: torch.int64,
}


def _pair(dtype, elements, share, seed=0):
    rng = np.random.default_rng(seed)
    top = 1 << min(dtype.element_bits, 63)
    base = rng.integers(0, top, elements, np.uint64).astype(dtype.bits_dtype)
    new = base.copy()
    places = rng.random(elements) < share
    new[places] = rng.integers(0, top, int(places.sum()), np.uint64).astype(dtype.bits_dtype)
    return Layout.build([TensorEntry("w", dtype, (elements,))]), base, new


def _assert_same(found, expected):
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.tensor, a.box, a.kind) == (b.tensor, b.box, b.kind)
        assert a.fingerprint_change == b.fingerprint_change
        assert np.array_equal(a.values, b.values)
        assert a.values.dtype == b.values.dtype
        assert (a.indices is None) == (b.indices is None)
        assert a.indices is None or np.array_equal(a.indices, b.indices)


@pytest.mark.parametrize("dtype", [DType.U8, DType.BF16, DType.F32, DType.F64], ids=str)
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.2, 0.3, 1.0])
def test_same_blocks_as_on_the_host(monkeypatch, dtype, share):
    """CASE N9: at every width and density the device's blocks equal the host's, also over runs."""
    monkeypatch.setattr(torch_diff, "MAX_BOX_ELEMENTS", 1 << 12)
    monkeypatch.setattr("deltastore.chain.diff.MAX_BOX_ELEMENTS", 1 << 12)
    layout, base, new = _pair(dtype, 3 * (1 << 12) + 77, share)
    found = diff_chunk(layout, 0, 0, device_patterns(base, CPU), device_patterns(new, CPU))
    _assert_same(found, diff_tensor(layout, 0, base, new))


def test_one_dense_run_among_sparse_ones(monkeypatch):
    """A run that changed throughout does not make its neighbours travel whole."""
    monkeypatch.setattr(torch_diff, "MAX_BOX_ELEMENTS", 1 << 12)
    monkeypatch.setattr("deltastore.chain.diff.MAX_BOX_ELEMENTS", 1 << 12)
    layout, base, new = _pair(DType.BF16, 8 << 12, 0.001)
    new[1 << 12 : 2 << 12] ^= 0x5A5A
    found = diff_chunk(layout, 0, 0, device_patterns(base, CPU), device_patterns(new, CPU))
    _assert_same(found, diff_tensor(layout, 0, base, new))


def test_beyond_two_to_the_31():
    """CASE N1: places at and beyond element 2^31 of a tensor are found as the host finds them."""
    start, count = 1 << 31, 8
    layout = Layout.build([TensorEntry("w", DType.BF16, (start + count,))])
    base = np.zeros(count, np.uint16)
    for share in (1, count):
        new = base.copy()
        new[count - share :] = 0x8000
        found = list(
            diff_chunk(layout, 0, start, device_patterns(base, CPU), device_patterns(new, CPU))
        )
        expected = diff_run(layout, 0, start, base, new)
        _assert_same(found, [expected])
        assert found[0].box == Box.run(start, count)
        places = np.arange(count - share, count) + start
        change = fingerprint_change(places, base[count - share :], new[count - share :])
        assert found[0].fingerprint_change == change


class _Offers:
    """Of a module whose one tensor has no memory: the last run of it."""

    def __init__(self, start, patterns):
        self.start, self.patterns = start, patterns

    def __call__(self, layout, *, most):
        """As `ModuleSource.runs`."""
        yield 0, self.start, self.patterns


@pytest.mark.parametrize("short", [0, SHORT_RUN_ELEMENTS])
def test_a_source_beyond_two_to_the_31(monkeypatch, short):
    """CASE N1: the last run of a tensor of 2^31 + 8 elements, on either of the source's ways."""
    monkeypatch.setattr(torch_diff, "SHORT_RUN_ELEMENTS", short)
    count = (1 << 31) + 8
    layout = Layout.build([TensorEntry("w", DType.U8, (count,))])
    base = BitState(layout, [np.zeros(count, np.uint8)])  # of zero pages: no memory is touched
    if not short:
        monkeypatch.setattr(DeviceSource, "_committed", lambda *_: torch.from_numpy(base["w"]))
    source = DeviceSource({}, layout=layout)
    live = torch.zeros(8, dtype=torch.uint8)
    live[7] = 3
    monkeypatch.setattr(source, "runs", _Offers(1 << 31, live))
    (block,) = source.changes(base, ZERO)
    assert block.box == Box.run(1 << 31, 8)
    assert (block.indices.tolist(), block.values.tolist()) == ([7], [3])
    places = np.array([count - 1])
    change = fingerprint_change(places, np.zeros(1, np.uint8), np.full(1, 3, np.uint8))
    assert block.fingerprint_change == change


class _Live(TorchDispatchMode):
    """Counts the bytes of tensors that live at once."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and func._schema.name.split("::")[1] not in {
            "view",
            "slice",
            "alias",
            "detach",
        }:
            size = out.untyped_storage().nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(out, self._free, size)
        return out

    def _free(self, size):
        self.now -= size


@pytest.mark.parametrize("share", [0.01, 0.24, 0.5])
def test_memory_of_a_chunk(share):
    """Beside baseline and weights, at most 12 bytes per element of a chunk are allocated."""
    layout, base, new = _pair(DType.BF16, 1 << 18, share)
    old, live = device_patterns(base, CPU), device_patterns(new, CPU)
    with _Live() as mode:
        blocks = list(diff_chunk(layout, 0, 0, old, live))
    assert blocks
    assert 0 < mode.peak <= 12 * (1 << 18)


@pytest.fixture(params=[0, SHORT_RUN_ELEMENTS], ids=["on the device", "together"])
def world(request, monkeypatch, tmp_path):
    """A run whose home can fail, and a state dict of torch tensors over the trainer's bits.

    All of them are small: once they are compared like long ones, once like what they are.
    """
    monkeypatch.setattr(torch_diff, "SHORT_RUN_ELEMENTS", request.param)
    return World(tmp_path, home_store=FaultyStore(MemoryStore()))


def _module(world):
    tensors = {}
    for spec, bits in zip(world.layout.tensors, world.state.arrays, strict=True):
        patterns = device_patterns(bits, CPU)
        tensors[spec.name] = patterns.view(TORCH[spec.dtype]).view(spec.shape)
    return tensors


def test_short_and_long_tensors_come_in_order():
    """Tensors of every length and type, on the device one by one or together: the host's blocks."""
    sizes = [3, SHORT_RUN_ELEMENTS, SHORT_RUN_ELEMENTS + 1, 70, 1, 90_000, 5]
    dtypes = [DType.BF16, DType.F32, DType.BF16, DType.BF16, DType.I64, DType.BF16, DType.F16]
    rows = zip(sizes * 3, dtypes * 3, strict=True)
    layout = Layout.build(TensorEntry(f"t{i}", d, (n,)) for i, (n, d) in enumerate(rows))
    base = BitState.zeros(layout)
    new = base.copy()
    for i, bits in enumerate(new.arrays):
        bits[:: 1 + i * 37] += bits.dtype.type(i % 5)
    module = {
        spec.name: device_patterns(bits, CPU).view(TORCH[spec.dtype])
        for spec, bits in zip(layout.tensors, new.arrays, strict=True)
    }
    expected = [
        block
        for tensor, bits in enumerate(new.arrays)
        for block in diff_tensor(layout, tensor, base.arrays[tensor], bits)
    ]
    _assert_same(DeviceSource(module, layout=layout).changes(base, ZERO), expected)


def test_publishes_the_same_versions(world):
    """A publisher over a device source yields what the bucket replays to, version after version."""
    source = DeviceSource(_module(world), layout=world.layout)
    publisher = Publisher.open(world.run, source, clock=world.clock)
    for step in range(1, 5):
        change_some(world.state, world.rng, 0.6 if step == 3 else 0.02)
        publisher.publish(step).result(60)
        assert world.replayed().equals(world.state)
    publisher.close()


def test_copy_follows_commits_only(world):
    """CASE R1: after a failed version the device's copy is still that of the last committed one."""
    source = DeviceSource(_module(world), layout=world.layout)
    publisher = Publisher.open(world.run, source, clock=world.clock)
    for step in range(1, 7):
        change_some(world.state, world.rng)
        if step in {2, 3}:
            part = "/deltas/" if step == 2 else "/versions/"
            world.home_store.add(fail_at(Op.PUT, 1, key_contains=part))
            with pytest.raises(StorageError):
                publisher.publish(step).result(60)
        else:
            publisher.publish(step).result(60)
            assert world.replayed().equals(world.state)
    publisher.close()


def test_copy_is_taken_anew_for_another_run_of_the_trainer(world):
    """A source that meets a state it did not make reads the host's copy again."""
    source = DeviceSource(_module(world), layout=world.layout)
    first = Publisher.open(world.run, source, clock=world.clock)
    first.close()
    other = world.publisher(step=1)
    world.step(other, 2)
    other.close()
    again = Publisher.open(world.run, source, clock=world.clock, step=3)
    change_some(world.state, world.rng)
    again.publish(4).result(60)
    again.close()
    assert world.replayed().equals(world.state)


@pytest.mark.gpu
def test_same_blocks_on_an_accelerator():
    """The blocks found on an accelerator equal the host's."""
    layout, base, new = _pair(DType.BF16, 1 << 23, 0.01)
    device = torch.device("cuda")
    found = diff_chunk(layout, 0, 0, device_patterns(base, device), device_patterns(new, device))
    _assert_same(found, diff_tensor(layout, 0, base, new))
