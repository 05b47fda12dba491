"""Checkpoint folders: read bit for bit, refused by name, written beside and renamed."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.torch
import torch

from deltastore.adapters.safetensors_dir import (
    DirectorySource,
    checkpoint_layout,
    load_state,
    scan_checkpoint,
    write_checkpoint,
    write_state,
)
from deltastore.errors import (
    ConflictError,
    InvalidInputError,
    Kind,
    StorageError,
)
from deltastore.format.checkpoint_file import parse_header
from deltastore.format.layout import BitState, Layout
from deltastore.testing.checkpoints import next_checkpoint, tiny_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


def loaded(folder: Path) -> BitState:
    """The state of a folder in its own layout."""
    checkpoint = scan_checkpoint(folder)
    return load_state(checkpoint, checkpoint_layout(checkpoint))


@pytest.mark.parametrize("shards", [1, 3])
def test_state_has_the_librarys_bits(tmp_path: Path, shards: int) -> None:
    """CASE N7, N9, R10: BF16, FP32, int64, 0-d, empty tensors have the bits the library reads."""
    folder = tiny_checkpoint(tmp_path / "a", extras=True, shards=shards)
    state = loaded(folder)
    expected = {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in safetensors.torch.load_file(path).items()
    }
    assert set(state) == set(expected)
    for name, tensor in expected.items():
        assert state[name].tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_source_covers_every_element_once_in_layout_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The streamed boxes put together are the state, also in another checkpoint's order."""
    monkeypatch.setattr("deltastore.adapters.safetensors_dir.MAX_BOX_ELEMENTS", 1000)
    layout = checkpoint_layout(
        scan_checkpoint(tiny_checkpoint(tmp_path / "a", extras=True, shards=2))
    )
    checkpoint = scan_checkpoint(tiny_checkpoint(tmp_path / "b", extras=True, seed=7))
    state = load_state(checkpoint, layout)
    boxes = list(DirectorySource(checkpoint).boxes(layout))
    assert max(box.box.elements for box in boxes) == 1000
    assert [b.tensor for b in boxes] == sorted(b.tensor for b in boxes)
    for tensor, bits in enumerate(state.arrays):
        parts = [b for b in boxes if b.tensor == tensor]
        starts = np.cumsum([0, *(b.bits.size for b in parts)])[:-1]
        assert [b.box.start[0] for b in parts] == starts.tolist()
        assert np.array_equal(np.concatenate([b.bits for b in parts] or [bits[:0]]), bits)


@pytest.mark.parametrize(("shards", "tied"), [(1, True), (3, False)])
def test_written_checkpoint_is_the_template_byte_for_byte(
    tmp_path: Path, shards: int, tied: bool
) -> None:
    """Writing a checkpoint's own state gives its files again: shards, order, metadata, extras."""
    folder = tiny_checkpoint(tmp_path / "a", extras=True, shards=shards, tied=tied)
    (folder / "tokenizer.json").write_text("{}")
    checkpoint = scan_checkpoint(folder)
    write_state(loaded(folder), tmp_path / "new" / "b", template=checkpoint)
    written = {p.name: p.read_bytes() for p in (tmp_path / "new" / "b").iterdir()}
    assert written == {p.name: p.read_bytes() for p in folder.iterdir()}
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["b"]


def test_written_state_travels_through_a_layout_of_other_order(tmp_path: Path) -> None:
    """CASE R4: NaN, -0 and subnormal patterns of a later checkpoint arrive in every bit."""
    base = tiny_checkpoint(tmp_path / "a", extras=True)
    later = next_checkpoint(base, tmp_path / "b", density=0.5)
    layout = Layout.build(sorted(scan_checkpoint(base).entries, key=lambda e: e.name))
    state = load_state(scan_checkpoint(later), layout)
    write_state(state, tmp_path / "c", template=scan_checkpoint(base))
    written = (tmp_path / "c" / "model.safetensors").read_bytes()
    assert written == (later / "model.safetensors").read_bytes()


def test_without_template_one_file_holds_the_layout(tmp_path: Path) -> None:
    """A state alone becomes one safetensors file that reads back to the same state."""
    state = loaded(tiny_checkpoint(tmp_path / "a", extras=True))
    write_state(state, tmp_path / "b")
    again = load_state(scan_checkpoint(tmp_path / "b"), state.layout)
    assert again.equals(state)


def test_files_may_come_as_bytes(tmp_path: Path) -> None:
    """A checkpoint whose small files are in memory only is written the same way."""
    folder = tiny_checkpoint(tmp_path / "a")
    header = parse_header((folder / "model.safetensors").read_bytes())
    write_checkpoint(
        loaded(folder),
        tmp_path / "b",
        headers={"model.safetensors": header},
        extras={"config.json": (folder / "config.json").read_bytes()},
    )
    assert loaded(tmp_path / "b").equals(loaded(folder))


def test_existing_output_is_refused(tmp_path: Path) -> None:
    """A checkpoint is never written in place, not even into an empty folder."""
    folder = tiny_checkpoint(tmp_path / "a")
    (tmp_path / "b").mkdir()
    with pytest.raises(ConflictError) as caught:
        write_state(loaded(folder), tmp_path / "b", template=scan_checkpoint(folder))
    assert caught.value.kind is Kind.OUTPUT_EXISTS
    assert list((tmp_path / "b").iterdir()) == []


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A write that fails on the way is StorageError(disk_full) and leaves no folder of any name."""
    state = loaded(tiny_checkpoint(tmp_path / "a"))

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError) as caught:
        write_state(state, tmp_path / "out" / "b")
    assert caught.value.kind is Kind.DISK_FULL
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_that_appears_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writers of one folder: the later one gets output_exists and changes nothing."""
    state = loaded(tiny_checkpoint(tmp_path / "a"))
    sync = os.fsync

    def overtaken(descriptor: int) -> None:
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "b" / "first").touch()
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", overtaken)
    with pytest.raises(ConflictError) as caught:
        write_state(state, tmp_path / "b")
    assert caught.value.kind is Kind.OUTPUT_EXISTS
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["first"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_template_of_another_architecture_is_refused(tmp_path: Path) -> None:
    """CASE R9: a template that lacks a tensor of the state is refused by name, nothing written."""
    state = loaded(tiny_checkpoint(tmp_path / "a", tied=False))
    template = scan_checkpoint(tiny_checkpoint(tmp_path / "b", tied=True))
    with pytest.raises(InvalidInputError, match=r"missing: 'lm_head\.weight'") as caught:
        write_state(state, tmp_path / "c", template=template)
    assert caught.value.kind is Kind.TENSOR_NAMES
    assert not (tmp_path / "c").exists()


def test_transformers_loads_what_is_written(tmp_path: Path) -> None:
    """A written checkpoint is one for transformers: no key missing or unexpected, same logits."""
    transformers = pytest.importorskip("transformers")
    folder = tiny_checkpoint(tmp_path / "a", shards=2)
    write_state(loaded(folder), tmp_path / "b", template=scan_checkpoint(folder))
    tokens = torch.arange(8)[None]
    logits = []
    for path in (folder, tmp_path / "b"):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            path, output_loading_info=True
        )
        assert not any(report.values())
        with torch.no_grad():
            logits.append(model(tokens).logits)
    assert torch.equal(*logits)
