"""Payloads and results are read as hostile bytes: one text each, nothing else is understood."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from deltastore.errors import DeltastoreError, FormatError, InvalidInputError, Kind
from workers.payload import JobPayload
from workers.results import Provenance, RolloutResult, check_sampled, pack
from workers.sampling import Sampling, prompt_seed

STOP = 1
WHO = Provenance("job-1", "a" * 32, "actor", 3, "b" * 64, 3, "b" * 64, 7)
SAMPLING = Sampling(group_size=2, max_new_tokens=3, stop_token=STOP, seed=7)


def good() -> RolloutResult:
    """A sample cut at the limit and one that stopped."""
    return pack(WHO, [[5, 6, 7], [8, STOP]], [[-1.0, -0.5, -2.0], [-0.25, 0.0]])


samplings = st.builds(
    Sampling,
    group_size=st.integers(1, 64),
    max_new_tokens=st.integers(1, 512),
    stop_token=st.integers(0, 2**31 - 1),
    temperature_milli=st.integers(1, 5000),
    top_p_milli=st.integers(1, 1000),
    seed=st.integers(0, 2**53 - 1),
)


@given(
    st.integers(0, 2**53 - 1),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20),
    samplings,
)
def test_a_payload_reads_back(step: int, prompt: list[int], sampling: Sampling) -> None:
    """Every job that can be written is read as the same job."""
    payload = JobPayload(step, tuple(prompt), sampling)
    assert JobPayload.from_bytes(payload.to_bytes()) == payload


@given(st.binary(max_size=200))
def test_garbage_is_no_payload(text: bytes) -> None:
    """Whatever Redis returns, reading it is a FormatError and nothing else."""
    with pytest.raises(FormatError):
        JobPayload.from_bytes(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", "deltastore-job/9"),
        ("prompt", []),
        ("prompt", "abc"),
        ("prompt", [-1]),
        ("prompt", [True]),
        ("step", -1),
        ("group_size", 0),
        ("group_size", 10**9),
        ("max_new_tokens", "4"),
        ("seed", None),
        ("extra", 1),
    ],
    ids=str,
)
def test_an_impossible_payload_is_refused(name: str, value: Any) -> None:
    """A canonical document with an impossible field is refused before anybody works on it."""
    document = json.loads(JobPayload(1, (4, 5), SAMPLING).to_bytes())
    document[name] = value
    text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(FormatError):
        JobPayload.from_bytes(text)


def test_a_result_is_a_safetensors_file() -> None:
    """Anybody's safetensors reader sees the same arrays."""
    result = good()
    arrays = load(result.to_bytes())
    for field in fields(RolloutResult)[1:]:
        assert np.array_equal(arrays[field.name], getattr(result, field.name))


def test_a_result_reads_back_bit_for_bit() -> None:
    """Provenance, tokens, log-probs and lengths come back as they were sent."""
    sent = good()
    got = RolloutResult.from_bytes(sent.to_bytes())
    assert got.provenance == WHO
    assert got.to_bytes() == sent.to_bytes()
    assert got.token_count == 5
    assert got.mask.tolist() == [[True, True, True], [True, True, False]]
    check_sampled(got, SAMPLING, vocabulary=9)


@given(st.data())
def test_a_changed_byte_is_noticed_or_is_another_whole_result(data: st.DataObject) -> None:
    """One changed byte gives a FormatError, or a result whose one text is exactly those bytes."""
    body = bytearray(good().to_bytes())
    place = data.draw(st.integers(0, len(body) - 1))
    body[place] ^= data.draw(st.integers(1, 255))
    try:
        result = RolloutResult.from_bytes(bytes(body))
    except FormatError:
        return
    assert result.to_bytes() == bytes(body)


@given(st.integers(0, 400))
def test_a_cut_result_is_refused(end: int) -> None:
    """Every proper prefix of a result is a FormatError."""
    body = good().to_bytes()
    with pytest.raises(FormatError):
        RolloutResult.from_bytes(body[: min(end, len(body) - 1)])


