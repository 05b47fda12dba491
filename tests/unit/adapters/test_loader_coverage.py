"""Nothing is left out: over all ranks everything is placed, dense-only, or named by somebody."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from deltastore.adapters.loader_coverage import (
    CoverageReport,
    closures,
    local_coverage,
    require_coverage,
)
from deltastore.adapters.loader_memory import FREED
from deltastore.adapters.loader_verify import demote
from deltastore.errors import IntegrityError, InvalidInputError, Kind
from tests.unit.adapters.loader_kit import Engine, layout_of, reasons, traced, zeros

if TYPE_CHECKING:
    from deltastore.format.layout import Layout
    from tests.unit.adapters.loader_kit import Weights


def copy_named(engine: torch.nn.Module, weights: Weights) -> None:
    """A loader that skips in silence what it does not know."""
    known = dict(engine.named_parameters())
    for name, weight in weights:
        if name in known:
            known[name].data.copy_(weight)


def cover(engine: Engine, layout: Layout, **options: Any) -> CoverageReport:
    """The report on an engine of one rank."""
    part = local_coverage(traced(engine, layout), layout, engine)
    return require_coverage(layout, [json.loads(json.dumps(part))], **options)


def sliced(rank: int, rows: int, **parameters: torch.Tensor) -> Engine:
    """One rank of two: `w` by rows, everything else whole."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for name, weight in weights:
            taken = weight.narrow(0, rank * rows, rows) if name == "w" else weight
            getattr(engine, name).data.copy_(taken)

    return Engine(load, w=zeros(rows, 3), **parameters)


def test_an_unmatched_name_is_refused_by_name() -> None:
    """CASE R9: a tensor that no parameter takes stops the start, unless a pattern names it."""
    layout = layout_of({"a": (3,), "mtp.b": (3,), "mtp.c": (3,)})
    engine = Engine(copy_named, a=zeros(3))
    with pytest.raises(InvalidInputError, match=r"2 tensors.*'mtp.b.*'mtp.c") as caught:
        cover(engine, layout)
    assert caught.value.kind is Kind.COVERAGE
    report = cover(engine, layout, unused=["mtp.*"])
    assert report.unused == (1, 2)


def test_a_parameter_that_nothing_fills_is_refused_by_name() -> None:
    """CASE R9: a runtime parameter, or a part of one, that no tensor fills stops the start."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for _, weight in weights:
            engine.a.data[:3].copy_(weight)

    layout = layout_of({"a": (3, 2)})
    engine = Engine(load, a=zeros(5, 2), b=zeros(7))
    with pytest.raises(InvalidInputError, match=r"'a \(4 elements\)', 'b \(7 elements\)'"):
        cover(engine, layout)
    assert cover(engine, layout, unfilled=["a", "b"]).unfilled == ("a", "b")


@pytest.mark.parametrize("order", ["after", "before", "overlapping"])
def test_constants_of_the_loader_fill_parameters(order: str) -> None:
    """Padding rows are filled whether they are cleared before, after, or with all others."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for _, weight in weights:
            if order == "before":
                engine.a.data.fill_(0)
            elif order == "overlapping":
                engine.a.data[2:].zero_()
            engine.a.data[:3].copy_(weight)
            if order == "after":
                engine.a.data[3:].copy_(torch.zeros(2, 2))

    report = cover(Engine(load, a=zeros(5, 2)), layout_of({"a": (3, 2)}))
    assert report.placed == 1
    assert report.dense == {}


def test_ranks_cover_a_tensor_together() -> None:
    """Slices of two ranks and copies on both are whole; one rank alone is not."""
    layout = layout_of({"w": (4, 3), "n": (3,)})
    parts = []
    for rank in range(2):
        engine = sliced(rank, 2, n=zeros(3))
        parts.append(local_coverage(traced(engine, layout), layout, engine))
    assert require_coverage(layout, parts).placed == 2
    with pytest.raises(InvalidInputError, match=r"w \(6 of 12 elements\)"):
        require_coverage(layout, parts[:1])


def test_cuts_that_overlap_between_ranks_are_dense_only() -> None:
    """Fingerprints cannot be summed over them: dense-only on every rank that holds the tensor."""
    layout = layout_of({"w": (4, 3)})
    engines = [sliced(0, 3), sliced(1, 1)]
    engines[1].loader = lambda engine, weights: [engine.w.data.copy_(w[2:3]) for _, w in weights]
    parts = [local_coverage(traced(one, layout), layout, one) for one in engines]
    report = require_coverage(layout, parts, allow_dense=True)
    assert report.dense == {0: "cut differently on different ranks"}
    demoted = demote(traced(engines[1], layout), report.dense)
    assert reasons(demoted, layout) == {"w": "cut differently on different ranks"}
    assert demoted.placements == ()


