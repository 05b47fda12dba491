"""A bundle applies to exactly the state it was made from."""

from __future__ import annotations

import io

import numpy as np
import pytest

from deltastore.chain.apply import apply_blocks
from deltastore.chain.diff import diff_tensor
from deltastore.errors import DeltastoreError, FormatError, IntegrityError, Kind
from deltastore.format.bundle import BUNDLE_FORMAT, MAGIC, Bundle
from deltastore.format.canonical import canonical_json
from deltastore.format.dtypes import DType
from deltastore.format.layout import Layout, TensorEntry
from deltastore.format.mixing import fingerprint_state
from tests.unit.pipeline.harness import ENTRIES, change_some, random_state


@pytest.fixture
def made():
    """Two states and the bundle between them."""
    layout = Layout.build(ENTRIES)
    base = random_state(layout, 1)
    new = base.copy()
    change_some(new, np.random.default_rng(3), 0.1)
    groups = (
        list(diff_tensor(layout, i, base.arrays[i], new.arrays[i])) for i in range(len(layout))
    )
    bundle = Bundle.of(layout, fingerprint_state(base), (g for g in groups if g))
    return layout, base, new, bundle


def test_bundle_turns_base_into_new(made):
    """Reading a bundle back and applying it gives the other state, bit for bit."""
    layout, base, new, bundle = made
    again = Bundle.from_bytes(bundle.to_bytes())
    apply_blocks(base, again.blocks(layout))
    assert base.equals(new)
    assert fingerprint_state(new) == again.after


def test_empty_bundle():
    """Equal states make a valid bundle without segments."""
    layout = Layout.build(ENTRIES)
    state = random_state(layout, 1)
    bundle = Bundle.from_bytes(Bundle.of(layout, fingerprint_state(state), iter(())).to_bytes())
    assert (bundle.before, bundle.nnz, bundle.blocks(layout)) == (bundle.after, 0, [])


def test_other_layout_is_refused(made):
    """A bundle of another architecture is refused before anything is decoded."""
    other = Layout.build([TensorEntry("a", DType.BF16, (2,))])
    with pytest.raises(IntegrityError) as err:
        made[3].blocks(other)
    assert err.value.kind is Kind.LAYOUT_MISMATCH


def test_truncated_and_flipped_everywhere(made):
    """A bundle cut at any byte, or with any byte flipped, is a typed error and never accepted."""
    layout, *_, bundle = made
    data = bundle.to_bytes()
    for at in range(len(data)):
        with pytest.raises(FormatError if at < 12 else DeltastoreError):
            Bundle.from_bytes(data[:at])
    core_end = 12 + int.from_bytes(data[8:12], "little")
    for at in [*range(core_end + 40), *range(core_end, len(data), 7)]:
        bad = bytearray(data)
        bad[at] ^= 1
        with pytest.raises(DeltastoreError):
            Bundle.from_bytes(bytes(bad)).blocks(layout)


def test_trailing_bytes_are_refused(made):
    """Bytes after the last segment are an error."""
    with pytest.raises(FormatError) as err:
        Bundle.from_bytes(made[3].to_bytes() + b"x")
    assert err.value.kind is Kind.TRAILING


class _Counted(io.BytesIO):
    """A file that counts what is read of it."""

    read_bytes = 0

    def read(self, size=-1):
        """A read, counted; nothing may ask for all there is."""
        assert size is not None
        assert size >= 0
        got = super().read(size)
        self.read_bytes += len(got)
        return got


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([], Kind.TRAILING),
        ([[1 << 40, "0" * 64]], Kind.TRUNCATED),
        ([[5000, "0" * 64], [5001, "0" * 64]], Kind.TRUNCATED),
        ([[5000, "0" * 64], [5000, "0" * 64]], Kind.DIGEST),
    ],
)
def test_a_file_that_only_begins_as_a_bundle_is_not_read(rows, kind):
    """Whatever follows a core is read only if it is as long as the core says, and up to the first
    segment that is damaged."""
    core = canonical_json(
        {
            "format": BUNDLE_FORMAT,
            "layout_digest": "0" * 64,
            "fingerprint_before": "0" * 32,
            "fingerprint_after": "0" * 32,
            "nnz": 0,
            "segments": rows,
        }
    )
    head = MAGIC + len(core).to_bytes(4, "little") + core
    file = _Counted(head + bytes(10_000))
    with pytest.raises(DeltastoreError) as err:
        Bundle.read(file, len(head) + 10_000)
    assert err.value.kind is kind
    assert file.read_bytes == len(head) + (5000 if kind is Kind.DIGEST else 0)
