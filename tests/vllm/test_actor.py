"""The actor on the real engine: what it samples, what it delivers, and where its weights end."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest
import torch

from deltastore.clock import SystemClock
from deltastore.coordination.backend import JobOffer
from deltastore.coordination.memory import MemoryCoordination
from deltastore.events import ActorJoined, VersionActivated
from deltastore.format.mixing import fingerprint_state
from deltastore.repository.fetch import load_manifest
from tests.vllm.kit import tiny_qwen3
from tests.vllm.runs import TinyRun
from workers.actor.assembly import act
from workers.actor.engine import GenerationStopped, Prompt
from workers.actor.safe_point import SafePoint
from workers.actor.vllm_start import start_vllm
from workers.causal_lm import load_model
from workers.config import ActorConfig, RegionConfig, WorkerConfig
from workers.payload import JobPayload
from workers.results import RolloutResult, check_sampled
from workers.run_folder import RunFolder
from workers.sampling import Sampling
from workers.trainer.grpo import token_logprobs
from workers.vllm_settings import VllmSettings
from workers.wiring import Surroundings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workers.actor.loop import Actor
    from workers.actor.ready import ReadyEngine

pytestmark = pytest.mark.vllm

VOCABULARY, STOP = 512, 511
WITHIN_S = 180.0  # a limit for busy machines: an engine with processes starts in a minute there
SMALL = VllmSettings(
    max_model_len=256, max_num_seqs=8, kv_cache_bytes=32 << 20, block_size=32, enforce_eager=True
)
SAMPLING = Sampling(
    group_size=3,
    max_new_tokens=12,
    stop_token=STOP,
    temperature_milli=700,
    top_p_milli=900,
    seed=5,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    """A run at version 1."""
    folder = tmp_path_factory.mktemp("actor")
    run = TinyRun(folder, tiny_qwen3(folder / "v0", tied=True))
    run.publish()
    yield run
    run.close()


def around(tiny: TinyRun, name: str, coordination: Any, events: list[Any]) -> Surroundings:
    """What an actor on vLLM works with; without a checkpoint it takes the bucket's."""
    settings = ActorConfig(name, "here", engine="vllm", vllm=SMALL, idle_s=0.02)
    run_dir = tiny.folder / "run"
    config = WorkerConfig(
        run=tiny.name,
        home="here",
        regions=(RegionConfig("here", f"file://{tiny.folder}/runs"),),
        redis_url="redis://unused",
        run_dir=str(run_dir),
        checkpoint=str(tiny.checkpoint) if name == "local" else None,
        actor=settings,
    )
    return Surroundings(
        config,
        {"here": tiny.run},
        coordination,
        RunFolder(run_dir),
        SystemClock(),
        events.append,
    )


@contextmanager
def ready(tiny: TinyRun, name: str) -> Iterator[ReadyEngine]:
    """An engine of an actor, without its loop."""
    there = around(tiny, name, None, [])
    assert there.config.actor is not None
    with start_vllm(there, there.config.actor, SafePoint(there.clock)) as found:
        yield found


def always(tokens: int) -> bool:
    """Go on."""
    return True


def test_samples_are_the_jobs_and_their_logprobs_the_losss(tiny: TinyRun) -> None:
    """Seeds decide the tokens; log-probs are of the sampled distribution; both ends are labelled.

    A BF16 sampler and a FP32 learner differ; on this random model by less than 0.1 in the mean.
    """
    plain = Sampling(3, 12, STOP, temperature_milli=700, seed=5)
    prompts = [Prompt((1, 2, 3), plain), Prompt(tuple(range(100, 140)), SAMPLING)]
    with ready(tiny, "local") as found:
        assert found.via == "checkpoint v0"
        made = found.engine.generate(prompts, always)
        again = found.engine.generate(list(reversed(prompts)), always)
        with pytest.raises(GenerationStopped):
            found.engine.generate(prompts, lambda tokens: tokens < 12)
        after = found.engine.generate(prompts, always)
        label = tiny.label(0)
        assert found.weights.active.version == 0
    assert [one.tokens for one in after] == [one.tokens for one in made]
    assert [one.tokens for one in again] == [one.tokens for one in reversed(made)]
    assert len({tuple(row) for one in made for row in one.tokens}) == 6
    assert {str(mark) for one in made for mark in (one.begin, one.end)} == {label}
    for one in made:
        assert all(len(row) == 12 or row[-1] == STOP for row in one.tokens)
    model = load_model(tiny.checkpoint)
    width = max(len(row) for row in made[0].tokens)
    samples = torch.tensor([row + [0] * (width - len(row)) for row in made[0].tokens])
    with torch.no_grad():
        wanted = token_logprobs(model, torch.tensor([prompts[0].tokens]), samples, 3, 0.7)
    off = [
        abs(float(wanted[row, at]) - value)
        for row, values in enumerate(made[0].logprobs)
        for at, value in enumerate(values)
    ]
    assert fmean(off) < 0.1


