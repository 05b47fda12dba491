"""An update that reaches most of a model serves a mixture: what is not covered is refused at start.

What this rank holds of the run's tensors, as the engine's own loader says: traced, compared with
the bytes of the checkpoint that was loaded, and covered over all ranks together.
"""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltastore.adapters.dense_shadow import DenseShadows
from deltastore.adapters.loader_coverage import closures, local_coverage, require_coverage
from deltastore.adapters.loader_trace import verify_bytes
from deltastore.adapters.loader_verify import demote
from deltastore.adapters.placed_target import PlacedTarget
from deltastore.adapters.safetensors_dir import CheckpointReader
from deltastore.adapters.safetensors_scan import scan_checkpoint
from deltastore.adapters.vllm.reload import Reload
from deltastore.adapters.vllm.rendezvous import meet
from deltastore.adapters.vllm.tracing import trace_engine
from deltastore.errors import ApplyError, IntegrityError, InvalidInputError, Kind
from deltastore.format.mixing import fingerprint_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    import torch

    from deltastore.adapters.loader_coverage import CoverageReport, DenseGroup
    from deltastore.adapters.loader_trace import LoaderTrace
    from deltastore.adapters.vllm.settings import EngineSettings
    from deltastore.clock import Clock
    from deltastore.format.dtypes import Bits
    from deltastore.format.fingerprint import Fingerprint
    from deltastore.format.layout import Layout
    from deltastore.pipeline.group import Group

_log = logging.getLogger(__name__)
MAX_NAMES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """What one rank holds.

    Args:
        layout: of which this is a part.
        target: its weights.
        coverage: of the whole engine, for people and for `deltastore_status`; JSON.
        dense_share: part of the layout's bytes that is loaded anew rather than written, 0 to 1.
        shadow_bytes: of this rank's host copies of dense-only tensors.
    """

    layout: Layout
    target: PlacedTarget
    coverage: dict[str, Any]
    dense_share: float
    shadow_bytes: int


class EngineModel:
    """The parts of a worker's model that its weights depend on."""

    def __init__(self, model: torch.nn.Module, model_config: Any, checkpoint: Path) -> None:
        self.module = model
        self._model_config = model_config
        self._checkpoint = checkpoint

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Run the engine's own loader."""
        return self.module.load_weights(weights)  # type: ignore[operator]

    def reload(self, groups: Sequence[DenseGroup], layout: Layout) -> Reload:
        """What loads whole closures anew."""
        return Reload(self.module, self._model_config, groups, layout)

    def runtime(self, modules: Sequence[str]) -> Iterable[tuple[str, torch.Tensor]]:
        """Parameters and buffers of modules, with their names."""
        for name in modules:
            module = self.module.get_submodule(name)
            for part, tensor in (
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ):
                yield f"{name}.{part}", tensor

    def read(self, layout: Layout, tensor: int) -> Bits:
        """The bits of a tensor as the engine has loaded it."""
        with CheckpointReader(scan_checkpoint(self._checkpoint), layout) as reader:
            return reader.tensor(tensor)

    def reader(self, layout: Layout) -> CheckpointReader:
        """All of them, with its files open in a `with`."""
        return CheckpointReader(scan_checkpoint(self._checkpoint), layout)


