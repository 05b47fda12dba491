"""Who we are, where the bucket is, what time it is: each may be wrong, or change meanwhile."""

from __future__ import annotations

import json
import secrets
import sys
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import botocore.auth
import pytest

from deltastore.errors import InvalidInputError, Kind, StorageError
from deltastore.storage.s3 import S3Store
from deltastore.storage.s3_settings import S3Settings
from deltastore.storage.store import ByteRange, PutMode, PutOutcome
from deltastore.storage.transfer import Uploader
from deltastore.testing.clock import FakeClock
from deltastore.testing.s3_proxy import Reply, S3Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PART = 5 << 20
BODY = bytes(range(256)) * (PART // 256) * 3 + b"and a fourth part"
CREATE = PutMode.CREATE

_ISSUE = """
import datetime, json, pathlib, sys
state = pathlib.Path(sys.argv[1])
number = len(state.read_text()) if state.exists() else 0
state.write_text("x" * (number + 1))
left = datetime.timedelta(seconds=float(sys.argv[2]))
until = (datetime.datetime.now(datetime.timezone.utc) + left).isoformat()
print(json.dumps({"Version": 1, "AccessKeyId": f"KEY{number}", "SecretAccessKey": "secret",
                  "Expiration": until}))
"""


@pytest.fixture
def line(moto_endpoint: str) -> Iterator[S3Proxy]:
    """A line to moto, which takes any keys; what was signed with which shows in `seen`."""
    with S3Proxy(moto_endpoint) as proxy:
        yield proxy


@pytest.fixture
def open_issued(
    line: S3Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[float], S3Store]]:
    """Makes stores whose profile gets keys from a program: KEY0, then KEY1, valid for so long."""
    opened: list[S3Store] = []
    script = tmp_path / "issue.py"
    script.write_text(_ISSUE)

    def make(valid_s: float) -> S3Store:
        config = tmp_path / "config"
        config.write_text(
            "[profile issued]\nregion = us-east-1\n"
            f"credential_process = {sys.executable} {script} {tmp_path / 'state'} {valid_s}\n"
        )
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        settings = S3Settings(
            bucket=f"keys-{secrets.token_hex(6)}",
            endpoint_url=line.endpoint,
            profile="issued",
            part_bytes=PART,
            streams=2,
        )
        store = S3Store(settings, clock=FakeClock())
        opened.append(store)
        store._calls.once(lambda client: client.create_bucket(Bucket=settings.bucket))
        return store

    yield make
    for store in opened:
        store.close()


def _keys(proxy: S3Proxy) -> list[str]:
    """The access keys that signed the requests, in order, repetitions left out."""
    found: list[str] = []
    for seen in proxy.seen:
        key = seen.headers["authorization"].partition("Credential=")[2].partition("/")[0]
        if not found or found[-1] != key:
            found.append(key)
    return found


def test_keys_that_run_out_are_renewed_before_they_do(
    open_issued: Callable[[float], S3Store], line: S3Proxy
) -> None:
    """CASE S13: keys valid for five minutes are asked for anew during an upload, which finishes."""
    store = open_issued(300.0)
    line.forget()
    assert store.put("k", BODY, mode=CREATE) is PutOutcome.WRITTEN
    assert len(_keys(line)) >= 4, "each part was signed with newer keys"
    assert store.get("k") == BODY


@pytest.mark.parametrize("code", ["ExpiredToken", "TokenRefreshRequired"])
def test_keys_that_ended_early_are_read_again(
    open_issued: Callable[[float], S3Store], line: S3Proxy, code: str
) -> None:
    """CASE S13: revoked mid upload while they look valid: new ones are fetched, no part is lost."""
    store = open_issued(36_000.0)
    line.add("PUT", "partNumber=", Reply(400, code), nth=2, times=99, signed="KEY0")
    assert store.put("k", BODY, mode=CREATE) is PutOutcome.WRITTEN
    assert _keys(line)[0] == "KEY0"
    assert _keys(line)[-1] == "KEY1"
    assert store.get("k") == BODY
    assert not any(seen.is_abort for seen in line.seen)


def test_reads_get_new_keys_too(open_issued: Callable[[float], S3Store], line: S3Proxy) -> None:
    """CASE S13: whole, in ranges, listed, asked about: every read goes on with the new keys."""
    store = open_issued(36_000.0)
    store.put("k", BODY, mode=CREATE)
    for method in ("GET", "HEAD"):
        line.add(method, "", Reply(400, "ExpiredToken"), times=99, signed="KEY0")
    assert store.get("k", ByteRange(5, 50)) == BODY[5:50]
    assert store.get("k") == BODY
    assert [info.key for info in store.list("")] == ["k"]
    assert store.head("k").size_bytes == len(BODY)


