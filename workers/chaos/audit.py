"""What a trainer learned from is gone when it has learned: under chaos every batch is kept.

One file per step: a line of JSON, then the results as they came. From these alone the learning can
be done again, undisturbed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workers.results import RolloutResult
from workers.run_folder import write_whole_file
from workers.trainer.grpo import Group

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from workers.trainer.dispatch import Batch


@dataclass(frozen=True, slots=True)
class AuditFolder:
    """The batches of a run, one file each."""

    path: Path

    def keep(self, batch: Batch) -> None:
        """Write down what a step is about to learn from."""
        bodies = [group.result.to_bytes() for group in batch.groups]
        rows = [
            {"prompt": group.prompt, "rewards": group.rewards, "lag": group.lag, "size": len(body)}
            for group, body in zip(batch.groups, bodies, strict=True)
        ]
        self.path.mkdir(parents=True, exist_ok=True)
        head = json.dumps({"step": batch.step, "groups": rows}).encode()
        write_whole_file(self.path / f"{batch.step:08d}", head + b"\n" + b"".join(bodies))

    def steps(self) -> list[int]:
        """The steps that are there, in order."""
        return sorted(int(path.name) for path in self.path.iterdir() if path.name.isdigit())

    def read(self, step: int) -> Sequence[Group]:
        """The groups of a step, as the loss saw them."""
        head, _, rest = (self.path / f"{step:08d}").read_bytes().partition(b"\n")
        groups = []
        for row in json.loads(head)["groups"]:
            body, rest = rest[: row["size"]], rest[row["size"] :]
            result = RolloutResult.from_bytes(body, max_bytes=len(body))
            groups.append(Group(tuple(row["prompt"]), result, tuple(row["rewards"]), row["lag"]))
        return groups
