"""A version that is not pinned changes under a clean clone: what is installed is written down."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pins() -> dict[str, str]:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    pins = {}
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!_-]+)", line)
        assert match, f"not an exact pin of a public version: {line!r}"
        pins[_canonical(match[1])] = match[2]
    return pins


def test_every_declared_dependency_is_pinned() -> None:
    """Each dependency and extra of pyproject.toml but vLLM's has one exact version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra, names in project["optional-dependencies"].items():
        wanted += names if extra != "vllm" else []
    names = {_canonical(re.split(r"[\[<>=!~; ]", one)[0]) for one in wanted}
    assert names <= _pins().keys()


def test_the_makefile_installs_what_is_pinned() -> None:
    """`make env` asks only for packages that constraints.txt pins, in one resolution with it."""
    done = subprocess.run(
        ["make", "-B", "-n", "env"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    text = done.stdout.replace("\\\n", " ")
    installs = [line for line in text.splitlines() if " pip install " in line]
    assert len(installs) == 2
    for line in installs:
        words = line.split()
        assert words[words.index("-c") + 1] == "constraints.txt"
        after = words[words.index("constraints.txt") + 1 :]
        plain = [word for word in after if word[0] not in "-'."]
        assert {_canonical(word) for word in plain} <= _pins().keys()


def test_the_ci_script_is_well_formed_and_strict() -> None:
    """CI stops at the first failure, lints before it tests, and names no machine."""
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", ".ci/run"], cwd=ROOT, check=True)
    assert "set -euo pipefail" in text
    assert (
        text.index("\nmake lint\n")
        < text.index("\ntests test-vllm\n")
        < text.index("\ntests test\n")
    )
    assert not re.search(r"/(home|root|Users|work)/", text)
