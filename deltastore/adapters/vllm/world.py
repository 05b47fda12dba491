"""Ranks that do not share a folder wait for updates that never come: who shares is found out first.

The ranks of an engine as a Group of their own, apart from the groups that forward passes use, and
where on the host they meet their stager.
"""

from __future__ import annotations

from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any

from deltastore.adapters.vllm.rendezvous import meet
from deltastore.errors import InvalidInputError, Kind
from deltastore.ids import new_token
from deltastore.pipeline.group import SoloGroup
from deltastore.pipeline.held_lock import HeldLock
from deltastore.pipeline.spool import SpoolFolder

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.adapters.vllm.rendezvous import Answer
    from deltastore.adapters.vllm.settings import EngineSettings
    from deltastore.clock import Clock
    from deltastore.pipeline.group import Group

ATTEMPTS = 8


def engine_group(timeout_s: float) -> Group:
    """All ranks of this process's engine, for each to renew; called once on every rank."""
    from vllm.distributed.parallel_state import get_world_group

    world = get_world_group()
    if world.world_size == 1:
        return SoloGroup()
    from deltastore.adapters.torch_group import TorchGroup

    return TorchGroup.of(list(world.ranks), timeout_s=timeout_s)


def agree_on_spool(
    group: Group, clock: Clock, vllm_config: Any, settings: EngineSettings
) -> tuple[str, Path]:
    """The engine's name on this host, and the folder of the host's stager. Collective.

    Raises InvalidInputError(setting) on every rank when they do not share the folder.
    """
    folder = settings.spool_folder()
    name = settings.engine_name
    replica = int(getattr(vllm_config.parallel_config, "data_parallel_index", 0) or 0)
    if replica:
        name = f"{name}-dp{replica}"
    with ExitStack() as laid:

        def lay() -> Answer:
            if group.rank != 0:
                return {}
            file = laid.enter_context(closing(_MeetingFile(SpoolFolder(folder).path)))
            return {"engine": name, "token": file.path.name}

        said = meet(group, clock, lay)[0]

        def look() -> Answer:
            if not (folder / said["token"]).exists():
                raise InvalidInputError(
                    f"rank {group.rank} does not see what rank 0 wrote in {folder}",
                    kind=Kind.SETTING,
                    hint="an engine's ranks run on one host and share its `folder`",
                )
            return {}

        def clear() -> Answer:
            laid.close()
            return {}

        try:
            meet(group, clock, look)
        finally:
            meet(group, clock, clear)
    return said["engine"], folder


class _MeetingFile:
    """A file by which ranks find out that they share a folder; removes those of killed engines.

    It is locked as long as it is used: whoever removes one has its lock.
    """

    def __init__(self, folder: Path) -> None:
        for left in folder.glob("meeting-*"):
            # Locked: it is in use. Not to be removed: then it stays, and is no reason to fail.
            with suppress(InvalidInputError, OSError), closing(_locked(left)):
                left.unlink(missing_ok=True)
        for _ in range(ATTEMPTS):
            self.path = folder / f"meeting-{new_token()[:16]}"
            with suppress(InvalidInputError):  # somebody removes it as one of a killed engine
                self._lock = _locked(self.path)
                if self.path.exists():
                    return
                self._lock.close()
        raise InvalidInputError(
            f"{folder} keeps no file for the ranks of an engine to meet by",
            kind=Kind.SETTING,
            hint="something removes files there; set `folder` to another one",
        )

    def close(self) -> None:
        """Remove it."""
        try:
            self.path.unlink(missing_ok=True)
        finally:
            self._lock.close()


def _locked(path: Path) -> HeldLock:
    return HeldLock(path, what="a meeting's file")
