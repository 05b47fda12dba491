"""Servers that are not at hand everywhere: the suite on an S3 endpoint that is given from outside.

`make test-radosgw` starts a Ceph radosgw and runs this on it, `make test-ministack` a ministack.
For any other, set S3_ENDPOINT, S3_ACCESS_KEY and S3_SECRET_KEY (and S3_REGION, S3_BUCKET) and run
this file with `-m outside`; what it writes lies under prefixes of its own and is removed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from typing import TYPE_CHECKING

import pytest

from deltastore.errors import Kind, StorageError
from deltastore.storage.probe import probe_store
from deltastore.storage.s3 import S3Store
from deltastore.storage.s3_settings import S3Settings
from deltastore.storage.store import PutMode
from deltastore.testing.stores import StoreTests
from tests.conformance.unfinished import leave_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.storage.store import ObjectStore

MIB = 1 << 20
ENDPOINT = os.environ.get("S3_ENDPOINT")

pytestmark = pytest.mark.outside


@pytest.fixture(scope="module")
def bucket() -> Iterator[S3Store]:
    """A bucket for all tests, and what is in it removed at the end."""
    if not ENDPOINT:
        pytest.fail("set S3_ENDPOINT, S3_ACCESS_KEY and S3_SECRET_KEY")
    store = S3Store(
        S3Settings(
            bucket=os.environ.get("S3_BUCKET") or f"suite-{secrets.token_hex(6)}",
            endpoint_url=ENDPOINT,
            region=os.environ.get("S3_REGION"),
            access_key=os.environ.get("S3_ACCESS_KEY"),
            secret_key=os.environ.get("S3_SECRET_KEY"),
            part_bytes=5 * MIB,
            streams=4,
        )
    )
    if not os.environ.get("S3_BUCKET"):
        name = store._calls.settings.bucket
        store._calls.once(lambda client: client.create_bucket(Bucket=name))
    yield store
    store.delete([info.key for info in store.list("suite-")])
    store.close()


class TestS3StoreOutside(StoreTests):
    """Whatever it is; `S3_RELAY` says that its create is not atomic, `S3_TREE` how it lists."""

    atomic_create = not os.environ.get("S3_RELAY")
    folder_order = bool(os.environ.get("S3_TREE"))
    race_rounds = 5
    large_bytes = 11 * MIB + 3

    def leave_unfinished(self, store: ObjectStore, key: str) -> None:
        """A part arrives, and nothing after it."""
        assert isinstance(store, S3Store)
        leave_parts(store, key)

    @pytest.fixture
    def store(self, bucket: S3Store) -> Iterator[ObjectStore]:
        """A prefix of its own."""
        settings = bucket._calls.settings
        store = S3Store(
            S3Settings(
                bucket=settings.bucket,
                prefix=f"suite-{secrets.token_hex(6)}",
                endpoint_url=settings.endpoint_url,
                region=settings.region,
                access_key=settings.access_key,
                secret_key=settings.secret_key,
                part_bytes=settings.part_bytes,
                streams=settings.streams,
            )
        )
        yield store
        store.close()


def test_what_the_probe_finds(bucket: S3Store, capsys: pytest.CaptureFixture[str]) -> None:
    """The probe ends, says the same as `S3_RELAY`, and leaves nothing behind."""
    report = probe_store(bucket, race_rounds=20, ask_more=True)
    with capsys.disabled():
        for name, found in report.findings().items():
            print(f"\n{name:28} {'yes' if found.ok else 'NO':4} {found.note}", end="")  # noqa: T201
    assert report.may_be_home or os.environ.get("S3_RELAY")
    assert list(bucket.list(".probe/")) == []
    assert list(bucket.incomplete_uploads("")) == []


def test_a_body_that_is_not_what_was_signed(
    bucket: S3Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that compares bytes with their signature refuses others by name and keeps nothing;
    one that does not stores what was sent."""
    key, body = f"suite-{secrets.token_hex(6)}/other", bytes(300_000)
    told = hashlib.sha256(b"what was hashed before it changed").hexdigest()
    refusal: StorageError | None = None
    try:
        bucket.put(key, body, mode=PutMode.CREATE, sha256=told)
    except StorageError as err:
        refusal = err
    found = [bucket.get(info.key) for info in bucket.list(key)]
    if refusal is None:
        assert found == [body]
    else:
        assert refusal.kind is Kind.UNAVAILABLE
        assert "damaged" in str(refusal)
        assert found == []
    with capsys.disabled():
        what = "stored: this server does not compare" if refusal is None else "refused"
        print(f"\nother bytes than were signed: {what}", end="")  # noqa: T201
