"""Real folders, a real S3 server, and checkpoints to work with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deltastore.testing.checkpoints import next_checkpoint, tiny_checkpoint
from tests.integration.cli.cli_kit import Cli

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


@pytest.fixture
def bucket(s3_server: SeaweedServer, s3_bucket: str) -> Cli:
    """The command on runs in a bucket of a real server; keys in variables that it is told of."""
    return Cli(
        f"s3://{s3_bucket}/team",
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


@pytest.fixture(params=["files", "bucket"])
def cli(request: pytest.FixtureRequest) -> Cli:
    """The command on each kind of store."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Cli)
    return found
