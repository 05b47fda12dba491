"""What an engine is asked for and what comes of it, on a scripted `vllm.LLM`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltastore.errors import InvalidInputError
from deltastore.format.key_files import trusted_line
from deltastore.format.signing import MaySign, SigningKey
from tests.unit.workers.kit import hash_of
from workers.actor.engine import GenerationStopped, Prompt
from workers.actor.vllm_engine import VllmEngine
from workers.actor.vllm_start import engine_arguments, follow_settings, run_at
from workers.config import ActorConfig, RegionConfig
from workers.sampling import Sampling
from workers.vllm_settings import VllmSettings

LABELS = (f"1:{hash_of(1)}", f"2:{hash_of(2)}")
STOP = 9


@dataclass
class ScriptedLLM:
    """Makes one token per step and request: 5, 5, …; the last of every even sample stops it."""

    labels: tuple[str, ...] = LABELS[:1]
    reason: str = "length"
    requests: dict[str, Any] = field(default_factory=dict)
    made: dict[str, list[int]] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.llm_engine = self
        self.model_config = SimpleNamespace(max_model_len=16, get_vocab_size=lambda: 50)

    def add_request(self, request: str, prompt: dict[str, Any], parameters: Any) -> str:
        """Queue a request under another, internal name."""
        self.requests[request] = SimpleNamespace(prompt=prompt, **parameters)
        self.made[request] = []
        return f"internal-{request}"

    def abort_request(self, names: list[str]) -> None:
        """Forget requests."""
        self.aborted += names
        for name in names:
            del self.made[name]

    def step(self) -> list[Any]:
        """One token for every request that is not finished."""
        return [self._advance(name) for name in list(self.made)]

    def _advance(self, name: str) -> Any:
        asked, tokens = self.requests[name], self.made[name]
        last = len(tokens) + 1 == asked.max_tokens
        stops = last and int(name.rpartition("-")[2]) % 2 == 0
        tokens.append(asked.stop_token_ids[0] if stops else 5)
        spans = [SimpleNamespace(version=label, start=0, end=1) for label in self.labels]
        made = SimpleNamespace(
            token_ids=list(tokens),
            logprobs=[{token: SimpleNamespace(logprob=-0.5)} for token in tokens],
            finish_reason=("stop" if stops else self.reason) if last else None,
            weight_versions=spans if last else None,
        )
        if last:
            del self.made[name]
        return SimpleNamespace(request_id=name, finished=last, outputs=[made])


def engine(llm: ScriptedLLM) -> VllmEngine:
    """The engine under test; its parameters are a dict."""
    return VllmEngine(llm, dict)


def prompt(seed: int = 0, *tokens: int, **changes: Any) -> Prompt:
    """A prompt for two samples of three tokens."""
    settings: dict[str, Any] = {"group_size": 2, "max_new_tokens": 3, "stop_token": STOP}
    return Prompt(tokens or (3, 4), Sampling(**(settings | {"seed": seed} | changes)))


def always(tokens: int) -> bool:
    """Go on."""
    return True


def test_every_sample_is_a_request_with_a_seed_of_its_own() -> None:
    """Seeds follow from the job, and nothing but the job's stop token ends a sample early."""
    llm = ScriptedLLM()
    asked = [prompt(1, temperature_milli=700, top_p_milli=900), prompt(2, 6, 7, 8)]
    made = engine(llm).generate(asked, always)
    rows = list(llm.requests.values())
    assert [row.prompt["prompt_token_ids"] for row in rows] == [[3, 4]] * 2 + [[6, 7, 8]] * 2
    wanted = [item.sampling.sample_seed(i) for item in asked for i in (0, 1)]
    assert [row.seed for row in rows] == wanted
    assert len(set(wanted)) == 4
    assert (rows[0].temperature, rows[0].top_p, rows[0].logprobs) == (0.7, 0.9, 0)
    assert all(row.stop_token_ids == [STOP] and row.ignore_eos for row in rows)
    for completions in made:
        assert completions.tokens == [[5, 5, STOP], [5, 5, 5]]
        assert completions.logprobs == [[-0.5] * 3] * 2
        assert completions.finished == [True, False]


def test_progress_is_told_after_every_step() -> None:
    """Tokens of all samples are counted step by step, so leases are renewed while they come."""
    seen: list[int] = []
    engine(ScriptedLLM()).generate([prompt(), prompt(1)], lambda n: seen.append(n) or True)
    assert seen == [4, 8, 12]


def test_a_stopped_generation_leaves_no_request_in_the_engine() -> None:
    """Progress that says no ends it between two steps, and every request is taken back."""
    llm = ScriptedLLM()
    with pytest.raises(GenerationStopped):
        engine(llm).generate([prompt(), prompt(1)], lambda tokens: tokens < 8)
    assert sorted(llm.aborted) == sorted(llm.requests)
    assert llm.made == {}