def test_dense_only_on_one_rank_is_so_for_the_engine() -> None:
    """A tensor that one rank must reload has no placements on the others either."""
    layout = layout_of({"w": (4, 3)})
    first, second = sliced(0, 2), sliced(1, 2)
    parts = [
        local_coverage(demote(traced(first, layout), {0: "repacked"}), layout, first),
        local_coverage(traced(second, layout), layout, second),
    ]
    assert require_coverage(layout, parts, allow_dense=True).dense == {0: "repacked"}


def test_a_large_dense_share_is_refused_unless_allowed() -> None:
    """More than 5 % of the bytes in reloads is a decision that somebody must take."""
    layout = layout_of({"w": (400,), "s": (100,)})

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for name, weight in weights:
            getattr(engine, name).data.copy_(weight if name == "w" else weight * 2)

    engine = Engine(load, w=zeros(400), s=zeros(100))
    with pytest.raises(InvalidInputError, match=r"20\.0 %.*s \(computed by mul\)"):
        cover(engine, layout)
    report = cover(engine, layout, allow_dense=True)
    assert report.dense_share == 0.2
    assert report.dense == {1: "computed by mul"}


def test_a_freed_weight_is_refused_even_as_dense_only() -> None:
    """What the engine has freed no reload brings back: an update would never arrive."""
    layout = layout_of({"a": (3, 2), "b": (3,)})
    engine = Engine(copy_named, a=zeros(3, 2), b=zeros(3))
    engine.a = torch.nn.Parameter(zeros(0), requires_grad=False)
    form = torch.nn.Parameter(torch.empty(3, 2, dtype=torch.bfloat16, device="meta"))
    trace = traced(engine, layout, forms={"a": form})
    assert reasons(trace, layout) == {"a": FREED}
    assert engine.a.numel() == 0
    part = local_coverage(trace, layout, engine)
    with pytest.raises(InvalidInputError, match="'a'"):
        require_coverage(layout, [part], allow_dense=True)


def test_a_parameter_in_another_form_is_dense_only() -> None:
    """A loader runs on the form that it knows; the parameter and its bytes stay."""
    layout = layout_of({"a": (3, 2)})
    engine = Engine(copy_named, a=zeros(2, 4))
    live = engine.a
    form = torch.nn.Parameter(torch.empty(3, 2, dtype=torch.bfloat16, device="meta"))
    trace = traced(engine, layout, forms={"a": form})
    assert engine.a is live
    assert reasons(trace, layout) == {"a": "kept in another form after loading"}
    part = local_coverage(trace, layout, engine)
    report = require_coverage(layout, [part], allow_dense=True)
    assert report.dense == trace.dense_only


def test_a_weight_that_others_are_derived_from_is_dense_only() -> None:
    """Written in place it would leave them stale: it is told to the trace by its module."""
    layout = layout_of({"inner.a": (3,), "b": (3,)})
    engine = Engine(copy_named, b=zeros(3))
    engine.inner = Engine(copy_named, a=zeros(3))
    trace = traced(engine, layout, derived={"inner": "products are kept"})
    assert reasons(trace, layout) == {"inner.a": "products are kept"}


def test_a_closure_holds_all_tensors_of_its_modules() -> None:
    """Siblings of a dense-only tensor are reloaded with it; other modules are left alone."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for name, weight in weights:
            module, key = name.split(".")
            target = getattr(engine, module).w.data
            if key in "qkv":
                target = target["qkv".index(key)]
            target.copy_(weight * 2 if name == "one.k" else weight)
            if name == "one.v":
                engine.tied.w.data.copy_(weight)

    names = ("one.q", "one.k", "one.v", "two.q", "two.k", "two.v")
    layout = layout_of({**dict.fromkeys(names, (3,)), "tied.w": (3,), "free.w": (3,)})
    engine = Engine(load)
    for module in ("one", "two"):
        setattr(engine, module, Engine(load, w=zeros(3, 3)))
    engine.tied = Engine(load, w=zeros(3))
    engine.free = Engine(load, w=zeros(3))
    trace = traced(engine, layout)
    (group,) = closures(trace, layout)
    assert group.modules == ("one", "tied")
    assert group.tensors == (0, 1, 2, 6)


def test_a_rank_with_another_layout_is_refused() -> None:
    """Positions of one layout mean nothing in another."""
    layout = layout_of({"a": (3,)})
    engine = Engine(copy_named, a=zeros(3))
    part = local_coverage(traced(engine, layout), layout, engine)
    with pytest.raises(IntegrityError) as caught:
        require_coverage(layout_of({"a": (4,)}), [part])
    assert caught.value.kind is Kind.LAYOUT_MISMATCH
