"""A short run in memory."""

from __future__ import annotations

import pytest

from deltastore.storage.s3 import S3Store
from deltastore.storage.s3_settings import S3Settings
from tests.unit.chain_life.kit import Chain


@pytest.fixture
def chain(tmp_path):
    """A run at version 0."""
    return Chain(tmp_path)


@pytest.fixture
def s3_store(s3_server, s3_bucket):
    """A store in a new bucket of a real S3 server."""
    store = S3Store(
        S3Settings(
            bucket=s3_bucket,
            endpoint_url=s3_server.endpoint,
            region=s3_server.region,
            access_key=s3_server.access_key,
            secret_key=s3_server.secret_key,
        )
    )
    yield store
    store.close()
