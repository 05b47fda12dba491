"""A baseline on another model or another update proves nothing: all ways start from this one site.

A random Qwen3 of some 130 M parameters as a checkpoint folder, an update of about 1 % of its
elements in three forms (a run that publishes it, patches as vLLM takes them, a whole checkpoint),
and what measures a process's memory. `python -m benchmarks.vllm_site FOLDER` is the trainer: it
publishes a version per line on its standard input, there and back again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.traces import GaussianTrace
from deltastore.adapters.safetensors_dir import load_state, scan_checkpoint
from deltastore.adapters.safetensors_write import write_checkpoint
from deltastore.clock import SystemClock
from deltastore.format.checkpoint_file import build_header
from deltastore.format.dtypes import DType
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.mixing import fingerprint_state
from deltastore.pipeline.host import HostSource
from deltastore.pipeline.publisher import Publisher
from deltastore.repository.run import create_run, open_run
from deltastore.storage.url import open_store

if TYPE_CHECKING:
    from typing import Self

    from deltastore.repository.run import Run

DENSITY = 0.0096
ONE = np.uint16(0x3F80)
NAME = "bench"
CONFIG = {
    "vocab_size": 32_768,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 15,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "bos_token_id": None,
}


@dataclass(frozen=True, slots=True)
class Site:
    """Where everything lies."""

    folder: Path

    @property
    def old(self) -> Path:
        """The checkpoint that engines load: version 0."""
        return self.folder / "old"

    @property
    def new(self) -> Path:
        """The checkpoint after the update."""
        return self.folder / "new"

    @property
    def patches(self) -> Path:
        """The update as indices and values per tensor, there and back, in a safetensors file."""
        return self.folder / "patches.safetensors"

    @property
    def url(self) -> str:
        """Of the run."""
        return f"file://{self.folder}/runs/{NAME}"

    def run(self) -> Run:
        """The run, opened."""
        store = open_store(f"file://{self.folder}/runs", clock=SystemClock())
        return open_run(store, NAME)


@dataclass(frozen=True, slots=True)
class Facts:
    """The model and the update, for the report."""

    elements: int
    nnz: int
    seed: int


def build(folder: Path) -> tuple[Site, Facts]:
    """Make the model, the update and the run."""
    site = Site(folder)
    layout, config = _skeleton()
    trace = GaussianTrace(layout.elements)
    base, new = _state(layout, trace.base), _state(layout, trace.updated(DENSITY))
    header = build_header(TensorEntry(t.name, t.dtype, t.shape) for t in layout.tensors)
    for state, out in ((base, site.old), (new, site.new)):
        for position, spec in enumerate(layout.tensors):
            if "norm" in spec.name:  # of size 0.02 they would leave nothing of the activations
                state.arrays[position][:] = ONE
        write_checkpoint(
            state, out, headers={"model.safetensors": header}, extras={"config.json": config}
        )
    nnz = _write_patches(site, base, new)
    checkpoint = scan_checkpoint(site.old)
    create_run(
        open_store(f"file://{folder}/runs", clock=SystemClock()),
        NAME,
        layout=layout,
        files=checkpoint.files,
        fingerprint=fingerprint_state(base),
        clock=SystemClock(),
        probe=False,
    )
    return site, Facts(layout.elements, nnz, trace.seed)


def _skeleton() -> tuple[Layout, bytes]:
    """Names and shapes of the model's tensors, the tied head left out, and its config.json."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**CONFIG, architectures=["Qwen3ForCausalLM"], dtype="bfloat16")
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Qwen3ForCausalLM(config).named_parameters()}
    entries = [TensorEntry(name, DType.BF16, tuple(shapes[name])) for name in sorted(shapes)]
    return Layout.build(entries), config.to_json_string().encode()


def _state(layout, bits) -> BitState:
    ends = [spec.first_element + spec.elements for spec in layout.tensors]
    return BitState(layout, [part.copy() for part in np.split(bits, ends[:-1])])


def _write_patches(site: Site, base: BitState, new: BitState) -> int:
    import torch
    from safetensors.torch import save_file

    tensors, nnz = {}, 0
    for spec, old, fresh in zip(base.layout.tensors, base.arrays, new.arrays, strict=True):
        where = np.flatnonzero(old != fresh)
        if where.size:
            nnz += where.size
            tensors[f"{spec.name}::where"] = torch.from_numpy(where.astype(np.int32))
            for label, bits in (("there", fresh), ("back", old)):
                values = torch.from_numpy(bits[where].view(np.int16)).view(torch.bfloat16)
                tensors[f"{spec.name}::{label}"] = values
    save_file(tensors, site.patches)
    return nnz


class Trainer:
    """The trainer in a process of its own: its memory is not the engine's. A context manager."""

    def __init__(self, site: Site) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.vllm_site", str(site.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.fence = self._answer()

    def publish(self) -> int:
        """Publish the update, or its inverse; the version."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> int:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the trainer ended with code {self._process.wait()}")
        return int(json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def train(folder: Path) -> None:
    """Publish one version per line of standard input."""
    site = Site(folder)
    run = site.run()
    states = [load_state(scan_checkpoint(path), run.layout) for path in (site.old, site.new)]
    live = BitState(run.layout, [bits.copy() for bits in states[0].arrays])
    publisher = Publisher.open(run, HostSource(live), clock=SystemClock())
    print(json.dumps(publisher.head.core.version), flush=True)
    for step, _line in enumerate(sys.stdin, 1):
        for bits, fresh in zip(live.arrays, states[step % 2].arrays, strict=True):
            bits[:] = fresh
        publication = publisher.publish(step)
        print(json.dumps(publication.result(120).core.version), flush=True)
    publisher.close()


class PeakMemory:
    """The most memory that this process had resident since it was made, above what it had then."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's: the peak starts anew
        self._base_bytes = _resident("VmRSS")

    def above_bytes(self) -> int:
        """The peak so far, above the start."""
        return _resident("VmHWM") - self._base_bytes


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"this kernel does not say {field}")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    train(Path(sys.argv[1]))