class Trainer(threading.Thread):
    """Plays the trainer: deals jobs at a version, publishes the next, ends the run."""

    def __init__(self, tiny: TinyRun, coordination: MemoryCoordination, folder: RunFolder) -> None:
        super().__init__(name="trainer")
        self.tiny = tiny
        self.coordination = coordination
        self.folder = folder
        self.results: list[RolloutResult] = []
        self.failure: BaseException | None = None
        self.actor: Actor | None = None
        self.there = threading.Event()

    def run(self) -> None:
        """Two versions, two jobs at each; then everybody stops at the second."""
        try:
            assert self.there.wait(WITHIN_S)
            first = self.tiny.run
            self._batch(load_manifest(first, 1).policy_hash, 1)
            version = self.tiny.publish()
            self._batch(load_manifest(first, version).policy_hash, version)
            self.folder.ask_to_stop(version)
        except BaseException as err:  # noqa: BLE001 - raised again by the test
            self.failure = err
            if self.actor is not None:
                self.actor.request_stop()

    def _batch(self, policy_hash: str, version: int) -> None:
        jobs = [
            JobOffer(
                f"{version}-{number}",
                JobPayload(version, (1, 2, 3 + number), SAMPLING).to_bytes(),
                ((version, policy_hash),),
                SAMPLING.group_size * SAMPLING.max_new_tokens,
            )
            for number in (0, 1)
        ]
        self.coordination.offer(jobs)
        settled: list[Any] = []
        clock = SystemClock()
        deadline_s = clock.monotonic_s() + WITHIN_S
        while len(settled) < len(jobs):
            assert clock.monotonic_s() < deadline_s, f"{len(settled)} results of version {version}"
            settled += self.coordination.take_settled(len(jobs), 0.2)
        for one in settled:
            claim = one.settlement
            key = self.tiny.run.keys.rollout(
                version, claim.job_id, claim.token, claim.result_sha256
            )
            self.results.append(RolloutResult.from_bytes(self.tiny.run.store.get(key)))


def test_an_actor_follows_the_run_and_ends_at_the_trainers_bits(tiny: TinyRun) -> None:
    """Jobs of two versions are done at theirs, both ends said; the last weights are the trainer's.

    The actor starts without a checkpoint, and activates between leases, in place.
    """
    coordination = MemoryCoordination(SystemClock())
    events: list[Any] = []
    there = around(tiny, "a1", coordination, events)
    trainer = Trainer(tiny, coordination, there.folder)

    def on_ready(actor: Actor) -> None:
        trainer.actor = actor
        if trainer.failure is not None:
            actor.request_stop()
        trainer.there.set()

    trainer.start()
    report = act(there, on_ready)
    trainer.join()
    if trainer.failure is not None:
        raise trainer.failure
    assert report.version == 2
    assert report.fingerprint == str(fingerprint_state(tiny.state))
    who = [result.provenance for result in trainer.results]
    assert [one.version for one in who] == [1, 1, 2, 2]
    assert not any(one.crossed for one in who)
    assert {f"{one.version}:{one.policy_hash}" for one in who} == {tiny.label(1), tiny.label(2)}
    for result in trainer.results:
        check_sampled(result, SAMPLING, VOCABULARY)
    (joined,) = [event for event in events if isinstance(event, ActorJoined)]
    assert joined.version == 1
    assert joined.size_bytes > 0
    (activated,) = [event for event in events if isinstance(event, VersionActivated)]
    assert (activated.base_version, activated.version) == (1, 2)
    assert activated.nnz == load_manifest(tiny.run, 2).core.nnz