@given(st.binary(max_size=300))
def test_garbage_is_no_result(body: bytes) -> None:
    """Whatever an actor uploads, reading it is a FormatError and nothing else."""
    with pytest.raises(FormatError):
        RolloutResult.from_bytes(body)


def test_limits_hold_before_anything_is_allocated() -> None:
    """A header that claims a huge shape, or a body above the limit, is refused by its size."""
    body = good().to_bytes()
    with pytest.raises(FormatError) as caught:
        RolloutResult.from_bytes(body, max_bytes=len(body) - 1)
    assert caught.value.kind is Kind.LIMIT
    huge = body.replace(b'"shape":[2,3]', b'"shape":[2000000,3]')
    with pytest.raises(FormatError):
        RolloutResult.from_bytes(huge)


@pytest.mark.parametrize(
    ("tokens", "logprobs"),
    [
        ([[5, 6, 7], [8, 9]], [[-1.0] * 3, [-1.0] * 2]),
        ([[5, 6, 7], [STOP, 8, STOP]], [[-1.0] * 3, [-1.0] * 3]),
        ([[5, 6, 7], [99, STOP]], [[-1.0] * 3, [-1.0] * 2]),
        ([[5, 6, 7], [-2, STOP]], [[-1.0] * 3, [-1.0] * 2]),
        ([[5, 6, 7, 8], [STOP]], [[-1.0] * 4, [-1.0]]),
        ([[5, 6, 7]], [[-1.0] * 3]),
    ],
    ids=["neither stopped nor cut", "after stop", "vocabulary", "negative", "long", "few"],
)
def test_samples_nobody_could_have_drawn_are_refused(
    tokens: list[list[int]], logprobs: list[list[float]]
) -> None:
    """Samples must be some that the job's sampling could have drawn from its vocabulary."""
    result = RolloutResult.from_bytes(pack(WHO, tokens, logprobs).to_bytes())
    with pytest.raises(FormatError):
        check_sampled(result, SAMPLING, vocabulary=50)


def test_another_seed_is_refused() -> None:
    """A result that says it used another seed than the job's is not this job's."""
    with pytest.raises(FormatError, match="seed"):
        check_sampled(good(), replace(SAMPLING, seed=8), vocabulary=50)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.5], ids=str)
def test_a_logprob_that_is_none_is_refused(value: float) -> None:
    """NaN, infinities and positive log-probabilities never reach a ratio."""
    body = pack(WHO, [[5, 6, 7], [8, STOP]], [[-1.0, value, -2.0], [-1.0, -1.0]]).to_bytes()
    with pytest.raises(FormatError, match="log-prob"):
        RolloutResult.from_bytes(body)


@pytest.mark.parametrize(
    "change",
    [
        {"job_id": "a/b"},
        {"token": "short"},
        {"version": -1},
        {"policy_hash": ""},
        {"end_version": -1},
        {"end_policy_hash": "c"},
        {"seed": -1},
    ],
    ids=str,
)
def test_provenance_checks_itself(change: dict[str, Any]) -> None:
    """A result cannot be packed under a name that no lease could have."""
    with pytest.raises(DeltastoreError):
        replace(WHO, **change)


def test_samples_have_random_numbers_of_their_own() -> None:
    """A sample's numbers depend on run, seed, step, prompt and its place, on nothing else."""
    seeds = {prompt_seed("r", 0, step, prompt) for step in range(20) for prompt in range(20)}
    assert len(seeds) == 400
    assert prompt_seed("r", 0, 1, 2) == prompt_seed("r", 0, 1, 2) != prompt_seed("q", 0, 1, 2)
    small = replace(SAMPLING, group_size=2).uniforms()
    large = replace(SAMPLING, group_size=8).uniforms()
    assert np.array_equal(small, large[:2])
    assert len(np.unique(large)) == large.size
    others = {replace(SAMPLING, seed=s).sample_seed(i) for s in range(20) for i in range(20)}
    assert len(others) == 400
    assert all(0 <= seed < 1 << 53 for seed in others)
    with pytest.raises(InvalidInputError):
        replace(SAMPLING, top_p_milli=0)
