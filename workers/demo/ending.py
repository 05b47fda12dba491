"""A demo that ends with "done" proves nothing: each claim is checked from outside the system.

The checks use what a user has: the files that the processes left, the real command line in a
process of its own, and transformers. None of them asks the code under test whether it was right.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from deltastore.observability.report import Check
from deltastore.testing.servers import find_program
from workers.config import VLLM
from workers.demo.fleet import DemoError
from workers.run_folder import FinalReport, RunFolder, read_report

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from deltastore.observability.view import RunView
    from workers.demo.settings import DemoSettings
    from workers.demo.site import Site

_COMMAND_S = 300.0
QUESTION = "What is 2 + 3? Answer with a number."
ANSWER = "5"
REPLAYED = "replayed"  # folder of the replayed checkpoint in the run's folder


def check_accuracy(view: RunView, settings: DemoSettings) -> Check:
    """The sampled accuracy rose; at a learning rate too small to learn it is only reported."""
    accuracies = [accuracy for _, accuracy in view.accuracies()]
    if len(accuracies) < settings.steps:
        return Check("accuracy", False, f"{len(accuracies)} of {settings.steps} steps were trained")
    window = min(settings.accuracy_window, len(accuracies) // 2)
    first, last = fmean(accuracies[:window]), fmean(accuracies[-window:])
    said = f"mean of {window} steps at either end: {first:.2f} -> {last:.2f}"
    if not settings.must_learn:
        reason = (
            f"reported only: a rise is required of SmolLM2 from lr {settings.learning_lr:g} and "
            f"{settings.learning_steps} steps on"
        )
        return Check("sampled accuracy", True, f"{said} ({reason})")
    wanted = f"{said}, {last - first:+.2f}; at least {settings.accuracy_rise:+.2f} is required"
    return Check("sampled accuracy rose", last - first >= settings.accuracy_rise, wanted)


def check_actors(folder: RunFolder, names: Sequence[str], trainer: FinalReport) -> Check:
    """Every actor's live weights have the trainer's version, policy hash and fingerprint."""
    wrong = []
    for name in names:
        path = folder.actor_report(name)
        said = read_report(path) if path.exists() else None
        if said is None or replace(said, worker=trainer.worker) != trainer:
            wrong.append(f"{name}: {said or 'left no report'}")
    detail = f"{', '.join(names)}: version {trainer.version}, fingerprint {trainer.fingerprint}"
    return Check("every actor equals the trainer", not wrong, "; ".join(wrong) or detail)


def check_join(view: RunView, settings: DemoSettings) -> Check:
    """The actor that came late fetched the chain up to where it joined, and no less.

    On vLLM the engine's own stager fetches, and says nothing of bytes: there it is the way that
    has to be the whole chain, from the version that the live weights' fingerprint told.
    """
    joiner = settings.cast.joiner.actor_id
    name = f"{joiner} joined by chain replay"
    row = view.actors.get(joiner)
    if row is None or not row.joins:
        return Check(name, False, "it never joined")
    join = row.joins[-1]
    chain = [one.published for one in view.published() if one.version <= join.version]
    chain_bytes = sum(published.delta_bytes for published in chain if published is not None)
    if settings.engine == VLLM:
        fetched, said = join.via == f"checkpoint v0 + {join.version} deltas", "in place"
    else:
        fetched, said = join.size_bytes >= chain_bytes, f"{join.size_bytes:,} bytes fetched"
    passed = 0 < join.version == len(chain) and fetched
    detail = (
        f"at version {join.version} from {join.via}, {said}; "
        f"the deltas up to there have {chain_bytes:,}"
    )
    return Check(name, passed, detail)


def check_problems(view: RunView) -> Check:
    """No publish, replication or activation failed on the way."""
    detail = "; ".join(mark.text for mark in view.problems) or "no failure was reported"
    return Check("no failed publish, replication or activation", not view.problems, detail)


def check_verify(site: Site, region: str, environment: Mapping[str, str]) -> Check:
    """`deltastore verify --deep` finds nothing in one region."""
    arguments = ["verify", site.run_url(region), "--deep", "--json", *_options(site, region)]
    code, out, err = _command(arguments, environment)
    (site.run_dir / f"verify-{region}.json").write_text(out, encoding="utf-8")
    detail = "exit code 0" if code == 0 else f"exit code {code}: {err or out}"
    return Check(f"verify --deep, region {region}", code == 0, detail)


def check_replay(site: Site, region: str, environment: Mapping[str, str], version: int) -> Check:
    """`deltastore replay` yields the trainer's weights, bit for bit, as safetensors reads them."""
    out = site.run_dir / REPLAYED
    wanted = ["--version", str(version), "--out", str(out), "--json"]
    arguments = ["replay", site.run_url(region), *wanted, *_options(site, region)]
    code, said, err = _command(arguments, environment)
    name = f"replay from region {region} equals the trainer bit for bit"
    if code != 0:
        return Check(name, False, f"exit code {code}: {err or said}")
    from workers.demo.outside import compare_checkpoints  # torch: only when it is needed

    different, tensors = compare_checkpoints(out, RunFolder(site.run_dir).trainer_state)
    detail = f"{tensors} tensors, {len(different)} differ {different[:3] if different else ''}"
    return Check(name, tensors > 0 and not different, detail.strip())


def check_answer(checkpoint: Path, *, must_know: bool) -> Check:
    """The replayed checkpoint loads in transformers and answers a question."""
    from workers.demo.outside import ask

    answer = ask(checkpoint, QUESTION)
    detail = f"{QUESTION} {answer!r}"
    return Check("the replayed checkpoint answers", ANSWER in answer or not must_know, detail)


def _options(site: Site, region: str) -> list[str]:
    there = site.region(region)
    return [
        f"--endpoint-url={there.endpoint_url}",
        f"--region={there.region}",
        f"--access-key-env={there.access_key_env}",
        f"--secret-key-env={there.secret_key_env}",
    ]


def _command(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str, str]:
    program = find_program("deltastore")
    if program is None:
        raise DemoError("no `deltastore` command beside this Python: run `make env`")
    try:
        done = subprocess.run(
            [str(program), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            env=dict(environment),
            timeout=_COMMAND_S,
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"`deltastore {arguments[0]}` did not end within {_COMMAND_S:.0f} s"
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode().strip()
