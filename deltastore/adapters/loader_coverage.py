"""A name skipped in silence is a weight that never changes: everything must be accounted for.

Over all ranks of an engine every element of every tensor is placed, dense-only, or of a tensor
that somebody has said is unused; and every element of every runtime parameter is filled by the
loader, or of a parameter that somebody has said is not. Anything else is refused with its name.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.adapters.loader_memory import FREED
from deltastore.adapters.readback import memory_of
from deltastore.adapters.region_overlap import Strided, count_disjoint, overlap
from deltastore.errors import IntegrityError, InvalidInputError, Kind
from deltastore.format.coverage import list_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from deltastore.adapters.loader_trace import LoaderTrace
    from deltastore.adapters.placements import Reach
    from deltastore.format.layout import Layout

MAX_DENSE_SHARE = 0.05
"""Of the layout's bytes: more of them dense-only makes every activation a partial reload."""


@dataclass(frozen=True, slots=True)
class DenseGroup:
    """What must be loaded together, for one of it cannot be loaded alone.

    Args:
        modules: runtime names of the modules that would be left half loaded.
        tensors: positions of all tensors that go into them, dense-only or placed.
    """

    modules: tuple[str, ...]
    tensors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CoverageReport:
    """What all ranks of an engine cover together.

    Args:
        layout: whose tensors these are.
        placed: how many tensors are placed on every rank that holds any of them.
        dense: layout position -> why, of each tensor that is dense-only on some rank; it must
            be so on all (`loader_verify.demote`).
        unused: positions of tensors that no rank holds, all of them allowed.
        unfilled: runtime names of parameters that no tensor fills, all of them allowed.
    """

    layout: Layout
    placed: int
    dense: Mapping[int, str]
    unused: tuple[int, ...]
    unfilled: tuple[str, ...]

    @property
    def dense_bytes(self) -> int:
        """Of all dense-only tensors."""
        return sum(self.layout.tensors[tensor].size_bytes for tensor in self.dense)

    @property
    def dense_share(self) -> float:
        """Of the layout's bytes, those of dense-only tensors: 0 to 1."""
        return self.dense_bytes / max(1, self.layout.size_bytes)


def closures(trace: LoaderTrace, layout: Layout) -> tuple[DenseGroup, ...]:
    """The groups that dense-only tensors are reloaded in; each dense-only tensor is in one.

    Tensors and modules are joined wherever the loader takes one into the other; a dense-only
    tensor that reaches no module is a group of its own.
    """
    groups = _Joined()
    for reach in trace.reaches:
        names: list[object] = [*reach.tensors, *reach.modules]
        for name in names:
            groups.join(names[0], name)
    for tensor in trace.dense_only:
        groups.join(tensor, tensor)
    members: dict[object, list[object]] = {}
    for name in groups.names:
        members.setdefault(groups.root(name), []).append(name)
    made = (
        DenseGroup(
            tuple(sorted(name for name in group if isinstance(name, str))),
            tuple(sorted(name for name in group if isinstance(name, int))),
        )
        for group in members.values()
        if any(name in trace.dense_only for name in group)
    )
    return tuple(sorted(made, key=lambda group: group.tensors))


def local_coverage(trace: LoaderTrace, layout: Layout, module: torch.nn.Module) -> dict[str, Any]:
    """What this process covers, as JSON: for `require_coverage` on any rank."""
    return {
        "layout": layout.digest,
        "placed": sorted(
            {
                (p.region.tensor, p.region.offset, p.region.sizes, p.region.strides)
                for p in trace.placements
            }
        ),
        "dense": [[tensor, reason] for tensor, reason in trace.dense_only.items()],
        "unfilled": _unfilled(trace, module),
    }


