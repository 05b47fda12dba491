"""An engine starts on the newest version, and finds its keys where AWS tools look."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from deltastore.adapters.safetensors_dir import checkpoint_layout, load_state, scan_checkpoint
from deltastore.clock import SystemClock
from deltastore.errors import IntegrityError, InvalidInputError
from deltastore.format.mixing import fingerprint_state
from deltastore.pipeline.engine_control import ControlBounds
from deltastore.pipeline.host import HostSource
from deltastore.pipeline.publisher import Publisher
from deltastore.repository.run import create_run
from deltastore.storage.memory import MemoryStore
from deltastore.testing.checkpoints import tiny_checkpoint
from workers.actor.vllm_start import fetch_checkpoint, live_fingerprint
from workers.config import RegionConfig
from workers.wiring import lend_credentials

if TYPE_CHECKING:
    from pathlib import Path

CLOCK = SystemClock()


def test_without_a_checkpoint_the_newest_version_is_fetched(tmp_path: Path) -> None:
    """The folder holds HEAD's bits and the run's other files; an older start's folder is gone."""
    checkpoint = scan_checkpoint(tiny_checkpoint(tmp_path / "v0"))
    layout = checkpoint_layout(checkpoint)
    state = load_state(checkpoint, layout)
    run = create_run(
        MemoryStore(),
        "r",
        layout=layout,
        files=checkpoint.files,
        fingerprint=fingerprint_state(state),
        clock=CLOCK,
        probe=False,
    )
    publisher = Publisher.open(run, HostSource(state), clock=CLOCK)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    first = fetch_checkpoint(run, scratch, clock=CLOCK)
    state.arrays[0][:5] ^= 1
    publication = publisher.publish(1)
    assert publication is not None
    publication.result(60)
    publisher.close()
    start = fetch_checkpoint(run, scratch, clock=CLOCK)
    assert load_state(scan_checkpoint(start.folder), layout).equals(state)
    assert (start.folder / "config.json").exists()
    assert not first.folder.exists()
    assert start.report is not None
    assert start.report.size_bytes > 0


class Ranks:
    """Answers of an engine's ranks."""

    bounds = ControlBounds()

    def __init__(self, *answers: str) -> None:
        self._answers = answers

    def call_ranks(self, method: str, within_s: float) -> list[str]:
        """What every rank says."""
        assert method == "deltastore_fingerprint"
        return list(self._answers)


def test_ranks_must_agree_on_the_fingerprint_of_their_weights() -> None:
    """One fingerprint of the whole engine, or an error that shows which there were."""
    assert str(live_fingerprint(Ranks("ab" * 16, "ab" * 16))) == "ab" * 16  # type: ignore[arg-type]
    with pytest.raises(IntegrityError, match="cdcd"):
        live_fingerprint(Ranks("ab" * 16, "cd" * 16))  # type: ignore[arg-type]


def test_an_engine_finds_the_regions_keys_where_aws_tools_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Named variables are lent under the names that an engine's processes know; none, nothing."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "EAST_KEY", "EAST_SECRET"):
        monkeypatch.setenv(name, f"of {name}")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of other keys")
    lend_credentials(RegionConfig("east", "s3://b"))
    assert os.environ["AWS_ACCESS_KEY_ID"] == "of AWS_ACCESS_KEY_ID"
    named = {"access_key_env": "EAST_KEY", "secret_key_env": "EAST_SECRET"}
    lend_credentials(RegionConfig("east", "s3://b", **named))
    assert os.environ["AWS_ACCESS_KEY_ID"] == "of EAST_KEY"
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "of EAST_SECRET"
    assert "AWS_SESSION_TOKEN" not in os.environ
    monkeypatch.delenv("EAST_SECRET")
    with pytest.raises(InvalidInputError, match="EAST_SECRET"):
        lend_credentials(RegionConfig("east", "s3://b", **named))
