"""A result read as it claims to be trains on whatever was sent: it is hostile until checked.

A result is one safetensors file: `tokens` int32 [samples, width], `logprobs` float32 of the same
shape, `lengths` int32 [samples]; width is the longest sample, places beyond a sample's length are
0. Its metadata says whose it is: lease, actor, seed, and the version and policy hash of its first
token and of its last. There is exactly one text per result: a reader encodes what it understood and
compares.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.errors import DeltastoreError, FormatError, InvalidInputError, Kind
from deltastore.format.canonical import canonical_json, parse_canonical_json
from deltastore.ids import check_name, check_version, is_sha256, is_token
from workers.sampling import MAX_GROUP_SIZE, MAX_NEW_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from workers.sampling import Sampling

FORMAT = "deltastore-result/2"
MAX_RESULT_BYTES = 64 << 20
MAX_HEADER_BYTES = 4096
LOGPROB_SLACK = 1e-3  # a log-softmax in float32 may end a rounding above 0
_META = (
    "format",
    "job_id",
    "token",
    "actor_id",
    "version",
    "policy_hash",
    "end_version",
    "end_policy_hash",
    "seed",
)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Whose a result is: every rollout names its lease, actor, version and policy hash.

    Args:
        version, policy_hash: what the lease is bound to, and the first token was sampled at.
        end_version, end_policy_hash: what the last token was sampled at; the same, or the trainer
            refuses it.
    """

    job_id: str
    token: str
    actor_id: str
    version: int
    policy_hash: str
    end_version: int
    end_policy_hash: str
    seed: int

    def __post_init__(self) -> None:
        check_name(self.job_id, "job id")
        check_name(self.actor_id, "actor id")
        check_version(self.version)
        check_version(self.end_version)
        hashes = is_sha256(self.policy_hash) and is_sha256(self.end_policy_hash)
        if not is_token(self.token) or not hashes:
            raise InvalidInputError("token or policy hash is malformed", kind=Kind.PAYLOAD)
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 53:
            raise InvalidInputError(f"seed {self.seed!r} is not allowed", kind=Kind.PAYLOAD)

    @property
    def crossed(self) -> bool:
        """Whether the weights changed between its first token and its last."""
        begin = self.version, self.policy_hash
        return begin != (self.end_version, self.end_policy_hash)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutResult:
    """The samples of one job.

    Args:
        provenance: whose it is.
        tokens: int32 [samples, width].
        logprobs: float32 [samples, width], of the distribution that was sampled from.
        lengths: int32 [samples]; tokens and logprobs beyond them are 0.
    """

    provenance: Provenance
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    lengths: NDArray[np.int32]

    @property
    def token_count(self) -> int:
        """Generated tokens, stop tokens included."""
        return int(self.lengths.sum())

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Which places hold a token: [samples, width]."""
        return np.arange(self.tokens.shape[1]) < self.lengths[:, None]

    def to_bytes(self) -> bytes:
        """The one text of this result."""
        head = _header(self.provenance, *self.tokens.shape)
        parts = (self.tokens.astype("<i4"), self.logprobs.astype("<f4"), self.lengths.astype("<i4"))
        return head + b"".join(part.tobytes() for part in parts)

    @classmethod
    def from_bytes(cls, body: bytes, *, max_bytes: int = MAX_RESULT_BYTES) -> RolloutResult:
        """Read what `to_bytes` writes; FormatError(payload, limit, truncated) on anything else."""
        if len(body) > max_bytes:
            raise FormatError(
                f"result has {len(body)} bytes, more than {max_bytes}", kind=Kind.LIMIT
            )
        size = int.from_bytes(body[:8], "little")
        if len(body) < 8 or size > MAX_HEADER_BYTES or len(body) < 8 + size:
            raise FormatError("result ends inside its header", kind=Kind.TRUNCATED)
        provenance, samples, width = _read_header(body[8 : 8 + size])
        start, cells = 8 + size, samples * width
        if len(body) != start + 8 * cells + 4 * samples:
            raise FormatError("result has another length than its header says", kind=Kind.TRUNCATED)
        tokens = np.frombuffer(body, "<i4", cells, start).reshape(samples, width)
        logprobs = np.frombuffer(body, "<f4", cells, start + 4 * cells).reshape(samples, width)
        lengths = np.frombuffer(body, "<i4", samples, start + 8 * cells)
        result = cls(provenance, tokens, logprobs, lengths)
        _check_arrays(result)
        if result.to_bytes() != body:
            raise FormatError("result is not in its one form", kind=Kind.NOT_CANONICAL)
        return result


def check_sampled(result: RolloutResult, sampling: Sampling, vocabulary: int) -> None:
    """Raise FormatError(payload) unless the samples are some that `sampling` could have drawn."""
    samples = result.tokens.shape[0]
    if samples != sampling.group_size:
        raise _refuse(f"has {samples} samples, not {sampling.group_size}")
    if int(result.lengths.max()) > sampling.max_new_tokens:
        raise _refuse(f"is longer than {sampling.max_new_tokens} tokens")
    if int(result.tokens.min()) < 0 or int(result.tokens.max()) >= vocabulary:
        raise _refuse(f"has a token outside the vocabulary of {vocabulary}")
    stops = (result.tokens == sampling.stop_token) & result.mask
    last = result.tokens[np.arange(samples), result.lengths - 1]
    complete = (last == sampling.stop_token) | (result.lengths == sampling.max_new_tokens)
    if not complete.all():
        raise _refuse("has a sample that neither stopped nor was cut at the limit")
    if (stops.sum(1) > (last == sampling.stop_token)).any():
        raise _refuse("has a sample that goes on after its stop token")
    if result.provenance.seed != sampling.seed:
        raise _refuse(f"is of seed {result.provenance.seed}, not {sampling.seed}")


def pack(
    provenance: Provenance, tokens: list[list[int]], logprobs: list[list[float]]
) -> RolloutResult:
    """A result from samples of different lengths; none may be empty."""
    lengths = np.array([len(row) for row in tokens], np.int32)
    width = int(lengths.max())
    table = np.zeros((len(tokens), width), np.int32)
    values = np.zeros((len(tokens), width), np.float32)
    for i, (row, logs) in enumerate(zip(tokens, logprobs, strict=True)):
        table[i, : len(row)] = row
        values[i, : len(row)] = logs
    return RolloutResult(provenance, table, values, lengths)


def _header(provenance: Provenance, samples: int, width: int) -> bytes:
    meta = {name: getattr(provenance, name) for name in _META[1:]}
    cells = 4 * samples * width
    document = {
        "__metadata__": {"result": canonical_json({"format": FORMAT, **meta}).decode()},
        "tokens": _entry("I32", [samples, width], 0, cells),
        "logprobs": _entry("F32", [samples, width], cells, 2 * cells),
        "lengths": _entry("I32", [samples], 2 * cells, 2 * cells + 4 * samples),
    }
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _read_header(text: bytes) -> tuple[Provenance, int, int]:
    try:
        document = json.loads(text)
        meta_text = document["__metadata__"]["result"]
        samples, width = document["tokens"]["shape"]
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise FormatError("result has no readable header", kind=Kind.PAYLOAD) from err
    for value, maximum in ((samples, MAX_GROUP_SIZE), (width, MAX_NEW_TOKENS)):
        if type(value) is not int or not 1 <= value <= maximum:
            raise FormatError("result has an impossible shape", kind=Kind.LIMIT)
    if not isinstance(meta_text, str):
        raise FormatError("result has no metadata", kind=Kind.PAYLOAD)
    try:
        meta = parse_canonical_json(meta_text.encode(), what="result metadata")
        if not isinstance(meta, dict) or set(meta) != set(_META) or meta.pop("format") != FORMAT:
            raise FormatError("result metadata has other fields", kind=Kind.PAYLOAD)
        return Provenance(**meta), samples, width
    except (DeltastoreError, TypeError, ValueError) as err:
        raise FormatError(f"result metadata: {err}", kind=Kind.PAYLOAD) from err


def _check_arrays(result: RolloutResult) -> None:
    width = result.tokens.shape[1]
    if int(result.lengths.min()) < 1 or int(result.lengths.max()) != width:
        raise _refuse("has a sample of no tokens, or none that fills its width")
    if not np.isfinite(result.logprobs).all() or float(result.logprobs.max()) > LOGPROB_SLACK:
        raise _refuse("has a log-probability that is none")
    outside = ~result.mask
    if result.tokens[outside].any() or result.logprobs.view(np.int32)[outside].any():
        raise _refuse("has tokens beyond a sample's length")


def _refuse(what: str) -> FormatError:
    return FormatError(f"result {what}", kind=Kind.PAYLOAD)
