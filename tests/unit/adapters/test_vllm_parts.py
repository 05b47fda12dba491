"""The backend's parts that need no vLLM: the child stager, refusals, errors that travel, points."""

from __future__ import annotations

import copy
import os
import signal
import threading
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deltastore.adapters.vllm.answers import point_of, point_row, spooled_of, spooled_row
from deltastore.adapters.vllm.child_stager import ChildStager, stage_command
from deltastore.adapters.vllm.rank_call import RankError, answer_of, raise_first
from deltastore.adapters.vllm.refusals import checkpoint_folder, refuse_unfollowable
from deltastore.adapters.vllm.scratch import Scratch
from deltastore.adapters.vllm.settings import EngineSettings
from deltastore.clock import SystemClock
from deltastore.errors import ApplyError, FormatError, InvalidInputError, Kind
from deltastore.format.fingerprint import Fingerprint
from deltastore.format.key_files import trusted_line
from deltastore.format.signing import MaySign, SigningKey
from deltastore.pipeline.held_lock import is_locked
from deltastore.pipeline.spool import SpooledUpdate, SpoolFolder
from deltastore.repository.points import ActiveVersion
from deltastore.storage.fs import FileStore
from tests.unit.pipeline.harness import RUN, World

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CLOCK = SystemClock()


def _until(what: Callable[[], bool]) -> None:
    never = threading.Event()
    deadline_s = CLOCK.monotonic_s() + 60
    while not what():
        assert CLOCK.monotonic_s() < deadline_s
        CLOCK.wait(never, 0.05)


def test_a_folder_has_one_stager_whoever_dies(tmp_path: Path) -> None:
    """Two engines keep one stager between them; when it is killed there is another one, when its
    engine goes the other engine starts one, and with the last engine it ends."""
    World(tmp_path / "w", home_store=FileStore(tmp_path / "store"))
    settings = EngineSettings(run=f"file://{tmp_path}/store/{RUN}", poll_min_s=0.05)
    folder = tmp_path / "spool"
    lock = SpoolFolder(folder).stager_lock
    keepers = [ChildStager(settings, folder, CLOCK) for _ in range(2)]
    for keeper in keepers:
        keeper.start()
    _until(lambda: is_locked(lock))

    def holder() -> int:
        """The keeper whose child is the stager, once the other's has given up."""
        _until(lambda: is_locked(lock) and sum(k.pid is not None for k in keepers) == 1)
        return 0 if keepers[0].pid is not None else 1

    first = keepers[holder()].pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    _until(lambda: not is_locked(lock))
    second = holder()
    assert keepers[second].pid != first
    keepers[second].stop()
    _until(lambda: is_locked(lock) and keepers[1 - second].pid is not None)
    keepers[1 - second].stop()
    assert not is_locked(lock)


def test_the_stagers_words_are_the_settings(tmp_path: Path) -> None:
    """Endpoint, profile, region and trusted keys reach the child; nothing secret is among them."""
    line = trusted_line(SigningKey.generate().public, [MaySign.VERSIONS])
    settings = EngineSettings(
        run="s3://bucket/r1",
        endpoint="http://127.0.0.1:1",
        profile="p",
        region="r",
        region_name="east",
        trusted_keys=(line,),
    )
    words = stage_command(settings, tmp_path)
    assert words[words.index("--endpoint-url") + 1] == "http://127.0.0.1:1"
    assert words[words.index("--profile") + 1] == "p"
    assert words[words.index("--region") + 1] == "r"
    assert words[words.index("--region-name") + 1] == "east"
    assert (tmp_path / "trusted-keys").read_text() == line + "\n"
    assert words[words.index("--trusted-keys") + 1] == str(tmp_path / "trusted-keys")
    assert "--endpoint-url" not in stage_command(EngineSettings(run="s3://b/r1"), tmp_path)


def _config(**changes: Any) -> Any:
    model: dict[str, Any] = {"model": "m", "quantization": None, "hf_config": SimpleNamespace()}
    parts: dict[str, Any] = {
        "model_config": model,
        "lora_config": None,
        "speculative_config": None,
        "load_config": {"load_format": "auto", "download_dir": None},
        "parallel_config": {"nnodes": 1},
    }
    for name, value in changes.items():
        parts[name] = {**parts[name], **value} if isinstance(value, dict) else value
    return SimpleNamespace(
        **{
            name: SimpleNamespace(**value) if isinstance(value, dict) else value
            for name, value in parts.items()
        }
    )


def _drafting(model: str) -> Any:
    return SimpleNamespace(draft_model_config=SimpleNamespace(model=model))


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"speculative_config": _drafting("another")},
        {"speculative_config": SimpleNamespace(draft_model_config=None)},
        {
            "model_config": {
                "quantization": "fp8",
                "hf_config": SimpleNamespace(quantization_config={"quant_method": "fp8"}),
            }
        },
    ],
)
def test_engines_whose_weights_are_the_checkpoints_are_followed_with(good: Any) -> None:
    """A draft model of its own, drafts without one, and quantized checkpoints are no obstacle."""
    refuse_unfollowable(_config(**good))


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"lora_config": SimpleNamespace()}, "LoRA"),
        ({"speculative_config": _drafting("m")}, "draft model"),
        ({"model_config": {"quantization": "fp8"}}, "fp8"),
        ({"load_config": {"load_format": "dummy"}}, "dummy"),
        ({"load_config": {"load_format": "LoadFormat.DUMMY"}}, "dummy"),
        ({"parallel_config": {"nnodes": 2}}, "2 hosts"),
    ],
)
def test_engines_with_other_weights_are_refused_at_start(bad: Any, named: str) -> None:
    """What would serve a mixture after an update is refused by name, with the way out."""
    with pytest.raises(InvalidInputError, match=named) as caught:
        refuse_unfollowable(_config(**bad))
    assert caught.value.kind is Kind.SETTING
    assert caught.value.hint


