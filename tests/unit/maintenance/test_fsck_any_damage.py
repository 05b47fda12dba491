"""Whatever is done to whatever object of a run, the deep check finds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from deltastore.format.keys import KeyKind, parse_key
from tests.unit.maintenance.conftest import FULL_AT, HEAD, Copy, make_copy

if TYPE_CHECKING:
    from collections.abc import Mapping


@given(data=st.data())
def test_any_damage_to_a_body_is_found(whole: Mapping[str, bytes], data: st.DataObject) -> None:
    """Whatever segment or file is deleted, cut or has a bit flipped: the deep check names it, and
    replays every version up to it and from the next full one on."""
    key = _draw_key(whole, data, {KeyKind.SEGMENT, KeyKind.ANCHOR_FILE})
    copy = make_copy(whole)
    _damage(copy, key, whole[key], data)
    report = copy.check(deep=True)
    version = parse_key(key).version
    assert version is not None
    assert [f.key for f in report.findings] == [key, None]
    assert HEAD + 1 - report.replayed == _lost_with(version)


@given(data=st.data())
def test_any_damage_to_a_manifest_is_found(whole: Mapping[str, bytes], data: st.DataObject) -> None:
    """Whatever version manifest is deleted, cut or has a bit flipped, the check says so, and which:
    the history above vouches for it, for the newest one the hint does."""
    key = _draw_key(whole, data, {KeyKind.VERSION})
    copy = make_copy(whole)
    _damage(copy, key, whole[key], data)
    report = copy.check(deep=True)
    version = parse_key(key).version
    assert version is not None
    assert version in {f.version for f in report.findings}
    if version < HEAD:
        assert not report.ok
        assert HEAD + 1 - report.replayed == _lost_with(version)


def _lost_with(version: int) -> int:
    end = FULL_AT if version < FULL_AT else HEAD + 1  # a full version is a new start
    return end - version


def _draw_key(whole: Mapping[str, bytes], data: st.DataObject, kinds: set[KeyKind]) -> str:
    keys = sorted(key for key in whole if parse_key(key).kind in kinds)
    return data.draw(st.sampled_from(keys), label="key")


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
