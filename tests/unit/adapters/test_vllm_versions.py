"""What is used of vLLM is looked for before it is used, also what was added yesterday."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import deltastore
from deltastore.adapters.vllm.versions import USED, USED_BY_WORKERS, USED_ON_CPU

ROOT = Path(deltastore.__file__).parent
SOURCES = [*ROOT.glob("adapters/**/*.py"), *ROOT.glob("cli/*.py"), *ROOT.glob("*.py")]
OURS = {"vllm.general_plugins", "vllm.endpoint_plugins"}
"""Names of entry points, no modules."""


def test_everything_that_is_imported_is_looked_for() -> None:
    """CASE R25: no source imports anything of vLLM, or looks it up by name, that is not among what
    is looked for at the start."""
    found: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names=names):
                    found |= {one.name for one in names}
                case ast.ImportFrom(module=str(module), names=names, level=0):
                    found |= {f"{module}.{one.name}" for one in names}
                case ast.Constant(value=str(text)) if re.fullmatch(r"vllm(\.\w+)+", text):
                    found.add(text)
    imported = {name for name in found if re.match(r"vllm(\.|$)", name)} - OURS
    assert "vllm.v1.engine.core.EngineCore" in imported
    looked_for = [f"{used.replace(':', '.')}." for used in (*USED, *USED_BY_WORKERS, *USED_ON_CPU)]
    assert {
        name for name in imported if not any(one.startswith(f"{name}.") for one in looked_for)
    } == set()


def test_nothing_is_looked_for_twice() -> None:
    """Each name is in one list, once."""
    names = [*USED, *USED_BY_WORKERS, *USED_ON_CPU]
    assert sorted(set(names)) == sorted(names)
