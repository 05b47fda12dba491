"""A run that looks well afterwards may have learned from a wrong result: everything is done again.

From the bucket, the kept batches and nothing else: who made each result, at which weights, and what
learning from exactly these results gives without any disturbance.
"""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

import torch

from deltastore.adapters.torch_state import ModuleTarget
from deltastore.maintenance.fsck import check_run
from deltastore.maintenance.janitor import JanitorPolicy, run_janitor
from deltastore.repository.fetch import load_manifest
from workers.causal_lm import load_model
from workers.chaos.deeds import READ_AGAIN
from workers.chaos.engine import scripted_sample
from workers.chaos.injected import DEED_OF, NOTICED, ON_RESULTS
from workers.chaos.trainer import EvenTokens
from workers.sampling import MILLI, Sampling, prompt_seed
from workers.trainer.grpo import backward
from workers.trainer.jobs import Verdict
from workers.trainer.optimizer import MasterOptimizer, OptimizerSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from deltastore.clock import Clock
    from deltastore.events import ResultSettled
    from deltastore.repository.run import Run
    from workers.chaos.audit import AuditFolder
    from workers.chaos.deeds import Deed
    from workers.chaos.injected import Injected
    from workers.config import TrainerConfig
    from workers.run_folder import FinalReport

STREAMS = 4
AT_ONCE = JanitorPolicy(commit_deadline_s=0.01, grace_s=0.02, abandoned_s=0.02)  # nobody writes now
MEMORY_SLACK_BYTES = 8 << 20
MEMORY_GROWTH = 1.02
MEMORY_LEAST_S, MEMORY_LEAST_SAMPLES = 60.0, 20  # at work


class ChaosFound(Exception):
    """Something that must hold does not; the message says what."""


def hold(condition: bool, what: str) -> None:
    """Raise ChaosFound unless `condition`."""
    if not condition:
        raise ChaosFound(what)


def check_provenance(run: Run, audit: AuditFolder, settings: TrainerConfig, last: int) -> int:
    """Prove where every result came from; return how many there were.

    Each was made by one lease for one place in one batch, at the weights of the version it names,
    whose policy hash is that of the run's manifest, and at most `max_policy_lag` versions before.
    """
    jobs: set[str] = set()
    tokens: set[str] = set()
    fingerprints: dict[int, tuple[str, str, int]] = {}
    for step in audit.steps():
        if step > last:
            continue
        for group in audit.read(step):
            result, who = group.result, group.result.provenance
            hold(who.job_id not in jobs, f"job {who.job_id} was learned from twice")
            hold(who.token not in tokens, f"lease {who.token} gave two results")
            jobs.add(who.job_id)
            tokens.add(who.token)
            if who.version not in fingerprints:
                manifest = load_manifest(run, who.version)
                core = manifest.core
                facts = (manifest.policy_hash, str(core.fingerprint_after), core.step_last)
                fingerprints[who.version] = facts
            policy_hash, fingerprint, made_at = fingerprints[who.version]
            hold(who.policy_hash == policy_hash, f"{who.job_id} names a history that is not")
            lag = step - 1 - made_at
            hold(0 <= lag <= settings.max_policy_lag, f"{who.job_id} was {lag} versions old")
            hold(lag == group.lag, f"{who.job_id} counted as {group.lag} old, was {lag}")
            named_step, index = (int(part) for part in who.job_id.split("-")[:2])
            hold(named_step == step, f"{who.job_id} was learned from in step {step}")
            hold(who.seed == prompt_seed(run.name, 0, step, index), f"{who.job_id}: foreign seed")
            sampling = Sampling(
                group_size=settings.group_size,
                max_new_tokens=settings.max_new_tokens,
                stop_token=EvenTokens().stop_token,
                temperature_milli=round(settings.temperature * MILLI),
                seed=who.seed,
            )
            for sample in range(settings.group_size):
                row = result.tokens[sample, : result.lengths[sample]].tolist()
                hold(
                    row == scripted_sample(fingerprint, sampling, sample, vocabulary_of(run)),
                    f"{who.job_id} was not made with the weights of version {who.version}",
                )
    return len(jobs)


def vocabulary_of(run: Run) -> int:
    """The model's number of tokens, from the shape of its embedding."""
    return next(t.shape[0] for t in run.layout.tensors if "embed_tokens" in t.name)


