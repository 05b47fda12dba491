"""Real folders, a real S3 server, and checkpoints to work with."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from deltastore.testing.checkpoints import next_checkpoint, tiny_checkpoint
from tests.integration.cli.cli_kit import Cli, publish_three

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.testing.servers import SeaweedServer


@pytest.fixture(scope="session")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with BF16 weights in two shards, FP32 and int64 tensors, NaN and -0."""
    return tiny_checkpoint(tmp_path_factory.mktemp("old"), seed=1, shards=2, extras=True)


@pytest.fixture(scope="session")
def new(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`old` one step later."""
    return next_checkpoint(old, tmp_path_factory.mktemp("new"), seed=2)


@pytest.fixture(scope="session")
def newer(new: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`new` one step later."""
    return next_checkpoint(new, tmp_path_factory.mktemp("newer"), seed=3)


@pytest.fixture
def files(tmp_path: Path) -> Cli:
    """The command on runs in a folder."""
    return Cli(f"file://{tmp_path}/runs")


@pytest.fixture(scope="session")
def whole_bucket(s3_server: SeaweedServer) -> Cli:
    """The command on a bucket of a real server; the keys are in variables that it is told of."""
    name = s3_server.create_bucket(f"test-cli-{secrets.token_hex(6)}")
    return Cli(
        f"s3://{name}",
        options=(
            "--endpoint-url",
            s3_server.endpoint,
            "--access-key-env",
            "TEST_ACCESS_KEY",
            "--secret-key-env",
            "TEST_SECRET_KEY",
        ),
        env={"TEST_ACCESS_KEY": s3_server.access_key, "TEST_SECRET_KEY": s3_server.secret_key},
        store_options={
            "endpoint_url": s3_server.endpoint,
            "access_key": s3_server.access_key,
            "secret_key": s3_server.secret_key,
        },
    )


@pytest.fixture
def bucket(whole_bucket: Cli) -> Cli:
    """The command on an empty prefix of a bucket."""
    return replace(whole_bucket, root_url=f"{whole_bucket.root_url}/{secrets.token_hex(6)}")


@pytest.fixture(params=["files", "bucket"])
def cli(request: pytest.FixtureRequest) -> Cli:
    """The command on each kind of store."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Cli)
    return found


@pytest.fixture(scope="session", params=["files", "bucket"])
def shared(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    old: Path,
    new: Path,
    newer: Path,
) -> Cli:
    """The command on each kind of store with a run `r1` of versions 0 to 2: only for reading."""
    if request.param == "files":
        cli = Cli(f"file://{tmp_path_factory.mktemp('shared')}/runs")
    else:
        whole = request.getfixturevalue("whole_bucket")
        assert isinstance(whole, Cli)
        cli = replace(whole, root_url=f"{whole.root_url}/shared")
    publish_three(cli, old, new, newer)
    return cli