def test_a_progress_that_raises_leaves_no_request_in_the_engine() -> None:
    """Whatever ends the work, the next weights meet no request of the last ones."""

    def die(tokens: int) -> bool:
        raise RuntimeError("the lease cannot be renewed")

    llm = ScriptedLLM()
    with pytest.raises(RuntimeError, match="lease"):
        engine(llm).generate([prompt()], die)
    assert llm.made == {}


def test_samples_that_the_engine_gave_up_are_not_results() -> None:
    """A request that ended by an abort or an error of the engine completes nothing."""
    with pytest.raises(GenerationStopped):
        engine(ScriptedLLM(reason="error")).generate([prompt()], always)


def test_both_ends_are_what_the_engine_says() -> None:
    """A span that crosses versions is reported as one, whatever the caller believes (CASE R20)."""
    (one,) = engine(ScriptedLLM()).generate([prompt()], always)
    assert (str(one.begin), str(one.end)) == (LABELS[0], LABELS[0])
    (crossed,) = engine(ScriptedLLM(labels=LABELS)).generate([prompt()], always)
    assert (str(crossed.begin), str(crossed.end)) == LABELS


@pytest.mark.parametrize(
    "labels", [(), ("default",), ("poisoned",), (LABELS[0], "default", LABELS[0])]
)
def test_tokens_of_no_version_are_said_to_be_that(labels: tuple[str, ...]) -> None:
    """A label that is missing or odd, in the middle too, is an answer and no crash (CASE R20)."""
    (one,) = engine(ScriptedLLM(labels=labels)).generate([prompt()], always)
    assert (one.begin, one.end) == (None, None)
    assert "of no version" in one.unversioned


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (prompt(0, 50), "does not fit"),
        (prompt(max_new_tokens=15), "16 positions"),
        (prompt(temperature_milli=9), "temperature 0.009"),
        (prompt(temperature_milli=2001), "0.01 to 2"),
    ],
)
def test_what_the_engine_would_bend_is_refused(wrong: Prompt, named: str) -> None:
    """Nothing is queued for a prompt that does not fit or a temperature vLLM would change."""
    llm = ScriptedLLM()
    with pytest.raises(InvalidInputError, match=named):
        engine(llm).generate([prompt(), wrong], always)
    assert llm.requests == {}


def test_the_engine_is_started_as_results_need_it() -> None:
    """Log-probs of the sampled distribution, no defaults of the checkpoint's own, the backend."""
    region = RegionConfig("eu", "s3://bucket/team/", endpoint_url="http://127.0.0.1:9000")
    settings = ActorConfig("a1", "eu", engine="vllm", vllm=VllmSettings(kv_cache_bytes=1 << 20))
    follow = follow_settings(run_at(region, "grpo"), settings, Path("/runs/scratch/a1/spool"))
    assert follow == {
        "run": "s3://bucket/team/grpo",
        "endpoint": "http://127.0.0.1:9000",
        "region_name": "eu",
        "engine": "a1",
        "allow_dense": False,
        "folder": "/runs/scratch/a1/spool",
    }
    made = engine_arguments(Path("/m"), settings.vllm, follow, seed=3)
    assert made["logprobs_mode"] == "processed_logprobs"
    assert made["generation_config"] == "vllm"
    assert made["weight_transfer_config"] == {"backend": "deltastore"}
    assert made["additional_config"] == {"deltastore": follow}
    assert made["kv_cache_memory_bytes"] == 1 << 20
    assert "max_model_len" not in made


def test_the_keys_that_an_actor_trusts_are_told_to_the_engine(tmp_path: Path) -> None:
    """The engine's ranks trust the lines of the file, and a file of nonsense starts no engine."""
    keys = tmp_path / "trusted"
    public = SigningKey.generate().public
    keys.write_text(trusted_line(public, [MaySign.VERSIONS]) + "\n", encoding="ascii")
    settings = ActorConfig("a1", "eu", engine="vllm", trusted_keys=str(keys))
    follow = follow_settings({"run": "file:///runs/r"}, settings, Path("/unused"))
    assert follow["trusted_keys"] == keys.read_text().splitlines()
    keys.write_text("nonsense", encoding="ascii")
    with pytest.raises(InvalidInputError):
        follow_settings({"run": "file:///runs/r"}, settings, Path("/unused"))


def test_an_actor_of_a_host_with_a_stager_starts_none() -> None:
    """With a stager's folder given the engine's ranks meet there."""
    settings = ActorConfig("a1", "eu", engine="vllm", stager_folder="/dev/shm/spool")
    follow = follow_settings({"run": "file:///runs/r"}, settings, Path("/unused"))
    assert (follow["stager"], follow["folder"]) == ("shared", "/dev/shm/spool")
