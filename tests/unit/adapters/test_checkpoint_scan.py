"""What a scan of a checkpoint folder finds, ties, carries, and refuses by name."""

from __future__ import annotations

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
    write_state,
)
from deltastore.errors import (
    DeltastoreError,
    IntegrityError,
    InvalidInputError,
    Kind,
)
from deltastore.format.checkpoint_file import build_header
from deltastore.format.dtypes import DType
from deltastore.format.layout import BitState, TensorEntry
from deltastore.testing.checkpoints import tiny_checkpoint

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


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pipe_in_a_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    """A pipe that nobody writes to is named at once instead of waited for."""
    folder = write_small(tmp_path / "c", {"a": [1, 2]})
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert name in refusal(folder).message


def test_a_folder_that_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    """What the system says about the folder itself is a refusal, too."""
    assert "cannot be read" in refusal(tmp_path / ("x" * 300)).message
