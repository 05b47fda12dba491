"""Documents that do not run rot: every block of every document is executed here.

A `bash` block runs in a folder that holds two checkpoint folders, A and B (unless the document says
how to make them), and whatever the blocks above it in the same document left; `make` lines are only
checked to name targets. A `python` block runs in the same folder. Workers find the clone in
`PYTHONPATH`. A document that names `S3_ENDPOINT` finds there a store with the bucket `models`, and
the profile `training` that may use it. A `console` block shows an exchange and is not run; other
languages are not allowed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deltastore.testing.checkpoints import next_checkpoint, tiny_checkpoint

if TYPE_CHECKING:
    from deltastore.testing.servers import SeaweedServer

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)[^)]*\)")
_MADE = re.compile(
    r"""(?<=--out )\S+|(?<=mkdir )\S+|(?<=keygen )\S+|(?<=init "file://\$PWD/)[^"]+"""
)
_MAKE = re.compile(r"^make ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A fenced block of a document."""

    language: str
    text: str
    line: int


def _blocks(document: Path) -> list[CodeBlock]:
    text = document.read_text(encoding="utf-8")
    return [
        CodeBlock(match[1], match[2], text.count("\n", 0, match.start()) + 1)
        for match in _FENCE.finditer(text)
    ]


def _name(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def _command(block: CodeBlock) -> list[str]:
    if block.language == "python":
        return [sys.executable, "-c", block.text]
    script = _MAKE.sub(f"make -n -C '{ROOT}' ", block.text)
    return ["bash", "-euo", "pipefail", "-c", script]


RUNNING = [
    document
    for document in DOCUMENTS
    if any(block.language in {"bash", "python"} for block in _blocks(document))
]


@pytest.mark.parametrize("document", RUNNING, ids=_name)
def test_the_blocks_of_a_document_run(
    document: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Every bash and python block of a document succeeds, in order, in one folder."""
    blocks = _blocks(document)
    if not any("tiny_checkpoint(" in block.text for block in blocks):
        tiny_checkpoint(tmp_path / "A", seed=1)
        next_checkpoint(tmp_path / "A", tmp_path / "B", seed=2)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if any("-m workers." in block.text for block in blocks):
        environment["PYTHONPATH"] = str(ROOT)
    if any("S3_ENDPOINT" in block.text for block in blocks):
        environment |= _a_store(request.getfixturevalue("s3_server"), tmp_path / "aws")
    for block in blocks:
        if block.language not in {"bash", "python"}:
            continue
        done = subprocess.run(
            _command(block),
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        where = f"{_name(document)}, line {block.line}"
        assert done.returncode == 0, f"{where}\n{done.stdout}\n{done.stderr}"


def _a_store(server: SeaweedServer, folder: Path) -> dict[str, str]:
    """What a process needs to use the bucket `models` by the profile `training`."""
    server.create_bucket("models")
    folder.mkdir()
    keys = f"aws_access_key_id={server.access_key}\naws_secret_access_key={server.secret_key}\n"
    (folder / "credentials").write_text(f"[training]\n{keys}", encoding="utf-8")
    (folder / "config").write_text(f"[profile training]\nregion={server.region}\n", "utf-8")
    return {
        "S3_ENDPOINT": server.endpoint,
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "credentials"),
        "AWS_CONFIG_FILE": str(folder / "config"),
    }


def test_documents_share_no_output() -> None:
    """Who tries several documents in one folder meets no output that another one has made."""
    made = [
        (name, _name(document))
        for document in RUNNING
        for block in _blocks(document)
        if block.language == "bash"
        for name in _MADE.findall(block.text)
    ]
    names = [name for name, _ in made]
    assert {"C", "store/sft", "runs/r1", "restored", "first.key"} <= set(names)
    assert [one for one in made if names.count(one[0]) > 1] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_blocks_say_what_they_are(document: Path) -> None:
    """A fenced block is bash or python (and runs), or console or plain text (and is shown)."""
    languages = {block.language for block in _blocks(document)}
    assert languages <= {"bash", "python", "console", ""}


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_links_lead_somewhere(document: Path) -> None:
    """Every relative link of a document is a file of this repository."""
    links = _LINK.findall(document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_decisions_have_the_four_parts() -> None:
    """Every decision record says its problem, decision, alternatives and consequences."""
    records = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert len(records) >= 4
    for number, record in enumerate(records, 1):
        assert record.name.startswith(f"{number:03d}-")
        headings = re.findall(r"^## (.+)$", record.read_text(encoding="utf-8"), re.MULTILINE)
        assert headings == ["Problem", "Decision", "Alternatives", "Consequences"]
