"""Stores and rivals that misbehave: what the command says when it is not alone or not obeyed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from deltastore.adapters.safetensors_dir import DirectorySource, scan_checkpoint
from deltastore.cli import connection
from deltastore.clock import SystemClock
from deltastore.errors import Kind, LeaseError
from deltastore.pipeline.publisher import Publisher
from deltastore.repository.run import open_run
from deltastore.storage.store import PutMode, PutOutcome
from deltastore.storage.wrapper import StoreWrapper
from deltastore.testing.clock import FakeClock
from tests.integration.cli.cli_kit import Cli, publish_three, tensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deltastore.storage.store import Body, ObjectStore


@pytest.fixture
def wrap_stores(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Makes the command see its stores through a wrapper."""
    real = connection.open_observed

    def install(wrapper: Callable[[ObjectStore], ObjectStore]) -> None:
        monkeypatch.setattr(
            connection, "open_observed", lambda *args, **kwargs: wrapper(real(*args, **kwargs))
        )

    return install


def test_store_without_create_only(
    files: Cli, old: Path, wrap_stores: Callable[[Any], None]
) -> None:
    """CASE S2: a store that ignores create-only puts is refused as home, and no run is made."""
    wrap_stores(_Careless)
    error = files.error(5, "no_conditional_put", "init", files.url("r1"), "--checkpoint", old)
    assert files.root_url in error["message"]
    assert [info.key for info in files.store().list("")] == []


def test_publish_takes_over(files: Cli, old: Path, new: Path, newer: Path) -> None:
    """CASE L1: after `publish` a trainer that was publishing meets a lease error at its next
    version, and its state is not in the run."""
    url = files.url("r1")
    files.json("init", url, "--checkpoint", old)
    run = open_run(files.store(), "r1")
    trainer = Publisher.open(
        run, DirectorySource(scan_checkpoint(new)), clock=SystemClock(), step=1
    )
    files.json("publish", url, newer, "--step", "2")
    late = trainer.publish(3)
    assert late is not None
    with pytest.raises(LeaseError) as caught:
        late.result(60)
    trainer.close()
    assert caught.value.kind is Kind.FOREIGN_WRITER
    document = files.json("verify", url, "--deep")
    assert (document["head"], document["findings"]) == (2, [])


def test_publish_loses_the_race(
    files: Cli,
    old: Path,
    new: Path,
    newer: Path,
    tmp_path: Path,
    wrap_stores: Callable[[Any], None],
) -> None:
    """CASE C7: when another writer commits the version first, `publish` says so and exits with 8;
    the version is the other's."""
    url = files.url("r1")
    files.json("init", url, "--checkpoint", old)
    rival = _Rival(lambda: files.json("publish", url, new, "--step", "1"))
    wrap_stores(rival.watch)
    result = files.run("publish", url, newer, "--step", "1")
    assert result.exit_code == 8, result.output
    assert result.stderr.startswith("deltastore: foreign_writer: ")
    assert rival.came
    files.json("replay", url, "--version", "1", "--out", tmp_path / "c")
    assert tensors(tmp_path / "c") == tensors(new)


def test_store_down(
    bucket: Cli, old: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A store that does not answer is retried on a schedule, then named with exit code 5."""
    clock = FakeClock()
    monkeypatch.setattr(connection, "SystemClock", lambda: clock)
    nobody = Cli(
        bucket.root_url,
        (*bucket.options[2:], "--endpoint-url", "http://127.0.0.1:9"),
        env=bucket.env,
    )
    error = nobody.error(5, "unavailable", "log", nobody.url("r1"))
    assert "http://127.0.0.1:9" in error["message"]
    assert len(clock.slept_s) > 4


def test_object_lost_under_a_reader(
    files: Cli, old: Path, new: Path, newer: Path, tmp_path: Path
) -> None:
    """A body that is gone is named by `replay`, and nothing is written."""
    url = publish_three(files, old, new, newer)
    key = files.json("show", url, "--version", "2")["segments"][0]["key"]
    files.store().delete([key])
    error = files.error(3, "object_missing", "replay", url, "--out", tmp_path / "c")
    assert error["key"] == key
    assert not (tmp_path / "c").exists()
    files.json("replay", url, "--version", "1", "--out", tmp_path / "c")
    assert tensors(tmp_path / "c") == tensors(new)


class _Careless(StoreWrapper):
    """A store that takes create-only puts for plain ones."""

    def put(self, key: str, body: Body, *, mode: PutMode, sha256: str | None = None) -> PutOutcome:
        return super().put(key, body, mode=PutMode.OVERWRITE, sha256=sha256)


class _Rival:
    """Another writer that comes just before the first version manifest is put."""

    def __init__(self, publish: Callable[[], object]) -> None:
        self._publish = publish
        self.came = False

    def watch(self, store: ObjectStore) -> ObjectStore:
        rival = self

        class Watched(StoreWrapper):
            def put(
                self, key: str, body: Body, *, mode: PutMode, sha256: str | None = None
            ) -> PutOutcome:
                if "/versions/" in key and not rival.came:
                    rival.came = True
                    rival._publish()
                return super().put(key, body, mode=mode, sha256=sha256)

        return Watched(store)
