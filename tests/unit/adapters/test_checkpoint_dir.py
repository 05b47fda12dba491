"""Checkpoint folders: read bit for bit, refused by name, written beside and renamed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.torch
import torch

from deltastore.adapters.safetensors_dir import (
    Checkpoint,
    DirectorySource,
    checkpoint_layout,
    load_state,
    scan_checkpoint,
    write_checkpoint,
    write_state,
)
from deltastore.errors import (
    ConflictError,
    DeltastoreError,
    IntegrityError,
    InvalidInputError,
    Kind,
    StorageError,
)
from deltastore.format.checkpoint_file import build_header, parse_header
from deltastore.format.dtypes import DType
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.testing.checkpoints import next_checkpoint, tiny_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INDEX = "model.safetensors.index.json"


def loaded(folder: Path) -> BitState:
    """The state of a folder in its own layout."""
    checkpoint = scan_checkpoint(folder)
    return load_state(checkpoint, checkpoint_layout(checkpoint))


def write_small(folder: Path, tensors: dict[str, list[int]], **config: object) -> Path:
    """A checkpoint of a few BF16 vectors and that configuration."""
    folder.mkdir()
    header = build_header([TensorEntry(n, DType.BF16, (len(v),)) for n, v in tensors.items()])
    body = [np.array(tensors[t.name], "<u2").tobytes() for t in header.data_order()]
    (folder / "model.safetensors").write_bytes(b"".join([header.raw, *body]))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refusal(folder: Path) -> DeltastoreError:
    """What scanning the folder raises."""
    with pytest.raises(InvalidInputError) as caught:
        scan_checkpoint(folder)
    return caught.value


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


class TestTiedNames:
    """CASE R6: an embedding and its head, stored once or twice, tied or not."""

    def test_one_name_has_the_other_as_alias(self, tmp_path: Path) -> None:
        """CASE R6: of a tied checkpoint with one name the layout accepts either."""
        folder = write_small(tmp_path / "a", {EMBED: [1, 2]}, tie_word_embeddings=True)
        (spec,) = checkpoint_layout(scan_checkpoint(folder)).tensors
        assert (spec.name, spec.aliases) == (EMBED, (HEAD,))

    def test_a_head_alone_is_the_embedding(self, tmp_path: Path) -> None:
        """CASE R6: a tied checkpoint that stores the head only gives the same two names."""
        folder = write_small(tmp_path / "a", {HEAD: [1, 2]}, tie_word_embeddings=True)
        (spec,) = checkpoint_layout(scan_checkpoint(folder)).tensors
        assert (spec.name, spec.aliases) == (HEAD, (EMBED,))

    def test_both_names_are_stored_once_and_written_twice(self, tmp_path: Path) -> None:
        """CASE R6: both names exposed are one tensor of the state and two of the files."""
        tensors = {HEAD: [1, 0x7FC1], "norm": [3], EMBED: [1, 0x7FC1]}
        folder = write_small(tmp_path / "a", tensors, tie_word_embeddings=True)
        checkpoint = scan_checkpoint(folder)
        state = loaded(folder)
        assert [(s.name, s.aliases) for s in state.layout.tensors] == [
            ("norm", ()),
            (EMBED, (HEAD,)),
        ]
        state[HEAD][0] = 9
        write_state(state, tmp_path / "b", template=checkpoint)
        written = safetensors.torch.load_file(tmp_path / "b" / "model.safetensors")
        for name in (HEAD, EMBED):
            assert written[name].view(torch.int16).tolist() == [9, 0x7FC1]

    def test_drift_is_refused(self, tmp_path: Path) -> None:
        """CASE R6: tied names with different bits are AliasDrift naming both, in both readers."""
        tensors = {EMBED: [1, 0], HEAD: [1, 0x8000]}
        folder = write_small(tmp_path / "a", tensors, tie_word_embeddings=True)
        checkpoint = scan_checkpoint(folder)
        layout = checkpoint_layout(checkpoint)
        for read in (
            lambda: load_state(checkpoint, layout),
            lambda: list(DirectorySource(checkpoint).boxes(layout)),
        ):
            with pytest.raises(IntegrityError) as caught:
                read()
            assert caught.value.kind is Kind.ALIAS_DRIFT
            assert EMBED in caught.value.message
            assert HEAD in caught.value.message

    def test_untied_source_of_a_tied_run(self, tmp_path: Path) -> None:
        """CASE R6: a source that does not say tied may offer both names, while they are equal."""
        tied = write_small(tmp_path / "a", {EMBED: [1, 2]}, tie_word_embeddings=True)
        layout = checkpoint_layout(scan_checkpoint(tied))
        same = write_small(tmp_path / "b", {EMBED: [5, 6], HEAD: [5, 6]})
        assert load_state(scan_checkpoint(same), layout)[EMBED].tolist() == [5, 6]
        other = write_small(tmp_path / "c", {EMBED: [5, 6], HEAD: [5, 7]})
        with pytest.raises(IntegrityError) as caught:
            load_state(scan_checkpoint(other), layout)
        assert caught.value.kind is Kind.ALIAS_DRIFT

    def test_equal_bytes_do_not_tie(self, tmp_path: Path) -> None:
        """CASE R6: untied tensors with equal bytes stay two."""
        tensors = {EMBED: [1, 2], HEAD: [1, 2]}
        folder = write_small(tmp_path / "a", tensors, tie_word_embeddings=False)
        assert [s.aliases for s in checkpoint_layout(scan_checkpoint(folder)).tensors] == [(), ()]

    @pytest.mark.parametrize(
        ("config", "tied"),
        [
            ({}, False),
            ({"architectures": ["GemmaForCausalLM"]}, True),
            ({"architectures": ["BertModel"]}, False),
            ({"architectures": ["X"], "text_config": {"tie_word_embeddings": True}}, True),
            ({"text_config": {"tie_word_embeddings": False}}, False),
        ],
        ids=["nothing said", "a head, none stored", "no head", "text part", "text part untied"],
    )
    def test_what_a_configuration_says(
        self, tmp_path: Path, config: dict[str, object], tied: bool
    ) -> None:
        """Of a lone embedding the configuration decides whether it is the head as well."""
        folder = write_small(tmp_path / "a", {EMBED: [1]}, **config)
        (spec,) = checkpoint_layout(scan_checkpoint(folder)).tensors
        assert spec.aliases == ((HEAD,) if tied else ())

    def test_tied_names_of_other_shapes(self, tmp_path: Path) -> None:
        """Tied names whose shapes differ are refused with the way out."""
        tensors = {EMBED: [1, 2], HEAD: [1]}
        error = refusal(write_small(tmp_path / "a", tensors, tie_word_embeddings=True))
        assert error.kind is Kind.CHECKPOINT
        assert "tie_word_embeddings" in str(error.hint)


class TestFiles:
    """What travels beside the weights."""

    def test_configuration_travels_other_weights_do_not(self, tmp_path: Path) -> None:
        """Regular small files travel; other weights and odd files are listed with reasons."""
        folder = tiny_checkpoint(tmp_path / "a")
        for name in ("tokenizer.json", "merges.txt", ".gitattributes", "pytorch_model.bin"):
            (folder / name).write_text("x")
        (folder / "consolidated.safetensors").write_text("x")
        (folder / "model card.md").write_text("x")
        (folder / "onnx").mkdir()
        with (folder / "huge.txt").open("wb") as handle:
            handle.truncate((64 << 20) + 1)
        checkpoint = scan_checkpoint(folder)
        assert sorted(f.name for f in checkpoint.files) == [
            "config.json",
            "generation_config.json",
            "merges.txt",
            "model.safetensors",
            "tokenizer.json",
        ]
        assert {f.name for f in checkpoint.extras} == {
            f.name for f in checkpoint.files if f.name != "model.safetensors"
        }
        reasons = {left.name: left.reason for left in checkpoint.left_out}
        assert set(reasons) == {
            ".gitattributes",
            "consolidated.safetensors",
            "huge.txt",
            "model card.md",
            "onnx",
            "pytorch_model.bin",
        }
        assert reasons["huge.txt"] == "larger than 64 MiB"

    def test_links_are_followed(self, tmp_path: Path) -> None:
        """A model hub's cache is a folder of links: it reads like any other."""
        real = tiny_checkpoint(tmp_path / "blobs")
        (tmp_path / "snapshot").mkdir()
        for path in real.iterdir():
            (tmp_path / "snapshot" / path.name).symlink_to(path)
        assert loaded(tmp_path / "snapshot").equals(loaded(real))
        assert len(scan_checkpoint(tmp_path / "snapshot").files) == 3


