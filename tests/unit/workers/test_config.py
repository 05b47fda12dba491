"""A worker's file is checked whole: every wrong field is named, and no secret fits in it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.errors import InvalidInputError, Kind
from workers.config import ActorConfig, TrainerConfig, WorkerConfig, load_config, parse_config
from workers.vllm_settings import VllmSettings

if TYPE_CHECKING:
    from pathlib import Path

GOOD: dict[str, Any] = {
    "run": "r",
    "home": "eu",
    "regions": [{"name": "eu", "url": "s3://bucket/team"}],
    "redis_url": "redis://127.0.0.1:6379/0",
    "run_dir": "runs/r",
}


def parse(document: Any) -> WorkerConfig:
    """Read a document as a worker's file."""
    return parse_config(json.dumps(document).encode(), what="file")


def test_a_file_reads_back_as_it_was_written() -> None:
    """`asdict` and back is the identity, trainer and actor parts included."""
    config = parse(GOOD | {"trainer": {"steps": 3, "lr": 1e-6}, "actor": None, "threads": 2})
    assert config.trainer == TrainerConfig(steps=3, lr=1e-6)
    assert parse(asdict(config)) == config
    actor = parse(GOOD | {"actor": {"actor_id": "a", "region": "eu"}})
    assert actor.actor == ActorConfig("a", "eu")
    assert parse(asdict(actor)) == actor
    engine = VllmSettings(max_model_len=64, enforce_eager=True)
    there = {"actor_id": "a", "region": "eu", "engine": "vllm", "vllm": asdict(engine)}
    vllm = parse(GOOD | {"actor": there})
    assert vllm.actor == ActorConfig("a", "eu", engine="vllm", vllm=engine)
    assert parse(asdict(vllm)) == vllm


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"colour": "red"}, "colour"),
        ({"run_dir": ""}, "run_dir is empty"),
        ({"checkpoint": ""}, "checkpoint is empty"),
        ({"actor": {"actor_id": "a", "region": "eu", "stager_folder": ""}}, "folder is empty"),
        ({"threads": True}, "threads"),
        ({"threads": 0}, "threads"),
        ({"seed": 1.5}, "seed"),
        ({"run": "a/b"}, "a/b"),
        ({"home": "us"}, "home"),
        ({"regions": {}}, "regions"),
        ({"regions": [{"name": "eu"}]}, "url"),
        ({"regions": [{"name": "eu", "url": 3}]}, "url"),
        ({"regions": [GOOD["regions"][0]] * 2}, "regions"),
        ({"regions": [{**GOOD["regions"][0], "access_key_env": "A"}]}, "access_key_env"),
        ({"redis_url": "redis://:hunter2@host"}, "redis_password_env"),
        ({"trainer": {"lr": "fast"}}, "lr"),
        ({"trainer": {"lr": 0.0}}, "lr"),
        ({"trainer": {"group_size": 1}}, "group_size"),
        ({"trainer": {"give_up_s": 1.0}}, "give_up_s"),
        ({"trainer": {"min_groups": 99}}, "min_groups"),
        ({"actor": {"actor_id": "a"}}, "region"),
        ({"actor": {"actor_id": "a", "region": "us"}}, "actor.region"),
        ({"actor": {"actor_id": "a", "region": "eu", "max_lease_s": 1.0}}, "max_lease_s"),
        ({"actor": {"actor_id": "a", "region": "eu", "engine": "warp"}}, "transformers, vllm"),
        ({"actor": {"actor_id": "a", "region": "eu", "vllm": {"gpu": 1}}}, "gpu"),
        ({"actor": {"actor_id": "a", "region": "eu", "vllm": {"dtype": "int8"}}}, "vllm.dtype"),
        ({"actor": {"actor_id": "a", "region": "eu", "vllm": {"block_size": 0}}}, "vllm.block"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(change: dict[str, Any], named: str) -> None:
    """Unknown, missing, mistyped and impossible fields are refused by name."""
    with pytest.raises(InvalidInputError) as caught:
        parse(GOOD | change)
    assert named in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """No file, no JSON, NaN or no object: one clear error of kind `setting`."""
    with pytest.raises(InvalidInputError, match="cannot read") as caught:
        load_config(tmp_path / "absent.json")
    assert caught.value.kind is Kind.SETTING
    for text in (b"{", b"[]", b'{"run": NaN}'):
        with pytest.raises(InvalidInputError):
            parse_config(text, what="file")
    nan = json.dumps(GOOD | {"trainer": {"lr": float("nan")}}).encode()
    with pytest.raises(InvalidInputError, match="lr"):
        parse_config(nan, what="file")
