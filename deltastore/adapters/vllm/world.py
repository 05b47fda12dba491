"""Ranks that do not share a folder wait for updates that never come: who shares is found out first.

The ranks of an engine as a Group of their own, apart from the groups that forward passes use, and
where on the host they meet their stager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deltastore.adapters.vllm.rendezvous import meet
from deltastore.errors import InvalidInputError, Kind
from deltastore.ids import new_token
from deltastore.pipeline.group import SoloGroup
from deltastore.pipeline.spool import SpoolFolder

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.adapters.vllm.rendezvous import Answer
    from deltastore.adapters.vllm.settings import EngineSettings
    from deltastore.clock import Clock
    from deltastore.pipeline.group import Group


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
    token = f"meeting-{new_token()[:16]}"

    def lay() -> Answer:
        if group.rank == 0:
            (SpoolFolder(folder).path / token).touch(0o600)
        return {"engine": name, "token": token}

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
        if group.rank == 0:
            (folder / token).unlink(missing_ok=True)
        return {}

    try:
        meet(group, clock, look)
    finally:
        meet(group, clock, clear)
    return said["engine"], folder
