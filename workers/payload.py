"""A job that two sides read differently trains on noise: its payload is one canonical document.

A job is one whole GRPO group: a prompt as token ids and how to sample from it. Actors need no
tokenizer. Integers only; what an actor reads here it got through Redis, so it is checked anew.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from deltastore.coordination.records import MAX_PAYLOAD_BYTES
from deltastore.errors import FormatError, InvalidInputError, Kind
from deltastore.format.canonical import canonical_json, parse_canonical_json
from workers.sampling import Sampling

FORMAT = "deltastore-job/1"
MAX_PROMPT_TOKENS = 32_768

_SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))


@dataclass(frozen=True, slots=True)
class JobPayload:
    """What an actor needs to do a job.

    Args:
        step: the trainer step the group is for.
        prompt: token ids.
        sampling: how to draw the group's samples.
    """

    step: int
    prompt: tuple[int, ...]
    sampling: Sampling

    def __post_init__(self) -> None:
        good = 1 <= len(self.prompt) <= MAX_PROMPT_TOKENS
        if not good or not all(_is_count(token, (1 << 31) - 1) for token in self.prompt):
            raise InvalidInputError(
                f"a prompt of {len(self.prompt)} tokens, or one below 0, is not allowed",
                kind=Kind.PAYLOAD,
                hint=f"give 1 to {MAX_PROMPT_TOKENS} token ids",
            )
        if not _is_count(self.step, (1 << 53) - 1):
            raise InvalidInputError(f"step {self.step!r} is not allowed", kind=Kind.PAYLOAD)

    @property
    def most_tokens(self) -> int:
        """How many tokens the job can make."""
        return self.sampling.group_size * self.sampling.max_new_tokens

    def to_bytes(self) -> bytes:
        """The one text of this job."""
        document: dict[str, Any] = {
            "format": FORMAT,
            "step": self.step,
            "prompt": list(self.prompt),
        }
        for name in _SAMPLING_FIELDS:
            document[name] = getattr(self.sampling, name)
        return canonical_json(document)

    @classmethod
    def from_bytes(cls, text: bytes) -> JobPayload:
        """Read what `to_bytes` writes; FormatError on anything else."""
        document = parse_canonical_json(text, what="job payload", max_bytes=MAX_PAYLOAD_BYTES)
        wanted = {"format", "step", "prompt", *_SAMPLING_FIELDS}
        if not isinstance(document, dict) or set(document) != wanted:
            raise FormatError("job payload has missing or unknown fields", kind=Kind.PAYLOAD)
        if document["format"] != FORMAT:
            raise FormatError(
                f"job payload format {str(document['format'])[:40]!r} is not {FORMAT!r}",
                kind=Kind.FORMAT_VERSION,
                hint="trainer and actor must run the same release",
            )
        if not isinstance(document["prompt"], list):
            raise FormatError("job payload's prompt is not a list", kind=Kind.PAYLOAD)
        try:
            sampling = Sampling(**{name: document[name] for name in _SAMPLING_FIELDS})
            return cls(document["step"], tuple(document["prompt"]), sampling)
        except InvalidInputError as err:
            raise FormatError(f"job payload: {err.message}", kind=Kind.PAYLOAD) from err


def _is_count(value: object, maximum: int) -> bool:
    return type(value) is int and 0 <= value <= maximum