class TestRefusals:
    """CASE R9 and bad folders: InvalidInputError(checkpoint) names the file and the way out."""

    def test_no_folder(self, tmp_path: Path) -> None:
        """A path that is not there."""
        error = refusal(tmp_path / "absent")
        assert error.kind is Kind.CHECKPOINT
        assert "absent" in error.message

    def test_no_safetensors(self, tmp_path: Path) -> None:
        """A folder with weights of another format names them and says how to convert."""
        (tmp_path / "pytorch_model.bin").write_text("x")
        error = refusal(tmp_path)
        assert "pytorch_model.bin" in error.message
        assert "safetensors" in str(error.hint)

    def test_two_saves_in_one_folder(self, tmp_path: Path) -> None:
        """A single file beside an index: nothing says which is newer."""
        folder = tiny_checkpoint(tmp_path / "a", shards=2)
        tiny_checkpoint(folder, shards=1)
        assert "both" in refusal(folder).message

    def test_truncated_file(self, tmp_path: Path) -> None:
        """A file cut anywhere is named."""
        folder = tiny_checkpoint(tmp_path / "a")
        path = folder / "model.safetensors"
        body = path.read_bytes()
        for size in (0, 7, 50, len(body) - 1):
            path.write_bytes(body[:size])
            error = refusal(folder)
            assert error.kind is Kind.CHECKPOINT
            assert "model.safetensors" in error.message

    def test_large_file_pointer(self, tmp_path: Path) -> None:
        """A Git LFS pointer in place of the file says what to run."""
        folder = tiny_checkpoint(tmp_path / "a")
        (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
        assert "git lfs pull" in str(refusal(folder).hint)

    def test_absent_shard(self, tmp_path: Path) -> None:
        """An index that names a file that is not there."""
        folder = tiny_checkpoint(tmp_path / "a", shards=2)
        (folder / "model-00002-of-00002.safetensors").unlink()
        assert "model-00002-of-00002.safetensors" in refusal(folder).message

    @pytest.mark.parametrize("change", ["absent tensor", "unlisted tensor", "moved tensor"])
    def test_index_that_disagrees(self, tmp_path: Path, change: str) -> None:
        """An index that names a tensor its file has not, or not one that it has, or elsewhere."""
        folder = tiny_checkpoint(tmp_path / "a", shards=2)
        index = json.loads((folder / INDEX).read_text())
        weights = index["weight_map"]
        shards = sorted(set(weights.values()))
        if change == "absent tensor":
            weights["model.norm.bias"] = shards[0]
        elif change == "unlisted tensor":
            del weights["model.norm.weight"]
        else:
            other = shards[1] if weights["model.norm.weight"] == shards[0] else shards[0]
            weights["model.norm.weight"] = other
        (folder / INDEX).write_text(json.dumps(index))
        assert "model.norm" in refusal(folder).message

    def test_tensor_in_two_files(self, tmp_path: Path) -> None:
        """The same name in two shards is refused, whatever the index says."""
        folder = tiny_checkpoint(tmp_path / "a", shards=2)
        names = sorted(p.name for p in folder.glob("*.safetensors"))
        shutil.copyfile(folder / names[0], folder / names[1])
        assert "is in both" in refusal(folder).message

    @pytest.mark.parametrize(
        "file", ["../evil.safetensors", "/etc/x.safetensors", 7, "a.bin", "a/b.safetensors"]
    )
    def test_index_that_leaves_the_folder(self, tmp_path: Path, file: object) -> None:
        """An index may name files of its own folder only."""
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
        assert refusal(tmp_path).kind in (Kind.CHECKPOINT, Kind.NAME)

    @pytest.mark.parametrize(
        "text", ["{", "[]", '{"weight_map":{}}', '{"weight_map":[]}', "[" * 9999]
    )
    def test_malformed_index(self, tmp_path: Path, text: str) -> None:
        """An index that is no index is named."""
        (tmp_path / INDEX).write_text(text)
        assert INDEX in refusal(tmp_path).message

    def test_file_that_shrinks_after_the_scan(self, tmp_path: Path) -> None:
        """A checkpoint overwritten between scan and read is an error, not other bits."""
        folder = tiny_checkpoint(tmp_path / "a")
        checkpoint = scan_checkpoint(folder)
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-2])
        with pytest.raises(InvalidInputError, match="changed since"):
            load_state(checkpoint, checkpoint_layout(checkpoint))

    def test_checkpoint_of_other_dtype(self, tmp_path: Path) -> None:
        """CASE R10: an FP32 checkpoint is not cast into a BF16 run."""
        layout = checkpoint_layout(scan_checkpoint(tiny_checkpoint(tmp_path / "a")))
        other: Checkpoint = scan_checkpoint(tiny_checkpoint(tmp_path / "b", dtype=DType.F32))
        with pytest.raises(InvalidInputError) as caught:
            load_state(other, layout)
        assert caught.value.kind is Kind.TENSOR_DTYPE


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
