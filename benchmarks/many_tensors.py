"""A way that nobody measured took seconds of 20,000 tensors: every source and target has its row.

Run by `make bench-pipeline`. Process time, so what else the machine does is not in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.pipeline import CLOCK, RUN, RUNS, Trainer, least_cpu_s, publish, published
from benchmarks.report import Report, Target
from deltastore.adapters.torch_diff import DeviceSource
from deltastore.adapters.torch_state import ModuleSource, ModuleTarget
from deltastore.format.layout import BitState
from deltastore.pipeline.applier import Applier
from deltastore.pipeline.follower import Follower
from deltastore.pipeline.host import HostSource, HostTarget
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion
from deltastore.repository.run import open_run
from deltastore.storage.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path


def many_tensors(report: Report, folder: Path) -> None:
    """CASE R28: what 20,000 tensors add to a version of the same bytes in 20, on every way.

    Of publishing, and of following: fetching, decoding and proving it, then activating.
    """
    torch.set_num_threads(1)
    ways = {
        "host": (HostSource, HostTarget),
        "a module": (
            lambda state: ModuleSource(module_of(state), layout=state.layout),
            lambda state: ModuleTarget(module_of(state), state.layout),
        ),
        "a module, on its device": (
            lambda state: DeviceSource(module_of(state), layout=state.layout),
            lambda state: ModuleTarget(module_of(state), state.layout),
        ),
    }
    for way, (source, target) in ways.items():
        few, many = (
            least_cpu_of_versions(tensors, source, target, folder) for tensors in (20, 20_000)
        )
        added = [a - b for a, b in zip(many, few, strict=True)]
        for part, seconds in (
            ("publishing", added[0]),
            ("staging and activating", added[1] + added[2]),
        ):
            report.add(
                f"20,000 tensors, {way}: added to {part}, summed over threads",
                seconds,
                "s",
                target=Target(most=0.5),
                density=0.01,
            )


def module_of(state: BitState) -> dict:
    """A state dict over the bits of a BF16 state."""
    return {
        name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        for name, bits in state.items()
    }


def least_cpu_of_versions(tensors: int, source, target, folder: Path) -> list[float]:
    """Process seconds of publishing, staging and activating a version, the least of several."""
    elements = 4_000_000 // tensors
    trainer = Trainer(tensors, elements, 0.01)
    points = trainer.points
    live = BitState(trainer.layout, [points[0].copy() for _ in range(tensors)])
    trainer.source = source(live)
    trainer.held = live.copy
    rng = np.random.default_rng(tensors)

    def step() -> None:
        for bits in live.arrays:
            bits[rng.integers(0, elements, elements // 100)] += np.uint16(1)

    trainer.step = step
    times = []
    with published(trainer, MemoryStore(), folder) as publisher:
        run = open_run(publisher._home.store, RUN)
        point = ActiveVersion.of(load_manifest(run, publisher.head.core.version))
        follower = Follower(run, point, name="a", clock=CLOCK)
        applier = Applier(target(live.copy()), point, name="a", clock=CLOCK)
        for _ in range(RUNS):
            published_s = publish(trainer, publisher).cpu_s
            staged_s = least_cpu_s(follower.catch_up, runs=1)
            activated_s = least_cpu_s(lambda: applier.activate(follower.take()), runs=1)
            times.append((published_s, staged_s, activated_s))
    return [min(column) for column in zip(*times, strict=True)]