def learn_again(
    run: Run, checkpoint: Path, audit: AuditFolder, settings: TrainerConfig, last: int
) -> str:
    """The fingerprint of weights that learned the same batches, undisturbed.

    With one thread, as the trainer: sums in another order round differently.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _learn_again(run, checkpoint, audit, settings, last)
    finally:
        torch.set_num_threads(threads)


def _learn_again(
    run: Run, checkpoint: Path, audit: AuditFolder, settings: TrainerConfig, last: int
) -> str:
    model = load_model(checkpoint)
    optimizer = MasterOptimizer(
        model,
        run.layout,
        OptimizerSettings(
            lr=settings.lr,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay,
            clip_norm=settings.clip_norm,
        ),
    )
    steps = [step for step in audit.steps() if step <= last]
    hold(steps == list(range(1, last + 1)), f"steps {steps} were kept, not 1 to {last}")
    for step in steps:
        backward(
            model,
            audit.read(step),
            temperature=settings.temperature,
            ratio_cap=settings.ratio_cap,
            micro_batch_groups=settings.micro_batch_groups,
        )
        optimizer.step()
    return str(ModuleTarget(model, run.layout).fingerprint())


def check_ends(done: FinalReport, reports: Mapping[str, FinalReport]) -> None:
    """Prove that everybody is at the trainer's last bits."""
    for name, report in reports.items():
        same = (report.version, report.policy_hash, report.fingerprint)
        hold(same == (done.version, done.policy_hash, done.fingerprint), f"{name} is elsewhere")


def check_regions(regions: Mapping[str, Run], clock: Clock) -> int:
    """Prove that after one round of the janitor every region's bucket is whole, and nothing else.

    Every bit of every version is read. Returns how many orphans the janitor took.
    """
    orphans = 0
    for name, run in regions.items():
        orphans += run_janitor(run, AT_ONCE, dry_run=False).deleted
        report = check_run(run, deep=True, streams=STREAMS, clock=clock)
        found = [f"{f.defect.value} {f.key}: {f.message}" for f in report.findings]
        hold(not found, f"region {name}: {'; '.join(found[:3])}")
    return orphans


def check_deeds(
    injected: Sequence[Injected],
    deeds: Mapping[str, Sequence[Deed]],
    results: Sequence[ResultSettled],
) -> None:
    """Prove that actors did all that was ordered, and that all damage was noticed.

    Per flip or cut that was injected one damaged result that the trainer called corrupt, per
    flipped read one object that was read again and was right then.
    """
    corrupt = {(one.actor, one.job) for one in results if one.outcome == Verdict.CORRUPT}
    wanted = Counter(
        (one.planned.target, one.planned.fault) for one in injected if one.planned.fault in DEED_OF
    )
    for (actor, fault), count in wanted.items():
        mine = deeds.get(actor, ())
        done = [deed for deed in mine if deed.what == DEED_OF[fault]]
        hold(len(done) >= count, f"{actor} did {len(done)} of {count} x {fault.value}")
        if fault not in NOTICED:
            continue
        if fault in ON_RESULTS:
            noticed = [deed for deed in done if (actor, deed.about) in corrupt]
        else:
            again = Counter(deed.about for deed in mine if deed.what == READ_AGAIN)
            noticed = [deed for deed in done if again[deed.about]]
        hold(len(noticed) >= count, f"{len(noticed)} of {count} x {fault.value} noticed at {actor}")


def check_memory(
    samples: Mapping[str, Sequence[tuple[float, int]]], *, must: str
) -> dict[str, float]:
    """Prove that no process grew since it had settled; growth per process.

    A third of the time at work is for settling: caches and the first activation. One that was at
    work for less than a minute is left out.

    Args:
        must: the process that has to be judged.
    """
    growth = {}
    for name, rows in samples.items():
        sizes = [size_bytes for _, size_bytes in rows]
        if len(rows) < MEMORY_LEAST_SAMPLES or rows[-1][0] - rows[0][0] < MEMORY_LEAST_S:
            continue
        some, settled = max(3, len(sizes) // 10), len(sizes) // 3
        begin, end = median(sizes[settled : settled + some]), median(sizes[-some:])
        growth[name] = end / begin
        limit = MEMORY_GROWTH * begin + MEMORY_SLACK_BYTES
        hold(end <= limit, f"{name} grew from {begin / 1e6:.0f} to {end / 1e6:.0f} MB")
    hold(must in growth, f"{must} was not at work for {MEMORY_LEAST_S:.0f} s: nobody was judged")
    return growth
