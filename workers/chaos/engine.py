"""Under chaos a result must betray the weights it was made with: these tokens are their hash.

The engine holds real weights and computes nothing with them: the tokens of a sample follow from the
whole fingerprint of the live weights, the prompt's seed and the sample's number. Whoever knows the
run's manifests can say which version made a result, and a result of no version is found.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

from deltastore.errors import IntegrityError, Kind
from workers.actor.engine import Completions, GenerationStopped
from workers.chaos.deeds import SLOW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltastore.clock import Clock
    from deltastore.pipeline.protocols import WeightTarget
    from workers.actor.engine import Progress, Prompt
    from workers.chaos.orders import OrderBook
    from workers.sampling import Sampling

STOP = 1
FIRST_TOKEN = 2
BATCH_S = 0.15  # what every batch costs
TOKEN_S = 0.004  # what a token adds
LOOK_S = 0.05
FELT_S = 0.5  # of delay: by then slowness has done something


def scripted_sample(
    fingerprint: str, sampling: Sampling, sample: int, vocabulary: int
) -> list[int]:
    """The tokens that weights with this fingerprint give to one sample of a prompt."""
    text = f"{fingerprint}\0{sampling.seed}\0{sample}".encode()
    digest = hashlib.shake_256(text).digest(4 * (sampling.max_new_tokens + 1))
    words = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, len(digest), 4)]
    length = 1 + words[0] % sampling.max_new_tokens
    tokens = [FIRST_TOKEN + word % (vocabulary - FIRST_TOKEN) for word in words[1 : 1 + length]]
    if length < sampling.max_new_tokens:
        tokens[-1] = STOP
    return tokens


class ScriptedEngine:
    """An `Engine` whose speed is ordered and whose tokens prove its weights."""

    def __init__(
        self, target: WeightTarget, book: OrderBook, *, vocabulary: int, clock: Clock
    ) -> None:
        self._target = target
        self._book = book
        self._vocabulary = vocabulary
        self._clock = clock

    def generate(self, prompts: Sequence[Prompt], progress: Progress) -> list[Completions]:
        """Take the time that the orders say, and make the tokens of the weights as they are."""
        before = str(self._target.fingerprint())
        made = [self._complete(prompt.sampling, before) for prompt in prompts]
        self._spend(sum(len(row) for item in made for row in item.tokens), progress)
        after = str(self._target.fingerprint())
        if after != before:
            raise IntegrityError(
                f"weights {before} became {after} during a forward pass", kind=Kind.FINGERPRINT
            )
        return made

    def _complete(self, sampling: Sampling, fingerprint: str) -> Completions:
        rows = [
            scripted_sample(fingerprint, sampling, sample, self._vocabulary)
            for sample in range(sampling.group_size)
        ]
        logprob = -math.log(self._vocabulary)
        return Completions(
            rows, [[logprob] * len(row) for row in rows], [row[-1] == STOP for row in rows]
        )

    def _spend(self, tokens: int, progress: Progress) -> None:
        done_s, slept_s, needed_s = 0.0, 0.0, BATCH_S + TOKEN_S * tokens
        while done_s < needed_s:
            self._clock.sleep_s(LOOK_S)
            orders = self._book.read()
            done_s += LOOK_S / orders.slow
            slept_s += LOOK_S
            if orders.slow > 1 and slept_s - done_s >= FELT_S:
                self._book.note_once(SLOW, orders)
            if not progress(min(tokens, int(tokens * done_s / needed_s))):
                raise GenerationStopped