def test_many_threads_fetch_new_keys_once(
    open_issued: Callable[[float], S3Store], line: S3Proxy
) -> None:
    """CASE S13: twenty requests that are refused at once make one new client, not twenty."""
    store = open_issued(36_000.0)
    line.add("PUT", "/t", Reply(400, "ExpiredToken"), times=999, signed="KEY0")
    barrier = threading.Barrier(20)

    def write(number: int) -> None:
        barrier.wait(30)
        store.put(f"t{number}", b"x", mode=CREATE)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(store.list("t"))) == 20
    assert set(_keys(line)) == {"KEY0", "KEY1"}


def test_keys_that_stay_refused_end_cleanly(
    open_issued: Callable[[float], S3Store], line: S3Proxy
) -> None:
    """CASE S13: new keys that are refused as well: an abort, a named error, futures resolved."""
    store = open_issued(36_000.0)
    line.add("PUT", "partNumber=", Reply(400, "ExpiredToken"), nth=2, times=99)
    with Uploader(streams=2) as uploader:
        futures = [uploader.submit(store, key, BODY, CREATE) for key in ("a", "b")]
    for future in futures:
        failure = future.exception()
        assert isinstance(failure, StorageError)
        assert failure.kind is Kind.CREDENTIALS
        assert "renew" in str(failure.hint)
    assert list(store.incomplete_uploads("")) == []


def test_keys_that_were_given_are_not_looked_for_elsewhere(
    open_s3: Callable[..., S3Store], proxy: S3Proxy
) -> None:
    """CASE S13: keys from the caller's hand cannot be renewed: said at once, after one request."""
    store = open_s3()
    proxy.add("PUT", "/k", Reply(400, "ExpiredToken"), times=9)
    with pytest.raises(StorageError) as caught:
        store.put("k", b"x", mode=CREATE)
    assert caught.value.kind is Kind.CREDENTIALS
    assert len(proxy.seen) == 1


_MALFORMED = "AuthorizationHeaderMalformed"


def test_a_request_signed_for_the_wrong_region_is_signed_again(
    open_s3: Callable[..., S3Store], proxy: S3Proxy
) -> None:
    """A store that names the bucket's region is asked again with it, and every request after."""
    store = open_s3(region="us-east-1")
    elsewhere = Reply(400, _MALFORMED, "wrong region", more="<Region>eu-west-1</Region>")
    for method in ("PUT", "GET"):
        proxy.add(method, "", elsewhere, times=99, signed="/us-east-1/s3/")
    assert store.put("k", b"x", mode=CREATE) is PutOutcome.WRITTEN
    assert store.get("k") == b"x"
    assert "/eu-west-1/s3/" in proxy.seen[-1].headers["authorization"]


def test_a_wrong_region_that_nobody_corrects_has_a_name(
    open_s3: Callable[..., S3Store], proxy: S3Proxy
) -> None:
    """What both regions refuse is a setting, and the hint is the region that the store named."""
    store = open_s3(region="us-east-1")
    elsewhere = Reply(400, _MALFORMED, "wrong region", more="<Region>eu-west-1</Region>")
    proxy.add("PUT", "", elsewhere, times=99)
    with pytest.raises(InvalidInputError, match="us-east-1") as caught:
        store.put("k", b"x", mode=CREATE)
    assert caught.value.kind is Kind.SETTING
    assert "'eu-west-1'" in str(caught.value.hint)


def test_a_bucket_elsewhere_without_a_name_is_still_a_setting(
    open_s3: Callable[..., S3Store], proxy: S3Proxy
) -> None:
    """An endpoint that redirects everything (http to https) ends in an error, not in a loop."""
    proxy.add("PUT", "", Reply(301, "PermanentRedirect"), times=99)
    proxy.add("HEAD", "", Reply(301), times=99)
    with pytest.raises(InvalidInputError) as caught:
        open_s3().put("k", b"x", mode=CREATE)
    assert caught.value.kind is Kind.SETTING
    assert "own region" in str(caught.value.hint)
    assert len(proxy.seen) == 2


@pytest.mark.parametrize("minutes", [-20, 20])
def test_a_clock_that_is_wrong_has_a_name(
    open_s3: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    """CASE S12: twenty minutes off either way, a real server refuses, and the error says why."""
    store = open_s3()
    store.put("k", b"x", mode=CREATE)
    right = botocore.auth.get_current_datetime
    monkeypatch.setattr(
        botocore.auth,
        "get_current_datetime",
        lambda *args, **options: right(*args, **options) + timedelta(minutes=minutes),
    )
    with pytest.raises(StorageError) as caught:
        store.get("k")
    assert caught.value.kind is Kind.CLOCK_SKEW
    assert "NTP" in str(caught.value.hint)


def test_the_settings_of_a_store_show_no_secret() -> None:
    """What is logged of a store, its settings or its errors never has a key in it."""
    settings = S3Settings(
        bucket="bucket", access_key="AKIDEXAMPLE", secret_key="s3cr3t", session_token="t0ken"
    )
    shown = json.dumps([repr(settings), repr(S3Store(settings)), settings.url, settings.where])
    assert not any(secret in shown for secret in ("AKIDEXAMPLE", "s3cr3t", "t0ken"))
