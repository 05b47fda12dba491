"""Part plans cover an object exactly and within S3's limits; parts run bounded and fail once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import InvalidInputError, Kind
from deltastore.storage.parts import (
    MAX_PART_BYTES,
    MAX_PARTS,
    MIN_PART_BYTES,
    PartPlan,
    plan_upload,
    run_parts,
)
from deltastore.storage.s3_settings import S3Settings

TIB = 1 << 40


@given(size_bytes=st.integers(1, 40 * TIB), part_bytes=st.integers(MIN_PART_BYTES, MAX_PART_BYTES))
def test_a_plan_keeps_the_limits(size_bytes: int, part_bytes: int) -> None:
    """CASES S5, S6: at most 10,000 parts within S3's sizes, all equal but the last."""
    plan = plan_upload(size_bytes, part_bytes)
    assert 1 <= plan.parts <= MAX_PARTS
    assert part_bytes <= plan.part_bytes <= MAX_PART_BYTES
    first, last = plan.part(0), plan.part(plan.parts - 1)
    assert first.start == 0
    assert last.end == size_bytes
    assert 0 < last.size_bytes <= plan.part_bytes
    if plan.parts > 1:
        assert first.size_bytes == plan.part_bytes
        assert plan.part(plan.parts - 2).end == last.start


@given(size_bytes=st.integers(1, 5000), part_bytes=st.integers(1, 500))
def test_parts_cover_every_byte_once(size_bytes: int, part_bytes: int) -> None:
    """Put together, the parts are the object."""
    plan = PartPlan(size_bytes, part_bytes)
    covered = [b for n in range(plan.parts) for b in range(plan.part(n).start, plan.part(n).end)]
    assert covered == list(range(size_bytes))


def test_an_object_above_all_limits_is_refused_before_it_is_sent() -> None:
    """CASE S6: 10,000 parts of 5 GiB are the most there is."""
    assert plan_upload(MAX_PARTS * MAX_PART_BYTES, MIN_PART_BYTES).parts == MAX_PARTS
    with pytest.raises(InvalidInputError) as caught:
        plan_upload(MAX_PARTS * MAX_PART_BYTES + 1, MIN_PART_BYTES)
    assert caught.value.kind is Kind.LIMIT


def test_an_empty_plan_does_not_exist() -> None:
    """CASE S7: zero bytes have no parts."""
    with pytest.raises(ValueError, match="cuts nothing"):
        PartPlan(0, 1)
    with pytest.raises(IndexError):
        PartPlan(10, 10).part(1)


@pytest.mark.parametrize(
    "setting",
    [
        {"part_bytes": MIN_PART_BYTES - 1},
        {"part_bytes": MAX_PART_BYTES + 1},
        {"streams": 0},
        {"streams": 257},
        {"max_connections": 7},
        {"connect_timeout_s": 0.0},
        {"read_timeout_s": 901.0},
        {"bucket": ""},
        {"bucket": "with/slash"},
        {"prefix": "/absolute"},
        {"prefix": "a/../b"},
        {"endpoint_url": "127.0.0.1:8333"},
        {"access_key": "without a secret"},
        {"secret_key": "without a key"},
    ],
)
def test_impossible_settings_are_refused_when_made(setting: dict[str, object]) -> None:
    """CASE S6: part sizes outside 5 MiB to 5 GiB, and other nonsense, never reach the store."""
    fields: dict[str, object] = {"bucket": "bucket", **setting}
    with pytest.raises(InvalidInputError) as caught:
        S3Settings(**fields)  # type: ignore[arg-type]
    assert caught.value.kind in {Kind.SETTING, Kind.NAME}


def test_secrets_are_in_no_repr() -> None:
    """A logged settings object shows no key, secret or token."""
    settings = S3Settings("bucket", access_key="AK!", secret_key="SK!", session_token="ST!")
    assert not any(secret in repr(settings) for secret in ("AK!", "SK!", "ST!"))


def test_no_more_parts_than_the_window_are_submitted() -> None:
    """Parts wait in our hands, not in the pool's queue."""
    lock, running, most = threading.Lock(), 0, 0

    def work(_: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        with lock:
            running -= 1

    with ThreadPoolExecutor(16) as pool:
        run_parts(pool, 200, work, window=3)
    assert most <= 3


@pytest.mark.parametrize("window", [1, 2, 4])
def test_what_runs_meanwhile_counts_as_one_of_them(window: int) -> None:
    """With one stream the first part and the second are never in flight together."""
    lock = threading.Lock()
    now, most, done = 0, 0, []

    def work(index: int) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        held.wait(0.01)
        with lock:
            now -= 1
            done.append(index)

    held = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        run_parts(pool, 9, work, window=window, first=1, meanwhile=lambda: work(0))
    assert sorted(done) == list(range(9))
    assert most <= window


def test_the_first_failure_ends_the_run_after_those_in_flight() -> None:
    """A failing part starts no further ones, and none is still running when it is raised."""
    started, ended = set(), set()

    def work(index: int) -> None:
        started.add(index)
        if index == 5:
            raise ValueError("part 5")
        ended.add(index)

    with ThreadPoolExecutor(4) as pool:
        with pytest.raises(ValueError, match="part 5"):
            run_parts(pool, 100, work, window=4)
        assert started - ended == {5}
        assert max(started) <= 5 + 4


def test_a_failure_meanwhile_ends_the_run_too() -> None:
    """What the calling thread does beside the parts counts as one of them."""

    def meanwhile() -> None:
        raise ValueError("meanwhile")

    done: list[int] = []
    with ThreadPoolExecutor(2) as pool, pytest.raises(ValueError, match="meanwhile"):
        run_parts(pool, 50, done.append, window=2, first=1, meanwhile=meanwhile)
    assert set(done) <= {1, 2}
