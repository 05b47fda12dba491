"""What tests do inside a worker: make its writes fail, prove its weights."""

from __future__ import annotations

from typing import Any

from deltastore.adapters.vllm.extension import WorkerExtension


class WorkerProbe(WorkerExtension):
    """For `worker_extension_cls`; its methods are called by `collective_rpc`."""

    def probe_writes(self, fail_after: int, rank: int, *, undo_fails: bool = False) -> None:
        """Let the write of that rank fail after so many parts; negative: let all succeed.

        Args:
            undo_fails: let the undoing fail too.
        """
        applied = self.weight_transfer_engine._rank._applier  # type: ignore[attr-defined]
        target = applied._target
        for name in ("write", "undo"):
            target.__dict__.pop(name, None)
        if fail_after < 0 or self.rank != rank:  # type: ignore[attr-defined]
            return
        left = [fail_after]
        write = target.write

        def failing(part: Any, *, keep: bool) -> None:
            if left[0] == 0:
                raise OSError("the probe failed this write")
            left[0] -= 1
            write(part, keep=keep)

        def undo(part: Any) -> None:
            raise OSError("the probe failed this undo")

        target.write = failing
        if undo_fails:
            target.undo = undo

    def probe_whole(self) -> None:
        """Prove all live weights; raises IntegrityError."""
        self.weight_transfer_engine._rank.check_whole()  # type: ignore[attr-defined]

    def probe_parts(self) -> int:
        """How many parts the prepared update has; 0 when none is prepared."""
        ready = self.weight_transfer_engine._rank._feed._ready  # type: ignore[attr-defined]
        return 0 if ready is None else len(ready[1].parts)

    def probe_stager(self) -> int:
        """The process number of this rank's stager; 0 when it has none."""
        child = self.weight_transfer_engine._child  # type: ignore[attr-defined]
        return 0 if child is None else (child.pid or 0)
