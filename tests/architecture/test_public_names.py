"""Users import these names: one that disappears breaks them, one that slips in must be kept.

After a deliberate change: `python tests/architecture/test_public_names.py` writes the pins anew.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

PINNED = Path(__file__).parent / "pinned" / "names.txt"
MODULES = (
    "deltastore",
    "deltastore.adapters.safetensors_dir",
    "deltastore.adapters.torch_state",
    "deltastore.adapters.vllm.control",
    "deltastore.adapters.vllm_http",
    "deltastore.clock",
    "deltastore.config",
    "deltastore.coordination.backend",
    "deltastore.coordination.memory",
    "deltastore.coordination.redis",
    "deltastore.events",
    "deltastore.observability.jsonl",
    "deltastore.pipeline.applier",
    "deltastore.pipeline.engine_control",
    "deltastore.pipeline.follower",
    "deltastore.pipeline.host",
    "deltastore.pipeline.protocols",
    "deltastore.pipeline.publication",
    "deltastore.pipeline.publisher",
    "deltastore.pipeline.replay",
    "deltastore.pipeline.safe_point",
    "deltastore.repository.run",
    "deltastore.storage.fs",
    "deltastore.storage.memory",
    "deltastore.storage.s3",
    "deltastore.storage.store",
    "deltastore.storage.url",
    "deltastore.testing.clock",
    "deltastore.testing.coordination",
    "deltastore.testing.faults",
    "deltastore.testing.servers",
    "deltastore.testing.stores",
)


def _public(name: str) -> set[str]:
    """What a module declares public: its `__all__`, else the classes and functions it defines."""
    module = importlib.import_module(name)
    declared = getattr(module, "__all__", None)
    if declared is not None:
        return set(declared)
    return {
        key
        for key, value in vars(module).items()
        if not key.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == name
    }


def _found() -> set[str]:
    return {f"{module}: {name}" for module in MODULES for name in _public(module)}


def test_public_names_are_pinned() -> None:
    """The public names of every module that users import are those of pinned/names.txt."""
    found = _found()
    lines = PINNED.read_text(encoding="utf-8").splitlines()
    pinned = {line for line in lines if line and not line.startswith("#")}
    assert sorted(found - pinned) == [], "new public names: pin them, or make them private"
    assert sorted(pinned - found) == [], "public names are gone: users import them"


def test_what_is_declared_public_exists() -> None:
    """Every name in an `__all__` can be imported."""
    for name in MODULES:
        module = importlib.import_module(name)
        assert [key for key in getattr(module, "__all__", ()) if not hasattr(module, key)] == []


if __name__ == "__main__":
    head = "# Public names, by module. Adding one is a decision, removing one breaks people.\n"
    PINNED.write_text(head + "".join(f"{line}\n" for line in sorted(_found())), encoding="utf-8")
