"""`deltastore stage` that dies at a step: `python -m tests.vllm.crash_stager BOOK stage …`.

The file `now` in BOOK names the step. The one that dies of it removes that file, and leaves one of
the step's name, with the names of the updates that were in the spool.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltastore.cli import main
from tests.vllm.crash_steps import STAGING, arm, kill_self

if TYPE_CHECKING:
    from tests.vllm.crash_steps import Step


def arm_by(book: Path, spool: Path, step: Step) -> None:
    """Die at that step while the book says so."""
    now = book / "now"

    def is_now(*arguments: Any, **named: Any) -> bool:
        told = now.exists() and now.read_text(encoding="utf-8") == step.name
        return told and (step.when is None or step.when(*arguments, **named))

    def die() -> None:
        now.unlink()
        names = [path.name for path in (spool / "updates").iterdir()]
        (book / step.name).write_text("\n".join(names), encoding="utf-8")
        kill_self()

    arm(replace(step, when=is_now), die)


if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    for one in STAGING:
        arm_by(folder, Path(sys.argv[sys.argv.index("--folder") + 1]), one)
    main()
