"""`python -m workers.demo`: a real model learns while its actors follow by deltas, on one machine.

Exit code 0 only if every check at the end held; 1 if one did not, or a part failed; 2 for settings
that cannot work; 130 on Ctrl-C. Whatever was started is stopped on every way out; the run's folder
stays, with logs, events, checks and the page.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console

from deltastore.clock import SystemClock
from deltastore.errors import DeltastoreError, InvalidInputError
from deltastore.observability.report import Check, Page, render
from deltastore.observability.table import size
from deltastore.testing.servers import ServerStartError
from workers.demo.director import Director
from workers.demo.fleet import DemoError, Fleet
from workers.demo.meter import MemoryMeter
from workers.demo.settings import DemoSettings
from workers.demo.site import open_site
from workers.wiring import child_environment, user_cache_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deltastore.clock import Clock
    from deltastore.observability.view import RunView

# Spinning OpenMP threads and one malloc arena per thread cost this machine more than the work.
_CHILD_VARIABLES = {
    "OMP_WAIT_POLICY": "passive",
    "MALLOC_ARENA_MAX": "2",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code."""
    console = Console(highlight=False)
    clock = SystemClock()

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        return run(_parse(arguments), console, clock)
    except InvalidInputError as err:
        say(f"error: {err}")
        return 2
    except (DeltastoreError, DemoError, ServerStartError) as err:
        say(f"error: {err}")
        return 1
    except KeyboardInterrupt:
        say("interrupted: everything that was started has been stopped")
        return 130


def run(settings: DemoSettings, console: Console, clock: Clock) -> int:
    """Build the surroundings, train, check, and write the page."""

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    started_s = clock.monotonic_s()
    model_dir = settings.model or _fetch_model()
    stamp = datetime.fromtimestamp(clock.utc_s(), UTC).strftime("%Y%m%d-%H%M%S")
    run_dir = (settings.runs_dir / f"demo-{stamp}").resolve()
    run_dir.mkdir(parents=True)
    say(f"model: {model_dir}")
    say(f"run folder: {run_dir}")
    with (
        MemoryMeter(clock) as meter,
        open_site(settings, run_dir, model_dir, clock, say) as site,
    ):
        environment = child_environment({**_CHILD_VARIABLES, **site.secret_environment})
        with Fleet(run_dir / "logs", environment, clock) as fleet:
            director = Director(site, fleet, meter, console, clock, started_s)
            checks = _direct(director, environment, say)
    facts = [
        ("wall time", f"{clock.monotonic_s() - started_s:.0f} s"),
        ("peak memory of all processes", size(meter.peak_bytes)),
        *_figures(director.watch.view, settings),
    ]
    _write_report(run_dir, director.watch.view, settings, facts, checks)
    for name, value in facts:
        say(f"{name}: {value}")
    say(f"page: {run_dir / 'report.html'}")
    failed = [check.name for check in checks if not check.passed]
    say("everything held" if not failed else f"did not hold: {'; '.join(failed)}")
    return 1 if failed else 0


def _direct(
    director: Director, environment: Mapping[str, str], say: Callable[[str], None]
) -> list[Check]:
    """Train and check; what ends it early is a check that did not hold, so the page says it too."""
    try:
        done = director.train()
        say("checking")
        return director.check(done, environment, say)
    except (DeltastoreError, DemoError) as err:
        say(f"error: {err}")
        return [Check("the demo ran to its end", False, str(err))]


def _fetch_model() -> Path:
    from workers.demo.model import fetch_model  # torch: only when it is needed

    return fetch_model(user_cache_dir())


def _figures(view: RunView, settings: DemoSettings) -> list[tuple[str, str]]:
    rows = [row.published for row in view.published()]
    sent = [row for row in rows if row is not None and row.nnz]
    nnz = sum(row.nnz for row in sent)
    delta_bytes = sum(row.delta_bytes for row in sent)
    dense_bytes = sum(row.dense_bytes for row in sent)
    elements = sum(row.elements for row in sent)
    if not nnz:
        return [("versions", str(len(rows)))]
    return [
        ("engine", settings.engine),
        ("versions", f"{len(rows)} at lr {settings.lr:g}"),
        ("mean density", f"{nnz / elements:.3%}"),
        ("bytes per changed element", f"{delta_bytes / nnz:.3f}"),
        ("sent instead of dense", f"{size(delta_bytes)} of {size(dense_bytes)}"),
        ("dense over delta", f"{dense_bytes / delta_bytes:.1f}x"),
        *_mismatch(view),
    ]


def _mismatch(view: RunView) -> list[tuple[str, str]]:
    """How differently sampler and learner compute: what truncated importance ratios make up for."""
    kls = [step.mismatch_kl for step in view.steps.values() if isfinite(step.mismatch_kl)]
    ratios = [step for step in view.steps.values() if isfinite(step.ratio_mean)]
    if not ratios:
        return []
    means, largest = fmean(s.ratio_mean for s in ratios), max(s.ratio_max for s in ratios)
    kl = f"{fmean(kls):.2e} per token" if kls else "no token of zero lag was learned from"
    return [
        ("importance ratio", f"mean {means:.3f}, largest {largest:.2f} before truncation"),
        ("mismatch KL at zero lag", kl),
    ]


def _write_report(
    run_dir: Path,
    view: RunView,
    settings: DemoSettings,
    facts: Sequence[tuple[str, str]],
    checks: Sequence[Check],
) -> None:
    page = Page(f"deltastore demo, {run_dir.name}", facts, checks)
    (run_dir / "report.html").write_text(render(view, page), encoding="utf-8")
    summary = {
        "settings": {"lr": settings.lr, "steps": settings.steps, "engine": settings.engine},
        "facts": dict(facts),
        "checks": [asdict(check) for check in checks],
    }
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def _parse(arguments: Sequence[str] | None) -> DemoSettings:
    parser = argparse.ArgumentParser(
        prog="python -m workers.demo",
        description="A real model learns while its actors follow by deltas, on this machine.",
    )
    parser.add_argument("--lr", type=float, default=3e-5, help="3e-5 learns; 1e-6 is sparse")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps")
    parser.add_argument("--engine", default="transformers", help="what actors sample with")
    parser.add_argument("--vllm-python", type=Path, help="the Python of vLLM's environment")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and sampling")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where it is kept")
    parser.add_argument("--keep-data", action="store_true", help="keep the buckets' files")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder instead of SmolLM2")
    options = parser.parse_args(arguments)
    return DemoSettings(
        options.runs_dir,
        lr=options.lr,
        steps=options.steps,
        engine=options.engine,
        seed=options.seed,
        keep_data=options.keep_data,
        model=options.model,
        vllm_python=options.vllm_python,
    )


if __name__ == "__main__":
    sys.exit(main())
