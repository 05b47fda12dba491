"""The memory twin keeps every promise of the protocol."""

from __future__ import annotations

import pytest

from deltastore.coordination.memory import MemoryCoordination
from deltastore.testing.clock import FakeClock
from deltastore.testing.coordination import CoordinationTests
from deltastore.testing.fleet import Fleet


class TestMemory(CoordinationTests):
    """The shared suite on the memory twin."""

    @pytest.fixture
    def fleet(self) -> Fleet:
        """A fresh twin on a clock that only the test moves."""
        clock = FakeClock()
        return Fleet(MemoryCoordination(clock), clock.advance_s)
