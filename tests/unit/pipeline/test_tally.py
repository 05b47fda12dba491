"""Numbers of many ranks are joined the same way everywhere, and bad ones are refused."""

from __future__ import annotations

import numpy as np
import pytest

from deltastore.errors import ApplyError, FormatError, IntegrityError, Kind
from deltastore.format.dtypes import DType
from deltastore.format.fingerprint import Fingerprint
from deltastore.format.layout import Layout, TensorEntry
from deltastore.pipeline.ballot import MAX_LINE_BYTES, Ballot, Round, out_of_step, troubles
from deltastore.pipeline.group import SoloGroup, ThreadGroup
from deltastore.pipeline.tally import ROW, Sums, empty_tally, shape_digest, tally_of

LAYOUT = Layout.build(TensorEntry(f"t{i}", DType.BF16, (8,)) for i in range(4))
TOP = (1 << 64) - 1


def rows(*given):
    """A tally of (tensor, shape, offset, low, high)."""
    return np.array(list(given), ROW)


def test_regions_add_up_and_copies_count_once():
    """Different regions of a tensor are summed, modulo 2^64; the same one of two ranks is one."""
    one = rows((1, 5, 0, TOP, 1), (2, 5, 0, 7, 7))
    two = rows((1, 5, 4, 3, 1), (2, 5, 0, 7, 7))
    sums = Sums.joined(LAYOUT, [one, two])
    assert sums.of(1) == Fingerprint(2, 2)
    assert sums.of(2) == Fingerprint(7, 7)
    assert sums.of(0) is None
    assert sums.total() == Fingerprint(9, 9)


def test_copies_that_differ_in_either_lane_are_an_error():
    """Two holders of one region with other numbers are named, in one rank or in two."""
    for other in (rows((3, 5, 0, 1, 2)), rows((3, 5, 0, 2, 1))):
        with pytest.raises(IntegrityError, match="t3") as caught:
            Sums.joined(LAYOUT, [rows((3, 5, 0, 1, 1)), other])
        assert caught.value.kind is Kind.ALIAS_DRIFT


def test_regions_of_other_shapes_are_no_copies():
    """Sizes and strides tell regions with one first element apart."""
    assert shape_digest((2, 3), (3, 1)) != shape_digest((3, 2), (3, 1))
    assert shape_digest((6,), (1,)) != shape_digest((6,), (2,))
    sums = Sums.joined(LAYOUT, [rows((0, 1, 0, 1, 0), (0, 2, 0, 2, 0))])
    assert sums.of(0) == Fingerprint(3, 0)


def test_tensors_that_declare_something_else_are_named():
    """A held tensor with another sum, or that nobody declared, is found; one not held is not."""
    declared = Sums(np.array([0, 1, 3], np.uint32), *(np.array([4, 5, 6], np.uint64),) * 2)
    held = Sums(np.array([0, 1, 2], np.uint32), *(np.array([4, 0, 0], np.uint64),) * 2)
    assert held.unlike(declared) == [1, 2]
    nothing = Sums.declared([])
    assert held.unlike(nothing) == [0, 1, 2]
    assert Sums.joined(LAYOUT, []).unlike(declared) == []


def test_tensors_that_do_not_exist_are_refused():
    """A rank of another layout cannot be counted."""
    with pytest.raises(FormatError):
        Sums.joined(LAYOUT, [rows((4, 5, 0, 1, 1))])


def test_a_ballot_comes_back_as_it_was():
    """What travels is what was said."""
    tally = rows((1, TOP, -1, TOP, 0))
    said = Ballot(Round.VERIFY, "a", "b", "schön \n no", poisoned=True, tally=tally)
    read = Ballot.from_bytes(said.to_bytes())
    assert (read.round, read.base, read.target) == (Round.VERIFY, "a", "b")
    assert (read.trouble, read.poisoned) == ("schön \n no", True)
    assert np.array_equal(read.tally, tally)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"{}\n",
        b"x" * (MAX_LINE_BYTES + 1) + b"\n",
        Ballot(Round.WHOLE, "", "").to_bytes().replace(b"whole", b"party"),
        Ballot(Round.WHOLE, "", "").to_bytes().replace(b"false", b"0"),
        Ballot(Round.WHOLE, "", "").to_bytes() + b"x",
    ],
)
def test_what_is_no_ballot_is_refused(text):
    """Anything else than a whole ballot is a FormatError."""
    with pytest.raises(FormatError):
        Ballot.from_bytes(text)


def test_rows_are_whole_or_refused():
    """Half a row is no row."""
    assert tally_of(b"").size == 0
    assert np.array_equal(tally_of(empty_tally(2).tobytes()), empty_tally(2))
    with pytest.raises(FormatError):
        tally_of(bytes(ROW.itemsize + 1))


def test_words_for_what_is_wrong_name_ranks_and_are_bounded():
    """Thousands of ranks with a trouble each make one sentence."""
    many = [Ballot(Round.VERIFY, "", "", f"trouble {i}") for i in range(2000)]
    assert troubles(many).startswith("rank 0: trouble 0; rank 1: trouble 1")
    assert len(troubles(many)) < 500
    assert troubles([Ballot(Round.VERIFY, "", "")]) == ""
    apart = [Ballot(Round.VERIFY, "a", "b"), Ballot(Round.VERIFY, "a", "c")]
    assert "rank 1" in out_of_step(apart)
    assert out_of_step(apart[:1]) == ""


def test_a_long_trouble_still_fits_a_ballot():
    """An error of a megabyte is cut, so that the vote goes on."""
    assert len(Ballot(Round.VERIFY, "", "", "x" * 1_000_000).to_bytes()) < MAX_LINE_BYTES
    wide = Ballot(Round.VERIFY, "", "", "\N{SNOWMAN}" * 1_000_000).to_bytes()
    assert Ballot.from_bytes(wide).trouble


def test_a_solo_group_hears_itself():
    """One rank is a group."""
    assert SoloGroup().exchange(b"x") == [b"x"]
    SoloGroup().renew()


def test_who_waits_for_a_rank_that_left_is_told():
    """The ranks that are missing are named."""
    one, two = ThreadGroup.of(2)
    two.leave()
    with pytest.raises(ApplyError, match="1") as caught:
        one.exchange(b"x")
    assert caught.value.kind is Kind.VOTE_TIMEOUT
