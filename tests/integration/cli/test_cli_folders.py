"""`diff` and `apply` on plain checkpoint folders, without a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deltastore.format.dtypes import DType
from deltastore.testing.checkpoints import next_checkpoint, tiny_checkpoint
from tests.integration.cli.cli_kit import Cli, documented, other_files, tensors

if TYPE_CHECKING:
    from pathlib import Path

CLI = Cli("file:///unused")


def test_round_trip(old: Path, new: Path, tmp_path: Path) -> None:
    """`apply` of `diff` gives every tensor bit for bit (BF16, FP32, int64, empty, NaN, -0), the
    shards of the new and the other files of the old checkpoint."""
    bundle, out = tmp_path / "d.delta", tmp_path / "c"
    made = CLI.json("diff", old, new, "--out", bundle)
    applied = CLI.json("apply", old, bundle, "--out", out)
    assert tensors(out) == tensors(new) != tensors(old)
    assert other_files(out) == other_files(old)
    assert list(made) == documented("diff")
    assert list(applied) == documented("apply")
    assert made["size_bytes"] == bundle.stat().st_size < made["dense_bytes"] / 10
    for key in ("nnz", "layout_digest", "fingerprint_before", "fingerprint_after"):
        assert made[key] == applied[key]


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32])
@pytest.mark.parametrize("density", [0.0, 1.0])
def test_round_trip_at_the_ends(dtype: DType, density: float, tmp_path: Path) -> None:
    """CASE R12: nothing changed and everything changed both work, in every weight dtype."""
    a = tiny_checkpoint(tmp_path / "a", seed=5, dtype=dtype, tied=False)
    b = next_checkpoint(a, tmp_path / "b", seed=6, density=density)
    made = CLI.json("diff", a, b, "--out", tmp_path / "d")
    CLI.json("apply", a, tmp_path / "d", "--out", tmp_path / "c")
    assert tensors(tmp_path / "c") == tensors(b)
    assert (made["nnz"] == 0) == (density == 0.0)


def test_readable_output(old: Path, new: Path, tmp_path: Path) -> None:
    """Without --json one sentence says what was written."""
    result = CLI.run("diff", old, new, "--out", tmp_path / "d")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "changes" in result.stdout
    result = CLI.run("apply", old, tmp_path / "d", "--out", tmp_path / "c")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "proved by fingerprint" in result.stdout


def test_out_exists(old: Path, new: Path, tmp_path: Path) -> None:
    """Nothing is overwritten: neither a bundle nor a checkpoint folder."""
    bundle = tmp_path / "d"
    CLI.json("diff", old, new, "--out", bundle)
    before = bundle.read_bytes()
    CLI.error(4, "output_exists", "diff", old, new, "--out", bundle)
    CLI.error(4, "output_exists", "apply", old, bundle, "--out", tmp_path)
    assert bundle.read_bytes() == before


def test_wrong_base(old: Path, new: Path, newer: Path, tmp_path: Path) -> None:
    """CASE R3: a bundle does not go onto another state than the one it starts from."""
    CLI.json("diff", new, newer, "--out", tmp_path / "d")
    error = CLI.error(6, "wrong_base", "apply", old, tmp_path / "d", "--out", tmp_path / "c")
    assert "--out" not in error["message"]
    assert not (tmp_path / "c").exists()


def test_other_architecture(old: Path, new: Path, tmp_path: Path) -> None:
    """CASE R9: folders of different names, shapes or dtypes are refused, naming the tensors."""
    other = tiny_checkpoint(tmp_path / "other", tied=False)
    error = CLI.error(2, "tensor_names", "diff", old, other, "--out", tmp_path / "d")
    assert "model.router.bias" in error["message"]
    CLI.json("diff", old, new, "--out", tmp_path / "d2")
    CLI.error(6, "layout_mismatch", "apply", other, tmp_path / "d2", "--out", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_tied_names_drift(tmp_path: Path) -> None:
    """CASE R6: a tied head that is stored apart with other bits is refused by both names."""
    tied = tiny_checkpoint(tmp_path / "a", tied=True)
    untied = tiny_checkpoint(tmp_path / "b", tied=False)
    error = CLI.error(6, "alias_drift", "diff", tied, untied, "--out", tmp_path / "d")
    assert "lm_head.weight" in error["message"]
    assert "model.embed_tokens.weight" in error["message"]
    assert not (tmp_path / "d").exists()


def test_missing_paths(old: Path, tmp_path: Path) -> None:
    """Every path that is not there is named."""
    absent = tmp_path / "absent"
    error = CLI.error(2, "checkpoint", "diff", old, absent, "--out", tmp_path / "d")
    assert str(absent) in error["message"]
    error = CLI.error(3, "file_missing", "apply", old, absent, "--out", tmp_path / "c")
    assert str(absent) in error["message"]
    error = CLI.error(3, "file_missing", "diff", old, old, "--out", absent / "d")
    assert str(absent) in error["message"]
    CLI.error(2, "payload", "apply", old, tmp_path, "--out", tmp_path / "c")


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_bundle(keep: int, old: Path, new: Path, tmp_path: Path) -> None:
    """A bundle that was cut anywhere is refused before anything is written."""
    bundle = tmp_path / "d"
    CLI.json("diff", old, new, "--out", bundle)
    body = bundle.read_bytes()
    bundle.write_bytes(body[:keep])
    result = CLI.run("apply", old, bundle, "--out", tmp_path / "c")
    assert result.exit_code == 7, result.output
    assert result.stderr.startswith("deltastore: ")
    assert not (tmp_path / "c").exists()


def test_flipped_bit_in_bundle(old: Path, new: Path, tmp_path: Path) -> None:
    """A bundle with one wrong bit is refused, wherever the bit is."""
    bundle = tmp_path / "d"
    CLI.json("diff", old, new, "--out", bundle)
    body = bundle.read_bytes()
    for place in range(0, len(body), max(1, len(body) // 40)):
        damaged = bytearray(body)
        damaged[place] ^= 0x10
        bundle.write_bytes(damaged)
        result = CLI.run("apply", old, bundle, "--out", tmp_path / "c")
        assert result.exit_code in {6, 7}, (place, result.output)
        assert not (tmp_path / "c").exists()


def test_foreign_file_as_bundle(old: Path, tmp_path: Path) -> None:
    """A file that is no bundle is called that."""
    (tmp_path / "d").write_bytes(b"PK\x03\x04" + bytes(1000))
    CLI.error(7, "magic", "apply", old, tmp_path / "d", "--out", tmp_path / "c")


def test_nothing_is_left_behind(old: Path, new: Path, tmp_path: Path) -> None:
    """A command that fails leaves no temporary file next to its output."""
    other = tiny_checkpoint(tmp_path / "other")
    CLI.run("diff", old, other, "--out", tmp_path / "d")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other"]