def require_coverage(
    layout: Layout,
    parts: Sequence[Mapping[str, Any]],
    *,
    allow_dense: bool = False,
    unused: Sequence[str] = (),
    unfilled: Sequence[str] = (),
) -> CoverageReport:
    """Check that all ranks together leave nothing out.

    Args:
        parts: `local_coverage` of every rank.
        allow_dense: whether more than 5 % of the bytes may be dense-only.
        unused, unfilled: patterns (`*`, `?`) of layout names that may be held by no rank, and of
            runtime parameters that no tensor need fill.

    Raises:
        InvalidInputError(coverage): lists the names that are left out, or says how much is
            dense-only.
        IntegrityError(layout_mismatch): a rank traced another layout.
    """
    for part in parts:
        if part["layout"] != layout.digest:
            raise IntegrityError("a rank traced another layout", kind=Kind.LAYOUT_MISMATCH)
    dense = {int(tensor): str(why) for part in parts for tensor, why in part["dense"]}
    held: dict[int, set[Strided]] = {}
    for part in parts:
        for tensor, offset, sizes, strides in part["placed"]:
            region = Strided(int(offset), tuple(sizes), tuple(strides))
            held.setdefault(int(tensor), set()).add(region)
    freed = [layout.tensors[tensor].name for tensor, why in dense.items() if why == FREED]
    if freed:
        raise InvalidInputError(
            f"{len(freed)} tensors are freed by the engine after loading, no update can reach"
            f" them: {list_names(freed)}",
            kind=Kind.COVERAGE,
            hint="switch off packing of weights, or run on another device",
        )
    left_out: list[str] = []
    allowed: list[int] = []
    for tensor, spec in enumerate(layout.tensors):
        if tensor in dense or spec.elements == 0:
            continue
        covered = count_disjoint(held.get(tensor, ()))
        if covered is None:
            dense[tensor] = "cut differently on different ranks"
        elif covered == 0 and _matches((spec.name, *spec.aliases), unused):
            allowed.append(tensor)
        elif covered != spec.elements:
            left_out.append(f"{spec.name} ({covered} of {spec.elements} elements)")
    _refuse(left_out, "tensors of the layout are not held by this engine", "unused")
    missing = {str(name): int(lacks) for part in parts for name, lacks in part["unfilled"]}
    bad = [f"{n} ({lacks} elements)" for n, lacks in missing.items() if not _matches([n], unfilled)]
    _refuse(bad, "parameters of the engine are filled by no tensor", "unfilled")
    report = CoverageReport(
        layout,
        placed=sum(tensor not in dense for tensor in held),
        dense=dict(sorted(dense.items())),
        unused=tuple(allowed),
        unfilled=tuple(sorted(missing)),
    )
    if report.dense_share > MAX_DENSE_SHARE and not allow_dense:
        names = [f"{layout.tensors[t].name} ({why})" for t, why in report.dense.items()]
        raise InvalidInputError(
            f"{100 * report.dense_share:.1f} % of the weights cannot be written in place:"
            f" {list_names(names)}",
            kind=Kind.COVERAGE,
            hint="allow_dense keeps them in host memory and reloads their modules at every version",
        )
    return report


def _refuse(names: Sequence[str], what: str, setting: str) -> None:
    if names:
        raise InvalidInputError(
            f"{len(names)} {what}: {list_names(names)}",
            kind=Kind.COVERAGE,
            hint=f"if that is right, name them in the setting {setting}",
        )


def _matches(names: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _unfilled(trace: LoaderTrace, module: torch.nn.Module) -> list[list[Any]]:
    """Runtime parameters with elements that no tensor and no constant fills, and how many."""
    by_name: dict[str, list[Reach]] = {}
    for reach in trace.reaches:
        for parameter in reach.parameters:
            by_name.setdefault(parameter, []).append(reach)
    seen = {
        name: parameter.detach()
        for name, parameter in module.named_parameters()
        if name not in trace.forms and name not in trace.computed
    }
    seen.update((name, form.detach()) for name, form in trace.forms.items())
    lacking: list[list[Any]] = []
    for name, tensor in seen.items():
        place = memory_of(tensor) if tensor.numel() else None
        reaches = by_name.get(name, [])
        if place is None or any(reach.place is None for reach in reaches):
            continue
        lacks = place.elements - _filled(place, reaches)
        if lacks:
            lacking.append([name, lacks // tensor.element_size()])
    return lacking


def _filled(place: Strided, reaches: Sequence[Reach]) -> int:
    """How many bytes of a parameter the loader writes."""
    inside = [r for r in reaches if r.place is not None and overlap(r.place, place)]
    for chosen in ([r for r in inside if not r.padding], inside):
        count = count_disjoint(r.place for r in chosen if r.place is not None)
        if count is not None and count >= place.elements:
            return place.elements
    if count is not None:
        return count
    marks = np.zeros(place.end - place.offset, np.bool_)
    for reach in inside:
        if reach.place is not None:
            _window(marks, reach.place, place.offset)[...] = True
    return int(_window(marks, place, place.offset).sum())


def _window(marks: Any, place: Strided, origin: int) -> Any:
    return np.lib.stride_tricks.as_strided(
        marks[place.offset - origin :], place.sizes, place.strides
    )


class _Joined:
    """Disjoint sets of names."""

    def __init__(self) -> None:
        self.names: dict[object, object] = {}

    def root(self, name: object) -> object:
        """The name that stands for the whole set."""
        self.names.setdefault(name, name)
        while self.names[name] != name:
            self.names[name] = self.names[self.names[name]]
            name = self.names[name]
        return name

    def join(self, first: object, second: object) -> None:
        """Make one set of two."""
        self.names[self.root(second)] = self.root(first)
