"""A full reload stops an engine for half a minute: this backend writes only what has changed.

vLLM's weight transfer backend "deltastore". The engine stages in the background from
`init_weight_transfer_engine` on; `update_weights({"version": 7})` or `{"version": "newest"}`
activates what is staged, in place, on all ranks or none. A failed update leaves the weights at the
version before, or poisons the engine: then every update is refused until `deltastore_re_anchor`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deltastore.adapters.vllm.child_stager import ChildStager
from deltastore.adapters.vllm.holdings import EngineModel, find_holdings
from deltastore.adapters.vllm.rank import EngineRank
from deltastore.adapters.vllm.refusals import checkpoint_folder, refuse_unfollowable
from deltastore.adapters.vllm.rendezvous import meet
from deltastore.adapters.vllm.scratch import Scratch
from deltastore.adapters.vllm.settings import parse_settings, section_of
from deltastore.adapters.vllm.store_counts import StoreCounts
from deltastore.adapters.vllm.world import agree_on_spool, engine_group
from deltastore.clock import SystemClock
from deltastore.errors import ApplyError, InvalidInputError, Kind
from deltastore.events import ActivationFailed, Event, VersionActivated
from deltastore.repository.run import open_run
from deltastore.storage.observed import open_observed
from deltastore.storage.url import split_run_url

if TYPE_CHECKING:
    from deltastore.adapters.vllm.holdings import Holdings
    from deltastore.adapters.vllm.rendezvous import Answer
    from deltastore.adapters.vllm.settings import EngineSettings
    from deltastore.pipeline.group import Group
    from deltastore.repository.run import Run

_log = logging.getLogger(__name__)
WEIGHTS = "weights"
MEMORY = frozenset({WEIGHTS, "kv_cache"})
"""What vLLM calls the parts of an engine's memory that sleep and wake up apart."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Settings given at initialisation; they win over the engine's additional configuration."""

    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which version to activate: a number, or "newest" for what is staged."""

    version: int | str = "newest"

    def __post_init__(self) -> None:
        if isinstance(self.version, str):
            good = self.version == "newest"
        else:
            good = not isinstance(self.version, bool) and self.version >= 0
        if not good:
            raise InvalidInputError(
                f"{self.version!r} is not a version to activate",
                kind=Kind.VERSION,
                hint='give a number, or "newest"',
            )