def test_the_loaded_checkpoint_is_a_folder_of_this_host(tmp_path: Path) -> None:
    """The model's folder, or the one that is named, is read; one that is nowhere is refused."""
    settings = EngineSettings(run="s3://b/r1")
    assert checkpoint_folder(_config(model_config={"model": str(tmp_path)}), settings) == tmp_path
    named = EngineSettings(run="s3://b/r1", checkpoint=str(tmp_path))
    assert checkpoint_folder(_config(), named) == tmp_path
    with pytest.raises(InvalidInputError, match="nobody/nothing") as caught:
        checkpoint_folder(_config(model_config={"model": "nobody/nothing"}), settings)
    assert caught.value.kind is Kind.CHECKPOINT


def test_a_ranks_error_is_the_same_error_in_the_engine_core() -> None:
    """In one process it is the very error; after crossing to another it has the class, the kind,
    the message, the place and the way out of the rank's."""

    class Worker:
        def refuse(self, why: str, *, version: int) -> None:
            raise ApplyError(why, kind=Kind.POISONED, version=version, hint="re-anchor")

        def stumble(self) -> None:
            raise KeyError("x")

        def work(self) -> int:
            return 7

    refused = answer_of(Worker(), "refuse", ("gone",), {"version": 7})
    assert isinstance(refused, RankError)
    with pytest.raises(ApplyError) as caught:
        raise_first([None, refused])
    assert caught.value is refused.error
    crossed = copy.copy(refused)  # by the same means as between processes
    assert crossed.error is not refused.error
    with pytest.raises(ApplyError, match="gone") as caught:
        raise_first([crossed])
    seen = caught.value
    assert (seen.kind, seen.version, seen.hint) == (Kind.POISONED, 7, "re-anchor")
    with pytest.raises(RuntimeError, match="KeyError: 'x'"):
        raise_first([copy.copy(answer_of(Worker(), "stumble", (), {}))])
    raise_first([answer_of(Worker(), "work", (), {}), None])


def test_points_and_updates_travel_whole() -> None:
    """What ranks say to each other comes back as it was; anything else is refused."""
    point = ActiveVersion(7, "ab" * 32, Fingerprint(3, 1 << 63), 2)
    assert point_of(point_row(point)) == point
    update = SpooledUpdate("/spool/x", 9, "cd" * 32, point)
    assert spooled_of(spooled_row(update)) == update
    for row in (None, {}, {**point_row(point), "policy_hash": "7"}, {"version": 7}):
        with pytest.raises(FormatError):
            point_of(row)
    for row in (None, {}, {**spooled_row(update), "sha256": "7"}):
        with pytest.raises(FormatError):
            spooled_of(row)


class Blocks(TorchDispatchMode):
    """Knows how many bytes of new blocks are held, and can have no more."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[weakref.ref[torch.Tensor]] = []
        self.full = False

    @property
    def held_bytes(self) -> int:
        """Of blocks that somebody holds."""
        return sum(one.numel() for ref in self.held if (one := ref()) is not None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        """Make the block, unless all memory is somebody else's."""
        if self.full:
            raise torch.OutOfMemoryError("somebody else has it")
        made = func(*args, **(kwargs or {}))
        self.held.append(weakref.ref(made))
        return made


def test_scratch_is_kept_aside_but_for_the_writing(caplog: pytest.LogCaptureFixture) -> None:
    """On a device the memory is held from the start, lent inside, and held again after a failure;
    on the host nothing is held."""
    size_bytes = 64 << 20
    with Blocks() as blocks:
        scratch = Scratch(torch.device("meta"), size_bytes)
        assert blocks.held_bytes == size_bytes
        assert len(blocks.held) == 17  # of both pools of the allocator
        with scratch.lent():
            assert blocks.held_bytes == 0
        with pytest.raises(ValueError, match="broken"), scratch.lent():
            raise ValueError("broken")
        assert blocks.held_bytes == size_bytes
        Scratch(torch.device("cpu"), size_bytes)
        assert blocks.held_bytes == size_bytes
    assert not caplog.records


def test_scratch_that_somebody_else_has_taken_fails_no_update(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """CASE R15: an update that has succeeded is not failed by memory that does not come back: the
    log says so, and it is taken after the next one. At the start it is an error."""
    with Blocks() as blocks:
        scratch = Scratch(torch.device("meta"), 1 << 20)
        with scratch.lent():
            blocks.full = True
        assert blocks.held_bytes == 0
        assert [one.levelname for one in caplog.records] == ["WARNING"]
        with pytest.raises(torch.OutOfMemoryError):
            Scratch(torch.device("meta"), 1 << 20)
        blocks.full = False
        with scratch.lent():
            pass
        assert blocks.held_bytes == 1 << 20
