"""The command as a user has it, and what its tests compare."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.testing import CliRunner

from deltastore.cli.app import app
from deltastore.format.checkpoint_file import parse_header
from deltastore.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typer.testing import Result

    from deltastore.storage.store import ObjectStore


PAGE = Path(__file__).parents[3] / "docs" / "cli.md"


@dataclass(frozen=True)
class Cli:
    """The command, run in this process, on one kind of store."""

    root_url: str
    options: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    store_options: Mapping[str, str] = field(default_factory=dict)

    def url(self, name: str) -> str:
        """The URL of the run of that name."""
        return f"{self.root_url}/{name}"

    def store(self) -> ObjectStore:
        """The store itself, for looking and for doing damage."""
        return open_store(self.root_url, **self.store_options)  # type: ignore[arg-type]

    def run(self, command: str, *words: str | Path) -> Result:
        """Run a command; those that take a run get the store's options."""
        options = () if command in {"diff", "apply", "keygen"} else self.options
        line = [command, *map(str, words), *options]
        return CliRunner().invoke(app, line, env=dict(self.env))

    def json(self, command: str, *words: str | Path, code: int = 0) -> dict[str, Any]:
        """Run a command with --json, check its exit code, and return its document."""
        result = self.run(command, *words, "--json")
        assert result.exit_code == code, result.output
        document = json.loads(result.stdout)
        assert isinstance(document, dict)
        return document

    def error(self, code: int, kind: str, command: str, *words: str | Path) -> dict[str, Any]:
        """Run a command that must fail so, plainly and with --json; return the error."""
        plain = self.run(command, *words)
        assert plain.exit_code == code, plain.output
        assert plain.stderr.startswith(f"deltastore: {kind}: "), plain.stderr
        assert (plain.stdout, plain.stderr.count("\n")) == ("", 1)
        error = self.json(command, *words, code=code)["error"]
        assert (error["kind"], error["exit_code"]) == (kind, code)
        assert error["hint"], f"no way out in {error}"
        assert list(error) == documented("An error")
        assert isinstance(error, dict)
        return error


def documented(what: str) -> list[str]:
    """The keys that docs/cli.md promises: of a command, or of `The run`, `A version`, ..."""
    page = PAGE.read_text(encoding="utf-8")
    row = re.search(rf"^\| `{what}` \| (.*) \|$", page, re.MULTILINE)
    sentence = re.search(rf"{what}: ((?:`\w+`\s*)+)\.", page)
    found = row or sentence
    assert found is not None, f"docs/cli.md says nothing of {what}"
    run = documented("The run") if found[1].startswith("the run") else []
    return [*run, *re.findall(r"`(\w+)`", found[1])]


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a checkpoint folder by name: dtype, shape and bytes."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        body = path.read_bytes()
        header = parse_header(body)
        for name, tensor in header.tensors.items():
            start, end = header.file_range(name)
            found[name] = (tensor.dtype.value, tensor.shape, body[start:end])
    assert found
    return found


def other_files(folder: Path) -> dict[str, bytes]:
    """The files of a folder that are not weights."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".safetensors"}


def publish_three(cli: Cli, old: Path, new: Path, newer: Path) -> str:
    """Make run `r1` with versions 0 to 2 and return its URL."""
    url = cli.url("r1")
    cli.json("init", url, "--checkpoint", old)
    cli.json("publish", url, new, "--step", "10")
    cli.json("publish", url, newer, "--step", "20")
    return url
