"""Runs of tiny models, published as a trainer does, and what engines that follow them must be."""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from typer.testing import CliRunner

import deltastore
from deltastore.adapters.safetensors_dir import load_state, scan_checkpoint
from deltastore.chain.lattice import Span
from deltastore.cli.app import app
from deltastore.clock import SystemClock
from deltastore.maintenance.composites import write_composite
from deltastore.maintenance.settings import MaintenanceSettings
from deltastore.pipeline.host import HostSource
from deltastore.repository.resolve import find_head
from deltastore.repository.way import survey
from tests.vllm.remote_engine import RemoteEngine, raised

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from deltastore.format.layout import BitState
    from deltastore.pipeline.publisher import Publisher
    from deltastore.repository.run import Run
    from tests.vllm.crash_nursery import Nursery

PROMPTS: list[dict[str, Any]] = [
    {"prompt_token_ids": [1, 2, 3]},
    {"prompt_token_ids": list(range(100, 180))},
]
STEPS = np.array([1, -1], np.int64)
UNPACKED = {"weight_transfer_config": {"backend": "deltastore"}}
"""A fresh engine to compare with: of the same kind, but it follows nothing."""


def cli(*words: str | Path) -> dict[str, Any]:
    """Run the `deltastore` command and return its JSON document."""
    result = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert isinstance(document, dict)
    return document


@dataclass
class TinyRun:
    """A run in a folder, and the trainer that publishes to it.

    Args:
        folder: for the run, its replayed checkpoints and the engines' spool.
        checkpoint: version 0.
    """

    folder: Path
    checkpoint: Path
    name: str = "r1"
    seed: int = 0
    publishers: list[Publisher] = field(default_factory=list)
    states: list[BitState] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.url = f"file://{self.folder}/runs/{self.name}"
        self.rng = np.random.default_rng(self.seed)
        cli("init", self.url, "--checkpoint", self.checkpoint)

    @cached_property
    def run(self) -> Run:
        """The run as its store has it."""
        return deltastore.connect(self.url).run

    @cached_property
    def state(self) -> BitState:
        """The trainer's weights; change them between publishes."""
        return load_state(scan_checkpoint(self.checkpoint), self.run.layout)

    @property
    def body_folder(self) -> Path:
        """Where the run's objects are."""
        return self.folder / "runs" / self.name

    @property
    def spool(self) -> Path:
        """Where engines meet their stager."""
        return self.folder / "spool"

    def settings(self, **more: Any) -> dict[str, Any]:
        """An engine's section in the additional configuration."""
        near = {"run": self.url, "folder": str(self.spool), "poll_min_s": 0.05}
        return {**near, "vote_timeout_s": 20, "stage_wait_s": 20, **more}

    def arguments(self, **more: Any) -> dict[str, Any]:
        """Arguments for `start_engine` of an engine that follows the run."""
        return {
            "weight_transfer_config": {"backend": "deltastore"},
            "additional_config": {"deltastore": self.settings(**more)},
        }

    def change(self, share: float = 0.02) -> None:
        """Move a share of all elements by one step, as an optimizer does, and some far."""
        for bits in self.state.arrays:
            places = self.rng.random(bits.size) < share
            steps = self.rng.choice(STEPS, int(places.sum()))
            steps[bits[places] << 1 == 0] = 1  # below a zero there is a NaN
            bits[places] += steps.astype(bits.dtype)
            far = self.rng.random(bits.size) < share / 50
            bits[far] ^= bits.dtype.type(1 << 5)

    def restore(self, state: BitState) -> None:
        """Have the weights of an earlier version again."""
        for mine, wanted in zip(self.state.arrays, state.arrays, strict=True):
            mine[:] = wanted

    def publish(self, change: Callable[[], None] | None = None) -> int:
        """Train one step and publish it; the new version."""
        (change or self.change)()
        if not self.publishers:  # taking the run over commits the state as the next version
            self.publishers.append(deltastore.connect(self.url).publisher(HostSource(self.state)))
            return int(self.publishers[0].head.core.version)
        publication = self.publishers[0].publish(find_head(self.run) + 1)
        assert publication is not None
        return int(publication.result(60).core.version)

    def compose(self, base: int, version: int) -> None:
        """Make the composite that leads from `base` to `version`."""
        found = survey(self.run, find_head(self.run), lowest=0, streams=2)
        write_composite(
            self.run,
            found,
            Span(base, version),
            clock=SystemClock(),
            settings=MaintenanceSettings(),
        )

    def lose_deltas(self, *versions: int) -> None:
        """Delete the bodies of deltas, as retention does."""
        for version in versions:
            for path in (self.body_folder / "deltas").glob(f"*{version}/*"):
                path.unlink()

    def replayed(self, version: int) -> Path:
        """The checkpoint folder that `deltastore replay` makes of a version."""
        out = self.folder / f"replayed-{version}"
        if not out.exists():
            cli("replay", self.url, "--version", str(version), "--out", out)
        return out

    def label(self, version: int) -> str:
        """What an engine at that version says that it is."""
        policy_hash = cli("show", self.url, "--version", str(version))["version"]["policy_hash"]
        return f"{version}:{policy_hash}"

    def close(self) -> None:
        """Let go of the trainer's threads."""
        for publisher in self.publishers:
            publisher.close()


