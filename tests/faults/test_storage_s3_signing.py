"""A body whose digest is known is read once: to send it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from deltastore.errors import Kind, StorageError
from deltastore.storage.store import PutMode, PutOutcome
from deltastore.testing.s3_proxy import CutRequest, S3Proxy

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.storage.s3 import S3Store

BODY = bytes(range(256)) * 1200
DIGEST = hashlib.sha256(BODY).hexdigest()
OTHER = "ab" * 32
CREATE = PutMode.CREATE


def test_a_known_digest_is_signed_and_the_body_not_hashed_again(
    s3_store: S3Store, proxy: S3Proxy
) -> None:
    """What the caller says is signed, again after a reset; else what the body hashes to."""
    proxy.add("PUT", "/again", CutRequest(200_000))
    for key, known in (("plain", None), ("known", DIGEST), ("again", DIGEST), ("said", OTHER)):
        assert s3_store.put(key, BODY, mode=CREATE, sha256=known) is PutOutcome.WRITTEN
        assert s3_store.get(key) == BODY
    signed = [
        (seen.target.rpartition("/")[2], seen.headers["x-amz-content-sha256"])
        for seen in proxy.seen
        if seen.method == "PUT"
    ]
    assert signed == [
        ("plain", DIGEST),
        ("known", DIGEST),
        ("again", DIGEST),
        ("again", DIGEST),
        ("said", OTHER),  # this server does not compare: that it arrives shows that nobody hashed
    ]


def test_our_signer_signs_with_the_key(open_s3: Callable[..., S3Store]) -> None:
    """With another secret the server takes nothing, whatever the digest."""
    stranger = open_s3(secret_key="not-the-secret")
    with pytest.raises(StorageError) as caught:
        stranger.put("k", BODY, mode=CREATE, sha256=DIGEST)
    assert caught.value.kind is Kind.CREDENTIALS
