"""`deltastore probe` on folders and a real S3 server: what it says, and what it leaves behind."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.integration.cli.cli_kit import Cli, documented

if TYPE_CHECKING:
    from pathlib import Path

NEEDED = {
    "absent_is_404",
    "read_after_write",
    "create_only",
    "create_only_race",
    "ranged_reads",
    "listing_order",
}


def test_probe_says_what_a_store_does(cli: Cli) -> None:
    """Every ability has a name, a verdict and a note; nothing is left in the store."""
    document = cli.json("probe", cli.root_url, "--rounds", "1")
    assert list(document) == documented("probe")
    assert document["may_be_home"]
    assert all(list(found) == documented("An ability") for found in document["abilities"])
    needed = {found["name"] for found in document["abilities"] if found["needed_by_home"]}
    assert needed == NEEDED
    asked_more = {found["name"] for found in document["abilities"]} - NEEDED
    assert ("checksums" in asked_more) == cli.root_url.startswith("s3:")
    assert list(cli.store().list("")) == []
    table = cli.run("probe", cli.root_url, "--rounds", "1")
    assert table.exit_code == 0
    assert "may be the home of a run" in table.stdout


def test_probe_refuses_a_store_that_is_no_home(tmp_path: Path) -> None:
    """CASE S2: the exit code is 5, and the table says what is missing and what remains possible."""
    relay = Cli(f"local://{tmp_path}/relay")
    document = relay.json("probe", relay.root_url, code=5)
    assert not document["may_be_home"]
    failed = [found["name"] for found in document["abilities"] if not found["ok"]]
    assert failed == ["create_only_race"]
    table = relay.run("probe", relay.root_url)
    assert table.exit_code == 5
    assert "relay" in table.stdout


def test_probe_of_a_bucket_that_is_not_there_says_so(bucket: Cli) -> None:
    """Nothing can be found out of a missing bucket: its name is in the error, the code is 3."""
    nowhere = replace(bucket, root_url="s3://no-such-bucket")
    document = nowhere.json("probe", nowhere.root_url, code=3)
    assert document["error"]["kind"] == "bucket_missing"
    assert "no-such-bucket" in document["error"]["message"]