def initialise(engine: Any, **settings: Any) -> None:
    """Have an engine find its version, and begin to stage."""
    engine.init_weight_transfer_engine({"init_info": settings})


def update(engine: Any, version: int | str) -> None:
    """One whole update, as vLLM's interface has it."""
    engine.start_weight_update()
    engine.update_weights({"update_info": {"version": version}})
    engine.finish_weight_update()


def statuses(engine: Any) -> list[dict[str, Any]]:
    """What every rank says of itself."""
    found = engine.collective_rpc("deltastore_status")
    assert isinstance(found, list)
    return found


def generate(engine: Any, tokens: int = 12) -> list[list[Any]]:
    """Greedy tokens and log-probs; prompts are computed anew, whatever was cached.

    In lists alone: engines in this process and in others are compared, whose answers are JSON.
    """
    if isinstance(engine, RemoteEngine):
        found = engine.said(tokens)
        assert isinstance(found, list)
        return found
    from vllm import SamplingParams

    assert engine.reset_prefix_cache()
    sampling = SamplingParams(temperature=0, max_tokens=tokens, logprobs=5, ignore_eos=True)
    outputs = [one.outputs[0] for one in engine.generate(PROMPTS, sampling, use_tqdm=False)]
    return [
        [
            list(one.token_ids),
            [sorted([key, value.logprob] for key, value in row.items()) for row in one.logprobs],
        ]
        for one in outputs
    ]


def digests(engine: Any) -> list[dict[str, str]]:
    """SHA-256 of every parameter and buffer, of every rank."""
    found = engine.collective_rpc("compute_weight_checksums")
    assert isinstance(found, list)
    return found


def served(engine: Any) -> tuple[Any, Any]:
    """What an engine is: parameters' digests of every rank, and greedy tokens with log-probs."""
    return digests(engine), generate(engine)


def served_by_a_fresh_one(
    run: TinyRun, version: int, nursery: Nursery | None = None, **arguments: Any
) -> tuple[Any, Any]:
    """The same of an engine on the replayed version.

    It comes from the nursery, or lives in this process, where no other may live then.
    """
    if nursery is not None:
        with raised(nursery, run.replayed(version), **UNPACKED, **arguments) as apart:
            return served(apart)
    from tests.vllm.kit import close_engine, start_engine

    fresh = start_engine(run.replayed(version), **UNPACKED, **arguments)
    try:
        return served(fresh)
    finally:
        close_engine(fresh)


def follow_five(engine: Any, run: TinyRun) -> tuple[Any, Any]:
    """Follow five versions, one by one; what the engine is at the fifth."""
    before = generate(engine)
    for _ in range(5):
        version = run.publish()
        update(engine, version)
        assert engine.get_weight_version() == run.label(version)
        run.states.append(run.state.copy())
    found = served(engine)
    assert found[1] != before
    return found


def skip_to_the_fifth(engine: Any, run: TinyRun) -> int:
    """After `follow_five`, whatever came then: from the first one's weights to the fifth's by one
    composite, over lost deltas. The newest version; its bits are the fifth's, so that one fresh
    engine judges both. For engines with `WorkerProbe`."""
    first, *rest = run.states
    base = run.publish(functools.partial(run.restore, first))
    update(engine, base)
    with _stager_held(engine):  # else it may have a delta before that is lost
        for state in rest:
            version = run.publish(functools.partial(run.restore, state))
        run.compose(base, version)
        run.lose_deltas(*range(base + 1, version))
    update(engine, version)
    label = run.label(version)
    assert engine.get_weight_version() == label
    active = {"version": version, "policy_hash": label.partition(":")[2]}
    for status in statuses(engine):
        assert (status["active"], status["poisoned"]) == (active, "")
    return version


@contextmanager
def _stager_held(engine: Any) -> Iterator[None]:
    (stager,) = filter(None, engine.collective_rpc("probe_stager"))
    os.kill(stager, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(stager, signal.SIGCONT)


def until_staged(engine: Any, version: int, *, within_s: float = 20.0) -> None:
    """Wait until every rank has that version staged."""
    clock, never = SystemClock(), threading.Event()
    deadline_s = clock.monotonic_s() + within_s
    while {status["staged"] for status in statuses(engine)} != {version}:
        assert clock.monotonic_s() < deadline_s, statuses(engine)
        clock.wait(never, 0.02)
