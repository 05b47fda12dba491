"""A setting that is described nowhere is not used: the tables of a worker's file are complete."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from workers import config
from workers.vllm_settings import VllmSettings

if TYPE_CHECKING:
    from dataclasses import Field

PAGE = Path(__file__).parents[2] / "docs" / "workers.md"
RECORDS: dict[str, type] = {
    "The file": config.WorkerConfig,
    "A region": config.RegionConfig,
    "Trainer": config.TrainerConfig,
    "Actor": config.ActorConfig,
    "vLLM": VllmSettings,
    "Stager": config.StagerConfig,
    "Replicate": config.ReplicateConfig,
    "Maintenance": config.MaintenanceConfig,
}
_ROW = re.compile(r"^\| `(\w+)` \| (needed|`[^|]+`) \| (.+) \|$", re.MULTILINE)


def _sections() -> dict[str, str]:
    text = PAGE.read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return "needed"
    value = field.default
    if is_dataclass(value) and not isinstance(value, type):
        assert asdict(value) == asdict(type(value)())
        value = {}
    return f"`{json.dumps(value)}`"


@pytest.mark.parametrize("section", RECORDS)
def test_every_field_of_a_worker_is_described(section: str) -> None:
    """The tables name every field of a worker's file, in its order, with its default."""
    rows = _ROW.findall(_sections()[section])
    assert [(name, default) for name, default, _ in rows] == [
        (field.name, _default(field)) for field in fields(RECORDS[section])
    ]


def test_every_part_of_a_worker_has_a_table() -> None:
    """No record of the configuration is left out, and no section is of none."""
    records = {
        value for value in vars(config).values() if isinstance(value, type) and is_dataclass(value)
    }
    assert records == set(RECORDS.values())
    assert list(_sections()) == list(RECORDS)
