"""The demo's last checks fail when what they claim is not so."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deltastore.events import ActorJoined, PublishFailed, StepTrained, VersionPublished
from deltastore.observability.jsonl import StampedEvent
from deltastore.observability.view import RunView
from workers.demo import ending, outside
from workers.demo.settings import THREE, DemoSettings
from workers.run_folder import FinalReport, RunFolder

JOINER = THREE.joiner.actor_id
TRAINER = FinalReport("trainer", 3, "ab" * 32, "cd" * 16)


def _trained(accuracies: list[float]) -> RunView:
    view = RunView()
    view.fold(
        StampedEvent(step, StepTrained(step, step - 1, accuracy, 0, 0, 32, 0, 1, 1, 1, 0, 1, 1))
        for step, accuracy in enumerate(accuracies, 1)
    )
    return view


@pytest.fixture
def settings(tmp_path: Path) -> DemoSettings:
    """A demo that has to learn."""
    return DemoSettings(tmp_path, lr=3e-5, steps=12)


@pytest.mark.parametrize(
    ("last", "passed"), [(0.9, True), (0.51, True), (0.49, False), (0.2, False), (0.0, False)]
)
def test_accuracy_has_to_rise_by_the_stated_amount(
    settings: DemoSettings, last: float, passed: bool
) -> None:
    """The mean of the last three steps must be 0.3 above that of the first three."""
    view = _trained([0.1, 0.2, 0.3, *[0.4] * 6, last, last, last])
    assert ending.check_accuracy(view, settings).passed is passed


def test_a_small_learning_rate_is_only_reported(settings: DemoSettings) -> None:
    """At lr 1e-6 nothing visible is learned: the figures are shown and the rule is said."""
    check = ending.check_accuracy(_trained([0.3] * 12), replace(settings, lr=1e-6))
    assert check.passed
    assert "0.30 -> 0.30" in check.detail
    assert "reported only" in check.detail


def test_missing_steps_are_a_failure_at_any_rate(settings: DemoSettings) -> None:
    """A run that trained fewer steps than asked does not pass as one that did not have to learn."""
    assert not ending.check_accuracy(_trained([0.3] * 11), replace(settings, lr=1e-6)).passed


def test_one_foreign_fingerprint_fails_the_fleet(tmp_path: Path) -> None:
    """An actor with another fingerprint, version or history, or without a report, is named."""
    folder = RunFolder(tmp_path)
    for name in ("a1", "a3"):
        folder.report(folder.actor_report(name), replace(TRAINER, worker=name))
    assert ending.check_actors(folder, ["a1", "a3"], TRAINER).passed
    for change in ({"fingerprint": "ce" * 16}, {"version": 2}, {"policy_hash": "ac" * 32}):
        folder.report(folder.actor_report("a3"), replace(TRAINER, worker="a3", **change))
        check = ending.check_actors(folder, ["a1", "a3"], TRAINER)
        assert not check.passed
        assert "a3" in check.detail
    assert "left no report" in ending.check_actors(folder, ["a4"], TRAINER).detail


def _published(version: int, delta_bytes: int) -> StampedEvent:
    times = (0.0, 0.0, 0.0, 0.0, 0.0)
    event = VersionPublished(
        version, version, version, "ab" * 32, 10, 100, delta_bytes, 200, *times
    )
    return StampedEvent(version, event)


@pytest.mark.parametrize(
    ("version", "size_bytes", "passed"),
    [(0, 0, False), (2, 29, False), (2, 30, True), (2, 300, True), (3, 300, False)],
)
def test_a_join_without_the_chain_does_not_count(
    settings: DemoSettings, version: int, size_bytes: int, passed: bool
) -> None:
    """The late actor joined at a published version and fetched at least the deltas up to it."""
    view = RunView()
    assert not ending.check_join(view, settings).passed
    view.fold([_published(1, 10), _published(2, 20)])
    view.fold([StampedEvent(9, ActorJoined(JOINER, version, "deltas", size_bytes, 2.0))])
    check = ending.check_join(view, settings)
    assert check.passed is passed
    assert f"{size_bytes:,} bytes" in check.detail


@pytest.mark.parametrize(
    ("via", "passed"),
    [("checkpoint v0 + 2 deltas", True), ("checkpoint v1 + 1 deltas", False), ("full v2", False)],
)
def test_a_join_on_vllm_has_to_come_the_whole_way(tmp_path: Path, via: str, passed: bool) -> None:
    """An engine whose stager says nothing of bytes joined from version 0 by every delta."""
    settings = DemoSettings(tmp_path, engine="vllm", vllm_python=Path(sys.executable))
    view = RunView()
    view.fold([_published(1, 10), _published(2, 20)])
    joiner = settings.cast.joiner.actor_id
    view.fold([StampedEvent(9, ActorJoined(joiner, 2, via, 0, 2.0))])
    assert ending.check_join(view, settings).passed is passed


def test_a_reported_failure_is_not_forgotten() -> None:
    """A publish that failed on the way is shown at the end, though a later one made up for it."""
    view = RunView()
    assert ending.check_problems(view).passed
    view.fold([StampedEvent(1, PublishFailed(4, "unavailable", "east is down"))])
    check = ending.check_problems(view)
    assert not check.passed
    assert "east is down" in check.detail


@pytest.mark.parametrize("pattern", [0x8000, 0x7FC1, 0x0001])
def test_checkpoints_are_compared_by_bits(tmp_path: Path, pattern: int) -> None:
    """-0, another NaN and a subnormal are differences; the same bits in other files are none."""
    plain = torch.zeros(8, dtype=torch.int16)
    changed = plain.clone()
    changed[3] = pattern - 0x10000 if pattern >= 0x8000 else pattern
    one, other, third = tmp_path / "one", tmp_path / "other.safetensors", tmp_path / "third"
    for folder in (one, third):
        folder.mkdir()
    save_file({"w": plain.view(torch.bfloat16)}, one / "model.safetensors")
    save_file({"w": plain.view(torch.bfloat16)}, other)
    save_file({"w": changed.view(torch.bfloat16)}, third / "model.safetensors")
    assert outside.compare_checkpoints(one, other) == ([], 1)
    assert outside.compare_checkpoints(one, third) == (["w"], 1)


def test_missing_and_retyped_tensors_are_differences(tmp_path: Path) -> None:
    """A tensor in one checkpoint only, or of another dtype or shape, is named."""
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    save_file({"a": torch.zeros(4), "b": torch.zeros(2, 2), "c": torch.zeros(1)}, one)
    save_file({"a": torch.zeros(4, dtype=torch.int32), "b": torch.zeros(4)}, other)
    different, tensors = outside.compare_checkpoints(one, other)
    assert sorted(different) == ["a", "b", "c"]
    assert tensors == 3