def find_holdings(
    model: EngineModel,
    layout: Layout,
    group: Group,
    settings: EngineSettings,
    clock: Clock,
    folder: Path,
) -> Holdings:
    """Trace the loader and cover all weights of all ranks. Collective.

    Raises InvalidInputError on every rank alike, naming what is not covered, does not fit the
    checkpoint, or cannot be reloaded: the weights are as they were, and may be served.
    ApplyError(poisoned) when tracing or reloading has changed weights: the engine must not serve.
    """
    held: list[Holdings] = []
    found: list[LoaderTrace] = []

    def trace() -> dict[str, Any]:
        with _refusing(), model.reader(layout) as reader:
            traced = _traced(model, layout)
            verified = verify_bytes(traced, layout, reader.tensor)
        found.append(verified)
        return {"coverage": json.dumps(local_coverage(verified, layout, model.module))}

    parts = [json.loads(one["coverage"]) for one in meet(group, clock, trace)]
    with _refusing():
        report = require_coverage(
            layout,
            parts,
            allow_dense=settings.allow_dense,
            unused=settings.unused,
            unfilled=settings.unfilled,
        )

    def build() -> dict[str, Any]:
        trace = demote(found[0], report.dense)
        shadows, reload_s = None, 0.0
        if trace.dense_only:
            groups = closures(trace, layout)
            reload = model.reload(groups, layout)
            with _refusing(), model.reader(layout) as reader:
                started_s = clock.monotonic_s()
                reload.prove(reader.tensor)
                reload_s = clock.monotonic_s() - started_s
                shadows = DenseShadows(
                    layout,
                    trace.dense_only,
                    groups,
                    reader.tensor,
                    reload=reload,
                    runtime=model.runtime,
                    folder=folder,
                    max_bytes=settings.shadow_max_bytes,
                )

        def unused_fingerprint(tensor: int) -> Fingerprint:
            return fingerprint_run(model.read(layout, tensor), layout.tensors[tensor].first_element)

        target = PlacedTarget(
            layout,
            trace.placements,
            shadows=shadows,
            unused=trace.unused,
            unused_fingerprint=unused_fingerprint,
            scratch_max_bytes=settings.scratch_max_bytes,
        )
        held.append(
            Holdings(
                layout,
                target,
                _document(report, layout),
                report.dense_share,
                0 if shadows is None else shadows.size_bytes,
            )
        )
        return {"shadow_bytes": held[0].shadow_bytes, "reload_ms": round(1000 * reload_s)}

    costs = meet(group, clock, build)
    if group.rank == 0:
        _say(report, costs)
    return held[0]


def _say(report: CoverageReport, costs: Sequence[dict[str, Any]]) -> None:
    """What an operator must know before the first update, in one line per engine."""
    _log.info(
        "follows %s tensors: %s written in place, %s reloaded (%.1f %% of all bytes), %s not held;"
        " shadows take %s bytes on %s ranks; an update that changes all that is reloaded pauses"
        " for about %.1f s more",
        len(report.layout),
        report.placed,
        len(report.dense),
        100 * report.dense_share,
        len(report.unused),
        sum(one["shadow_bytes"] for one in costs),
        len(costs),
        max(one["reload_ms"] for one in costs) / 1000,
    )


def _traced(model: EngineModel, layout: Layout) -> LoaderTrace:
    try:
        return trace_engine(model.module, layout)
    except IntegrityError as err:
        raise ApplyError(
            f"tracing the loader has changed the engine's weights: {err.message}",
            kind=Kind.POISONED,
            hint="start the engine again, and do not let it follow",
        ) from err


@contextmanager
def _refusing() -> Iterator[None]:
    """What does not fit, and has touched nothing, is no damage: it is refused as an input."""
    try:
        yield
    except IntegrityError as err:
        raise InvalidInputError(
            f"the engine cannot follow this run: {err.message}", kind=err.kind, hint=err.hint
        ) from err


def _document(report: CoverageReport, layout: Layout) -> dict[str, Any]:
    """The report as JSON; long lists are cut, their lengths are not."""
    names = [spec.name for spec in layout.tensors]
    dense = [[names[tensor], why] for tensor, why in report.dense.items()]
    return {
        "tensors": len(layout),
        "elements": layout.elements,
        "placed": report.placed,
        "dense": len(dense),
        "dense_names": dense[:MAX_NAMES],
        "dense_bytes": report.dense_bytes,
        "total_bytes": layout.size_bytes,
        "unused": [names[tensor] for tensor in report.unused[:MAX_NAMES]],
        "unfilled": list(report.unfilled[:MAX_NAMES]),
    }
