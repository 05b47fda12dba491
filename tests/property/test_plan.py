"""The planner is as good as trying everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.chain.plan import Link, cheapest_plan
from deltastore.errors import Kind, NotFoundError

TOP = 7
links = st.lists(
    st.builds(
        Link,
        base=st.none() | st.integers(0, TOP - 1),
        version=st.integers(0, TOP),
        cost=st.integers(0, 50).map(float),
    ).filter(lambda link: link.base is None or link.base < link.version),
    max_size=14,
)


def _best(held, target, choices):
    """Every way from the top down, by brute force."""
    if held == target:
        return 0.0
    costs = []
    for link in choices:
        if link.version == target:
            before = 0.0 if link.base is None else _best(held, link.base, choices)
            if before is not None:
                costs.append(before + link.cost)
    return min(costs, default=None)


@given(held=st.none() | st.integers(0, TOP), target=st.integers(0, TOP), choices=links)
def test_plan_is_cheapest_and_connected(held, target, choices):
    """Any plan costs what the best of all ways costs and its links join up; else there is none."""
    best = _best(held, target, choices)
    if best is None:
        with pytest.raises(NotFoundError) as err:
            cheapest_plan(held, target, choices)
        assert err.value.kind is Kind.VERSION_MISSING
        return
    plan = cheapest_plan(held, target, choices)
    assert plan.cost == best == sum(link.cost for link in plan.links)
    at = held if plan.starts_from_held else None
    for link in plan.links:
        assert link.base == at
        at = link.version
    assert at == target


def test_tie_takes_fewer_links():
    """Of two ways of equal cost the one with fewer requests is taken."""
    choices = [Link(0, 1, 1.0), Link(1, 2, 1.0), Link(0, 2, 2.0)]
    assert [link.version for link in cheapest_plan(0, 2, choices).links] == [2]
