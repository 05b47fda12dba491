"""Whatever is done to a run, another whole region brings it back byte for byte."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hypothesis import assume, given
from hypothesis import strategies as st

from deltastore.format.keys import KeyKind, parse_key
from deltastore.maintenance.repair import mend_run
from deltastore.testing.clock import FakeClock
from tests.unit.maintenance.conftest import FULL_AT, HEAD, NAME, make_copy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltastore.maintenance.findings import Report
    from tests.unit.maintenance.conftest import Copy

BODIES = {KeyKind.SEGMENT, KeyKind.ANCHOR_FILE, KeyKind.VERSION}


@given(data=st.data())
def test_any_damage_is_mended(whole: Mapping[str, bytes], data: st.DataObject) -> None:
    """Several objects deleted, cut or with a flipped bit, manifests next to each other among them:
    one repair from a whole region restores every byte, and a check finds nothing."""
    newest = f"{NAME}/versions/{HEAD:010d}.json"  # nothing above vouches for that one
    keys = sorted(k for k in whole if parse_key(k).kind in BODIES and k != newest)
    damaged = make_copy(whole)
    drawn = data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=5, unique=True))
    # Without all that is below the full version 3 this is a region that was restarted: not damaged.
    below = {f"{NAME}/versions/{version:010d}.json" for version in range(FULL_AT)}
    assume(not below <= set(drawn))
    for key in drawn:
        _damage(damaged, key, whole[key], data)
    report = _mend(damaged, make_copy(whole))
    assert (report.findings, report.replayed) == ((), HEAD + 1)
    assert {i.key: damaged.store.get(i.key) for i in damaged.store.list("")} == whole


@given(data=st.data())
def test_a_source_that_is_damaged_too(whole: Mapping[str, bytes], data: st.DataObject) -> None:
    """Two damaged regions: what one has whole comes back in the other, what neither has is never
    replaced by other wrong bytes."""
    keys = sorted(k for k in whole if parse_key(k).kind in BODIES - {KeyKind.VERSION})
    copies = (make_copy(whole), make_copy(whole))
    hurt: list[set[str]] = []
    for one in copies:
        drawn = data.draw(st.lists(st.sampled_from(keys), max_size=4, unique=True))
        for key in drawn:
            _damage(one, key, whole[key], data)
        hurt.append(set(drawn))
    before = {key: _read(copies[0], key) for key in hurt[0]}
    _mend(*copies)
    for key in hurt[0]:
        expected = before[key] if key in hurt[1] else whole[key]
        assert _read(copies[0], key) == expected
    untouched = set(keys) - hurt[0]
    assert {key: _read(copies[0], key) for key in untouched} == {k: whole[k] for k in untouched}


def _mend(copy: Copy, source: Copy) -> Report:
    """Repair as the command does; the last report."""
    run, clock = copy.run(), FakeClock()
    check = partial(copy.check, deep=True)
    report, _done = mend_run(run, check(), source.run(), check=check, clock=clock, streams=2)
    return report


def _read(copy: Copy, key: str) -> bytes | None:
    found = [info for info in copy.store.list(key) if info.key == key]
    return copy.store.get(key) if found else None


def _damage(copy: Copy, key: str, body: bytes, data: st.DataObject) -> None:
    how = data.draw(st.sampled_from(["delete", "cut", "flip"]), label="how")
    if how == "delete":
        copy.store.delete([key])
        return
    place = data.draw(st.integers(0, len(body) - 1), label="byte")
    if how == "cut":
        copy.write(key, body[:place])
        return
    flipped = bytearray(body)
    flipped[place] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    copy.write(key, bytes(flipped))