class DeltastoreEngine(WeightTransferEngine):
    """One worker's part of the backend."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        refuse_unfollowable(vllm_config)
        super().__init__(config, vllm_config, device, model)
        self._section = section_of(vllm_config.additional_config)
        # Refused at the start, not at the first update; the run may be named later.
        given = parse_settings({"run": "file:///run/named-later", **self._section}, {})
        self._scratch = Scratch(device, given.scratch_max_bytes)  # before the cache takes the rest
        self._clock = SystemClock()
        self._settings: EngineSettings | None = None
        self._group: Group | None = None
        self._rank: EngineRank | None = None
        self._child: ChildStager | None = None
        self._holdings: Holdings | None = None
        self._level = 0
        self._asleep: frozenset[str] = frozenset()
        self._unfit = ""
        self.errors_are_answers = False  # see rank_call.py; the engine core's calls set it
        self._store: Any = None
        self._counts = StoreCounts()

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        """Any settings; what they are is checked together with the configuration's."""
        return InitInfo(dict(init_dict))

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Find the version that the weights are at, and begin to stage. Collective, idempotent.

        Raises InvalidInputError when the engine cannot follow the run, and says why.
        """
        settings = parse_settings(self._section, init_info.settings)
        group = self._met(settings)
        follows = {"follows": self._rank is not None}
        if all(one["follows"] for one in meet(group, self._clock, lambda: follows)):
            if init_info.settings and settings != self._settings:
                raise InvalidInputError(
                    "the engine follows a run already, with other settings",
                    kind=Kind.SETTING,
                    hint="shut the weight transfer engine down first, or start another engine",
                )
            return
        self.shutdown()  # the last beginning may have ended well on this rank alone
        with set_current_vllm_config(self.vllm_config), self._scratch.lent():
            try:
                self._begin(settings, group)
            except BaseException:
                self.shutdown()
                raise
            self._unfit = ""

    def start_weight_update(self) -> None:
        """Refuse where an update would not end well: ApplyError(poisoned, not_staged)."""
        rank = self._following()
        rank.require_sound()
        if WEIGHTS in self._asleep:
            raise ApplyError(
                f"the engine sleeps (level {self._level}): its weights are not there",
                kind=Kind.NOT_STAGED,
                hint="wake it up first; after level 2 re-anchor it",
            )

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Activate a staged version on all ranks, or none. Collective."""
        version = update_info.version
        with self._scratch.lent():
            self._following().update("newest" if isinstance(version, str) else version)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM calls it; synchronises the device where there is one."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Nothing is left to do: an update is whole when it returns."""

    def shutdown(self) -> None:
        """Stop following; the weights stay what they are, and in doubt if they are."""
        self._remember_doubt()
        rank, self._rank = self._rank, None
        child, self._child = self._child, None
        store, self._store = self._store, None
        if rank is not None:
            rank.stop()
        if child is not None:
            child.stop()
        if store is not None:
            store.close()

    def re_anchor(self) -> None:
        """Write the newest version whole, from the bucket. Collective; only while paused."""
        if WEIGHTS in self._asleep:
            raise ApplyError(
                f"the engine sleeps (level {self._level})",
                kind=Kind.NOT_STAGED,
                hint="wake its weights up first",
            )
        with self._scratch.lent():
            self._following().re_anchor()

    def fingerprint(self) -> str:
        """A whole pass over the live weights of all ranks. Collective; only while paused."""
        with self._scratch.lent():
            return str(self._following().fingerprint())

    def status(self) -> dict[str, Any]:
        """What this rank says of itself; JSON. See docs/vllm.md."""
        rank, holdings = self._rank, self._holdings
        active = None if rank is None else rank.active
        settings = self._settings
        return {
            "rank": 0 if self._group is None else self._group.rank,
            "active": None
            if active is None
            else {"version": active.version, "policy_hash": active.policy_hash},
            "staged": None if rank is None else rank.staged,
            "head": None if rank is None else rank.head,
            "poisoned": self._unfit if rank is None else rank.poisoned,
            "trouble": "" if rank is None else rank.trouble,
            "coverage": {} if holdings is None else holdings.coverage,
            "dense_share": 0.0 if holdings is None else holdings.dense_share,
            "shadow_bytes": 0 if holdings is None else holdings.shadow_bytes,
            "scratch_bytes": 0 if settings is None else settings.scratch_max_bytes,
            "last_pause_s": None if rank is None else rank.last_pause_s,
            "asleep": bool(self._asleep),
            "store": self._counts.rows(),
        }

    def fell_asleep(self, level: int = 1) -> None:
        """The engine sleeps: its weights are elsewhere, or after level 2 nowhere."""
        self._level, self._asleep = level, MEMORY
        if level >= 2 and self._rank is not None:
            self._rank.doubt(f"the weights were discarded by sleep level {level}")

    def woke_up(self, tags: list[str] | None = None) -> None:
        """That memory of the engine is there again; None: all of it."""
        self._asleep = frozenset() if tags is None else self._asleep.difference(tags)

    def let_go(self, tags: tuple[str, ...]) -> None:
        """That memory of the engine was given up while it is awake."""
        self._level, self._asleep = max(1, self._level), self._asleep.union(tags)

    def _following(self) -> EngineRank:
        if self._rank is None:
            raise ApplyError(
                "the engine does not follow a run yet",
                kind=Kind.NOT_STAGED,
                hint="call init_weight_transfer_engine first",
            )
        return self._rank

    def _remember_doubt(self) -> None:
        """A rebuild that broke off leaves weights of no version, whether or not it is followed."""
        if self._rank is not None and self._rank.poisoned:
            self._unfit = self._rank.poisoned

    def _met(self, settings: EngineSettings) -> Group:
        """All ranks, met anew: what one of them missed in a call before is forgotten. Collective.

        Raises ApplyError(vote_timeout) when one does not come; the next call meets it again.
        """
        group = self._group = self._group or engine_group(settings.vote_timeout_s)
        if group.size > 1 and not self.errors_are_answers:
            raise InvalidInputError(
                "the engine core of an engine with several ranks has not loaded the plugin",
                kind=Kind.SETTING,
                hint="let VLLM_PLUGINS name deltastore; the extension class alone serves one rank",
            )
        group.renew()
        return group

    def _begin(self, settings: EngineSettings, group: Group) -> None:
        engine, folder = agree_on_spool(group, self._clock, self.vllm_config, settings)
        opened: list[tuple[Run, EngineModel]] = []

        def open_all() -> Answer:
            opened.append((self._open(settings), self._model(settings)))
            return {}

        meet(group, self._clock, open_all)
        run, model = opened[0]
        self._counts.follows(run.region, folder if group.rank == 0 else None)
        holdings = self._holdings
        if holdings is None or holdings.layout != run.layout:
            # Once only: later the weights are not the checkpoint's any more.
            try:
                holdings = find_holdings(model, run.layout, group, settings, self._clock, folder)
            except ApplyError as err:
                if err.kind is Kind.POISONED:
                    self._unfit = f"its weights were changed before it followed: {err.message}"
                raise

        def stage() -> Answer:
            if group.rank == 0 and settings.stager == "own":
                self._child = ChildStager(settings, folder, self._clock)
                self._child.start()
            return {}

        meet(group, self._clock, stage)
        self._rank = EngineRank(
            run,
            holdings.target,
            group,
            engine=engine,
            folder=folder,
            settings=settings,
            clock=self._clock,
            sink=_tell,
        )
        self._holdings, self._settings = holdings, settings
        self._rank.begin()

    def _open(self, settings: EngineSettings) -> Run:
        store_url, name = split_run_url(settings.run)
        self._store = open_observed(
            store_url,
            self._counts.counter,
            "",  # known when the run is open
            clock=self._clock,
            endpoint_url=settings.endpoint,
            region=settings.region,
            profile=settings.profile,
        )
        return open_run(self._store, name, region=settings.region_name)

    def _model(self, settings: EngineSettings) -> EngineModel:
        folder = checkpoint_folder(self.vllm_config, settings)
        return EngineModel(self.model, self.model_config, folder)


def _tell(event: Event) -> None:
    """What happened to the weights, in the engine's log."""
    if isinstance(event, VersionActivated):
        _log.info(
            "%s: version %s is active (%s changes, %.1f ms)",
            event.actor,
            event.version,
            event.nnz,
            1000 * event.write_pause_s,
        )
    elif isinstance(event, ActivationFailed):
        _log.warning("%s: version %s not activated: %s", event.actor, event.version, event.message)
