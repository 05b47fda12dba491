"""The trainer's own table is the last gate: what it answers to every wrong claim."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from deltastore.coordination.backend import Settlement
from deltastore.ids import new_token
from tests.unit.workers.kit import REGION, STOP, VOCABULARY, LengthTask, hash_of
from workers.payload import JobPayload
from workers.results import Provenance, RolloutResult, pack
from workers.sampling import Sampling
from workers.trainer.jobs import (
    MAX_POLICIES,
    IssuedJob,
    JobTable,
    Policy,
    PolicyLedger,
    Verdict,
)

SAMPLING = Sampling(group_size=2, max_new_tokens=4, stop_token=STOP, seed=9)


class Case:
    """A table with one job of step 3, and an honest result for it."""

    def __init__(self) -> None:
        self.ledger = PolicyLedger(Policy(1, hash_of(1), 0))
        self.ledger.note(Policy(2, hash_of(2), 1))
        self.ledger.note(Policy(3, hash_of(3), 2))
        self.table = JobTable(self.ledger, max_policy_lag=1, vocabulary=VOCABULARY)
        problem = LengthTask().problem(3, 0)
        self.job: IssuedJob = self.table.issue(3, 0, problem, JobPayload(3, (4,), SAMPLING))
        self.token = new_token()

    def result(self, **who: object) -> RolloutResult:
        """An honest result, but for `who`."""
        fields: dict[str, object] = {
            "job_id": self.job.job_id,
            "token": self.token,
            "actor_id": "a",
            "version": 2,
            "policy_hash": hash_of(2),
            "seed": SAMPLING.seed,
        }
        fields |= who
        ends = {"end_version": fields["version"], "end_policy_hash": fields["policy_hash"]}
        provenance = Provenance(**(ends | fields))  # type: ignore[arg-type]
        return pack(provenance, [[7, 7, 7, 7], [STOP]], [[-1.0] * 4, [-2.0]])

    def claim(self, body: bytes, **changes: object) -> Settlement:
        """An honest claim on `body`, but for `changes`."""
        settlement = Settlement(
            self.job.job_id,
            self.token,
            "a",
            2,
            hash_of(2),
            hashlib.sha256(body).hexdigest(),
            len(body),
            5,
            REGION,
        )
        return replace(settlement, **changes)  # type: ignore[arg-type]


def test_an_honest_result_is_admitted_once() -> None:
    """The first claim is admitted with its samples; the same claim again is a duplicate."""
    case = Case()
    body = case.result().to_bytes()
    verdict, result = case.table.consume(case.claim(body), body)
    assert verdict is Verdict.ADMITTED
    assert result is not None
    assert result.token_count == 5
    assert case.table.consume(case.claim(body), body) == (Verdict.DUPLICATE, None)
    assert case.table.wanted(3) == []


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"job_id": "nobody"}, Verdict.UNKNOWN),
        ({"version": 9, "policy_hash": hash_of(9)}, Verdict.WRONG_VERSION),
        ({"policy_hash": hash_of(7)}, Verdict.WRONG_HASH),
        ({"version": 1, "policy_hash": hash_of(1)}, Verdict.STALE),
        ({"version": 3, "policy_hash": hash_of(3)}, Verdict.NOT_HOLDER),
        ({"result_bytes": 0}, Verdict.CORRUPT),
        ({"result_bytes": 900}, Verdict.CORRUPT),
        ({"result_bytes": 10**9}, Verdict.CORRUPT),
        ({"result_sha256": "0" * 64}, Verdict.CORRUPT),
        ({"token": "f" * 32}, Verdict.NOT_HOLDER),
        ({"actor_id": "b"}, Verdict.NOT_HOLDER),
    ],
)
def test_a_wrong_claim_gets_its_own_answer(changes: dict[str, object], verdict: Verdict) -> None:
    """Every field of a claim that is wrong is refused by name, and the job stays wanted."""
    case = Case()
    body = case.result().to_bytes()
    assert case.table.consume(case.claim(body, **changes), body) == (verdict, None)
    assert case.table.wanted(3) == [case.job]


@pytest.mark.parametrize(
    "who", [{"job_id": "other"}, {"token": "e" * 32}, {"seed": 1}, {"policy_hash": hash_of(5)}]
)
def test_an_object_of_another_lease_is_refused(who: dict[str, object]) -> None:
    """A true digest does not help an object whose own provenance is another."""
    case = Case()
    body = case.result(**who).to_bytes()
    assert case.table.consume(case.claim(body), body) == (Verdict.NOT_HOLDER, None)


@pytest.mark.parametrize(
    "end", [{"end_version": 3}, {"end_policy_hash": hash_of(3)}], ids=["version", "hash"]
)
def test_a_result_that_crossed_versions_is_refused(end: dict[str, object]) -> None:
    """A result whose last token was sampled at other weights than its first is of no version."""
    case = Case()
    body = case.result(**end).to_bytes()
    assert case.table.consume(case.claim(body), body) == (Verdict.WRONG_VERSION, None)
    assert case.table.wanted(3) == [case.job]


@pytest.mark.parametrize(
    ("rows", "logprobs"),
    [
        ([[7, 7, 7, VOCABULARY], [STOP]], [[-1.0] * 4, [-2.0]]),
        ([[7, 7, 7, 7], [7]], [[-1.0] * 4, [-2.0]]),
        ([[7, STOP, 7, 7], [STOP]], [[-1.0] * 4, [-2.0]]),
        ([[7, 7, 7, 7, STOP], [STOP]], [[-1.0] * 5, [-2.0]]),
        ([[7, 7, 7, 7], [STOP], [STOP]], [[-1.0] * 4, [-2.0], [-2.0]]),
    ],
    ids=["no such token", "unfinished", "past its stop", "too long", "too many"],
)
def test_samples_that_the_job_cannot_have_are_corrupt(
    rows: list[list[int]], logprobs: list[list[float]]
) -> None:
    """True provenance and a true digest do not make the loss see what was not asked for."""
    case = Case()
    honest = case.result()
    body = pack(honest.provenance, rows, logprobs).to_bytes()
    assert case.table.consume(case.claim(body), body) == (Verdict.CORRUPT, None)
    assert case.table.wanted(3) == [case.job]


def test_a_result_of_a_version_above_the_learners_is_refused() -> None:
    """A result cannot be newer than the weights that learn from it."""
    case = Case()
    case.ledger.note(Policy(4, hash_of(4), 3))
    body = case.result(version=4, policy_hash=hash_of(4)).to_bytes()
    claim = case.claim(body, version=4, policy_hash=hash_of(4))
    assert case.table.consume(claim, body) == (Verdict.WRONG_VERSION, None)


def test_a_closed_jobs_result_is_late() -> None:
    """Once its step is closed, or the work was issued anew, an old claim is late."""
    case = Case()
    body = case.result().to_bytes()
    again = case.table.reissue(case.job, failed=True)
    assert again.job_id != case.job.job_id
    assert again.attempt == 2
    assert case.table.consume(case.claim(body), body) == (Verdict.LATE, None)
    assert case.table.wanted(3) == [again]


def test_gate_names_versions_within_the_lag_newest_first() -> None:
    """A batch may be sampled at the learner's version or up to the allowed lag below it."""
    ledger = Case().ledger
    assert ledger.gate(3, 1) == ((3, hash_of(3)), (2, hash_of(2)))
    assert ledger.gate(4, 1) == ((3, hash_of(3)),)
    assert ledger.gate(4, 0) == ()
    assert ledger.newest == Policy(3, hash_of(3), 2)


def test_the_ledger_is_bounded() -> None:
    """Ten thousand versions later the ledger holds the newest few."""
    ledger = PolicyLedger(Policy(0, hash_of(0), 0))
    for version in range(1, 200):
        ledger.note(Policy(version, hash_of(version), version))
    assert len(ledger.hashes()) == MAX_POLICIES
    assert ledger.get(0) is None
    assert ledger.newest.version == 199
