"""Two stores under one protocol are two protocols until one suite has passed on both.

Subclass `StoreTests` and give a `store` fixture with an empty store. What a file system cannot do
is switched off by a class attribute with its reason, not by a skip inside a test. A store that has
incomplete uploads must say how one comes to be: `leave_unfinished`.
"""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from deltastore.errors import (
    ConflictError,
    FormatError,
    InvalidInputError,
    Kind,
    NotFoundError,
)
from deltastore.ids import new_token
from deltastore.storage.store import ByteRange, ObjectStore, PutMode, PutOutcome
from deltastore.storage.uploads import abort_idle_uploads, incomplete_uploads_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CREATE, OVERWRITE = PutMode.CREATE, PutMode.OVERWRITE
_RACE_WAIT_S = 30.0
_DAY_S = 86_400.0


def _keys(store: ObjectStore, prefix: str = "", start_after: str | None = None) -> list[str]:
    return [info.key for info in store.list(prefix, start_after=start_after)]


class StoreTests:
    """What every ObjectStore does. All of it must pass on a store that is a run's home."""

    atomic_create: bool = True
    """False for a store that may be a relay but not a home."""
    race_rounds: int = 5
    large_bytes: int = 300_000
    """A body that the store has to send in several pieces."""
    folder_order: bool = False
    """True for a store that is a tree inside: it lists folder `a` before `a-b`, where the bytes of
    `a-b` come before those of `a/`, and starts after a folder at its end. Inside one folder, which
    is what a run lists, nothing differs.
    """

    def leave_unfinished(self, store: ObjectStore, key: str) -> None:
        """Do to the store what a put of `key` does that is killed half way."""

    def ordered(self, keys: Iterable[str]) -> list[str]:
        """The keys in the order in which this store lists them."""
        return sorted(keys, key=lambda key: key.split("/")) if self.folder_order else sorted(keys)

    def test_what_was_put_is_read_back(self, store: ObjectStore) -> None:
        """A get returns the bytes of the put, whatever they are."""
        for body in (b"x", bytes(range(256)) * 40, b"\r\n\0\xff" * 3):
            key = f"a/{new_token()}"
            assert store.put(key, body, mode=CREATE) is PutOutcome.WRITTEN
            assert store.get(key) == body
            assert isinstance(store.get(key), bytes)

    def test_every_kind_of_body_is_taken(self, store: ObjectStore) -> None:
        """Bytes, bytearrays and views, contiguous slices of them too, store the same bytes."""
        whole = bytes(range(200))
        bodies: Sequence[bytes | bytearray | memoryview] = (
            whole[50:150],
            bytearray(whole[50:150]),
            memoryview(whole)[50:150],
            memoryview(bytearray(whole))[50:150],
        )
        for number, body in enumerate(bodies):
            store.put(f"body-{number}", body, mode=CREATE)
            assert store.get(f"body-{number}") == whole[50:150]

    def test_an_empty_object_is_an_object(self, store: ObjectStore) -> None:
        """CASE S7: zero bytes are stored, read, listed and compared like any others."""
        assert store.put("empty", b"", mode=CREATE) is PutOutcome.WRITTEN
        assert store.put("empty", b"", mode=CREATE) is PutOutcome.ALREADY_OURS
        assert store.get("empty") == b""
        assert store.head("empty").size_bytes == 0
        assert _keys(store) == ["empty"]
        with pytest.raises(InvalidInputError):
            store.get("empty", ByteRange(0, 1))

    def test_a_large_object_is_read_back(self, store: ObjectStore) -> None:
        """A body above the store's part size comes back whole and in every range."""
        body = _pattern(self.large_bytes)
        assert store.put("large", body, mode=CREATE) is PutOutcome.WRITTEN
        assert store.head("large").size_bytes == len(body)
        assert store.get("large") == body
        middle = len(body) // 2
        for start, end in ((0, len(body)), (1, len(body) - 1), (middle, middle + 1)):
            assert store.get("large", ByteRange(start, end)) == body[start:end]
        assert store.put("large", body, mode=CREATE) is PutOutcome.ALREADY_OURS
        with pytest.raises(ConflictError):
            store.put("large", body[:-1] + b"!", mode=CREATE)
        with pytest.raises(ConflictError):
            store.put("large", body + b"!", mode=CREATE)
        assert store.get("large") == body

    def test_a_digest_that_is_known_changes_nothing(self, store: ObjectStore) -> None:
        """A put whose caller says the body's SHA-256 stores, compares and conflicts as any other,
        whether the body is sent as it is, piece by piece, or in parts."""
        for number, size_bytes in enumerate((0, 9, 300_000, self.large_bytes)):
            key, body = f"known-{number}", _pattern(size_bytes)
            known = hashlib.sha256(body).hexdigest()
            assert store.put(key, body, mode=CREATE, sha256=known) is PutOutcome.WRITTEN
            assert store.put(key, body, mode=CREATE, sha256=known) is PutOutcome.ALREADY_OURS
            assert store.get(key) == body
            other = body + b"!"
            known = hashlib.sha256(other).hexdigest()
            with pytest.raises(ConflictError):
                store.put(key, other, mode=CREATE, sha256=known)
            assert store.get(key) == body

    def test_what_is_read_whole_is_bounded(
        self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An object larger than any document is not read without a range, whoever put it there;
        ranges of it are."""
        monkeypatch.setattr("deltastore.storage.rules.MAX_UNRANGED_BYTES", 1000)
        body = _pattern(1001)
        store.put("most", body[1:], mode=CREATE)
        assert store.get("most") == body[1:]
        store.put("more", body, mode=CREATE)
        with pytest.raises(FormatError, match="1001 bytes") as refused:
            store.get("more")
        assert (refused.value.kind, refused.value.key) == (Kind.LIMIT, "more")
        assert store.get("more", ByteRange(0, 1001)) == body

    def test_create_keeps_what_is_there(self, store: ObjectStore) -> None:
        """CASE S1: a create of the same bytes is ours, of others a conflict; nothing changes."""
        store.put("k", b"first", mode=CREATE)
        assert store.put("k", b"first", mode=CREATE) is PutOutcome.ALREADY_OURS
        for other in (b"other", b"firsT", b"", b"first and more"):
            with pytest.raises(ConflictError) as caught:
                store.put("k", other, mode=CREATE)
            assert caught.value.kind is Kind.OBJECT_EXISTS
            assert caught.value.key == "k"
        assert store.get("k") == b"first"

    def test_overwrite_replaces(self, store: ObjectStore) -> None:
        """An overwrite is seen by the next get, head and list, also when it is shorter."""
        for body in (b"one", b"and two", b"", b"3"):
            assert store.put("hints/head", body, mode=OVERWRITE) is PutOutcome.WRITTEN
            assert store.get("hints/head") == body
            assert store.head("hints/head").size_bytes == len(body)
            assert [i.size_bytes for i in store.list("hints/")] == [len(body)]

    def test_one_of_several_racing_creates_wins(self, store: ObjectStore) -> None:
        """CASE C7: of racing creates of different bodies one is kept, and only its writer won."""
        for number in range(self.race_rounds):
            bodies = [bytes([65 + n]) * 2000 for n in range(4)]
            winners = _race(store, f"race/{number}", bodies)
            held = store.get(f"race/{number}")
            if self.atomic_create:
                assert winners == [held]
            else:  # a relay: whole, but perhaps not the first
                assert held in winners

    def test_racing_creates_of_the_same_bytes_all_succeed(self, store: ObjectStore) -> None:
        """Several writers of one content-named object disturb each other in no way."""
        winners = _race(store, "same", [b"the same" * 100] * 4)
        assert len(winners) >= 1
        assert store.get("same") == b"the same" * 100

    def test_absent_keys_are_not_found(self, store: ObjectStore) -> None:
        """Get, ranged get and head of an absent key raise NotFoundError(object_missing)."""
        store.put("folder/there", b"x", mode=CREATE)
        for key in ("absent", "folder", "folder/absent", "folder/there/below"):
            for call in (
                lambda key: store.get(key),
                lambda key: store.get(key, ByteRange(0, 1)),
                lambda key: store.head(key),
            ):
                with pytest.raises(NotFoundError) as caught:
                    call(key)
                assert caught.value.kind is Kind.OBJECT_MISSING
                assert caught.value.key == key

    def test_an_absence_is_not_remembered(self, store: ObjectStore) -> None:
        """CASE S8: a key that was absent a moment ago is found as soon as it is written."""
        with pytest.raises(NotFoundError):
            store.head("v/1")
        assert _keys(store, "v/") == []
        store.put("v/1", b"x", mode=CREATE)
        assert store.head("v/1").size_bytes == 1
        assert _keys(store, "v/") == ["v/1"]

    def test_ranges_are_exact(self, store: ObjectStore) -> None:
        """A range gives exactly its bytes; one that is not all there raises, never gives fewer."""
        body = _pattern(1000)
        store.put("k", body, mode=CREATE)
        for start, end in ((0, 1), (0, 1000), (1, 999), (999, 1000), (500, 501)):
            assert store.get("k", ByteRange(start, end)) == body[start:end]
        for start, end in ((0, 1001), (999, 1001), (1000, 1001), (5000, 6000)):
            with pytest.raises(InvalidInputError) as caught:
                store.get("k", ByteRange(start, end))
            assert caught.value.kind is Kind.RANGE

    def test_listings_are_in_key_order(self, store: ObjectStore) -> None:
        """Keys come in the order of their bytes (see `folder_order`), in folders and beside."""
        keys = ["a-b", "a.b", "a/b", "a/b-c", "a/b0/c", "a0", "B", "a/é", "z/1", "z/10", "z/2"]
        for key in keys:
            store.put(key, key.encode(), mode=CREATE)
        assert _keys(store) == self.ordered(keys)
        assert _keys(store, "z/") == ["z/1", "z/10", "z/2"]
        assert [(i.key, i.size_bytes) for i in store.list("z/")] == [
            ("z/1", 3),
            ("z/10", 4),
            ("z/2", 3),
        ]

    def test_listings_begin_where_asked(self, store: ObjectStore) -> None:
        """A prefix may end inside a name; `start_after` is exclusive and need not exist."""
        keys = ["a/1", "a/10", "a/2", "ab/1", "b/1", "b/c/1", "b/c/2", "b/d"]  # both orders agree
        for key in keys:
            store.put(key, b"", mode=CREATE)
        folders = () if self.folder_order else ("b/c",)  # a tree skips the whole folder
        for prefix in ("", "a", "a/", "a/1", "b/c", "b/c/2", "x", "a/1/"):
            assert _keys(store, prefix) == [k for k in keys if k.startswith(prefix)]
            for after in ("a/1", "a/15", "b/c/1", "b/b", "zzz", *folders):
                wanted = [k for k in keys if k.startswith(prefix) and k > after]
                assert _keys(store, prefix, after) == wanted

    def test_deleted_objects_are_gone(self, store: ObjectStore) -> None:
        """Deleted keys are absent at once, others stay, and absent ones do no harm."""
        for key in ("d/1", "d/2", "d/3"):
            store.put(key, b"x", mode=CREATE)
        store.delete(iter(["d/1", "d/3", "d/never", "never/was"]))
        store.delete([])
        assert _keys(store) == ["d/2"]
        with pytest.raises(NotFoundError):
            store.get("d/1")
        assert store.put("d/1", b"another", mode=CREATE) is PutOutcome.WRITTEN

    def test_infos_agree(self, store: ObjectStore) -> None:
        """Head and list say the same of an object: size, age by the store's clock, tag."""
        store.put("k", b"12345", mode=CREATE)
        (listed,) = store.list("k")
        head = store.head("k")
        assert (head.key, head.size_bytes) == (listed.key, listed.size_bytes) == ("k", 5)
        # HTTP dates have whole seconds, listings may have more.
        assert abs(head.last_modified_s - listed.last_modified_s) <= 1.0
        assert head.last_modified_s > 1_000_000.0 - 1

    def test_other_bytes_have_another_tag(self, store: ObjectStore) -> None:
        """Where a store gives tags, an overwrite changes it."""
        store.put("k", b"1", mode=OVERWRITE)
        before = store.head("k").etag
        store.put("k", b"2", mode=OVERWRITE)
        after = store.head("k").etag
        assert before is None or before != after

    def test_keys_that_some_store_cannot_hold_are_refused(self, store: ObjectStore) -> None:
        """Every store refuses the same keys, in every call, before it does anything."""
        for key in (
            *("", "/a", "a/", "a//b", "..", "a/../b", "./a"),
            *("a\0b", "a\nb", "a\\b", "a/.tmp-x", "é" * 600),
        ):
            for call in (
                lambda key: store.put(key, b"", mode=CREATE),
                lambda key: store.get(key),
                lambda key: store.head(key),
                lambda key: store.delete([key]),
            ):
                with pytest.raises(InvalidInputError) as caught:
                    call(key)
                assert caught.value.kind is Kind.NAME
        assert _keys(store) == []

    def test_prefixes_that_leave_the_store_are_refused(self, store: ObjectStore) -> None:
        """A listing cannot be steered out of the store."""
        for prefix in ("/", "../", "a/../", "a//"):
            with pytest.raises(InvalidInputError):
                store.list(prefix)

    def test_keys_with_unusual_characters_work(self, store: ObjectStore) -> None:
        """Spaces, percent signs, plus, quotes and Unicode come back as they went in."""
        keys = self.ordered(["a b", "a%20b", "a+b", "a'\"b", "ключ/日本", "a&b=c", "a#b?c", "~a"])
        for key in keys:
            store.put(key, key.encode(), mode=CREATE)
        assert _keys(store) == keys
        assert [store.get(key) for key in keys] == [key.encode() for key in keys]
        store.delete(keys)
        assert _keys(store) == []

    def test_many_threads_may_use_one_store(self, store: ObjectStore) -> None:
        """CASE S9: fifty threads that begin at once all get their own bytes back."""
        barrier = threading.Barrier(50)

        def work(number: int) -> bool:
            barrier.wait(_RACE_WAIT_S)
            body = f"{number}".encode() * 50
            store.put(f"t/{number}", body, mode=CREATE)
            return store.get(f"t/{number}") == body

        with ThreadPoolExecutor(50) as pool:
            assert all(pool.map(work, range(50)))
        listed = _keys(store, "t/")
        assert len(listed) == 50
        assert all(a < b for a, b in pairwise(listed))

    def test_what_a_killed_put_left_is_found_and_removed(self, store: ObjectStore) -> None:
        """CASE S14: it is no object and in nobody's way; it stays while it may be in use, and can
        be removed by who knows that it is not. A store that keeps no such things has none."""
        self.leave_unfinished(store, "up/a/k")
        assert _keys(store) == []
        assert abort_idle_uploads(store, "", idle_s=_DAY_S, dry_run=False) == ()
        uploads = incomplete_uploads_of(store)
        if uploads is not None:
            (found,) = uploads.incomplete_uploads("")
            assert found.key.startswith("up/a/")
            assert abs(found.idle_s) < 60
            assert [u.upload_id for u in uploads.incomplete_uploads("up/a/")] == [found.upload_id]
            assert list(uploads.incomplete_uploads("up/b")) == []
        assert store.put("up/a/k", b"whole", mode=CREATE) is PutOutcome.WRITTEN
        if uploads is not None:
            assert uploads.abort_upload(found)
            assert list(uploads.incomplete_uploads("")) == []
            uploads.abort_upload(found)  # another janitor was there first: no error
        assert store.get("up/a/k") == b"whole"

    def test_puts_leave_nothing_unfinished(self, store: ObjectStore) -> None:
        """CASE S14: neither a put that succeeds nor one that loses leaves anything behind."""
        body = _pattern(self.large_bytes)
        for outcome in (PutOutcome.WRITTEN, PutOutcome.ALREADY_OURS):
            assert store.put("k", body, mode=CREATE) is outcome
        with pytest.raises(ConflictError):
            store.put("k", body[1:], mode=CREATE)
        store.put("k", body, mode=OVERWRITE)
        uploads = incomplete_uploads_of(store)
        assert uploads is None or list(uploads.incomplete_uploads("")) == []

    def test_a_listing_survives_deletions_while_it_runs(self, store: ObjectStore) -> None:
        """Deleting what a listing has yielded neither stops it nor hides the rest."""
        keys = [f"gc/{n:03}" for n in range(20)]
        for key in keys:
            store.put(key, b"x", mode=CREATE)
        seen = []
        for info in store.list("gc/"):
            seen.append(info.key)
            store.delete([info.key])
        assert seen == keys
        assert _keys(store) == []


def _race(store: ObjectStore, key: str, bodies: Sequence[bytes]) -> list[bytes]:
    barrier = threading.Barrier(len(bodies))

    def create(body: bytes) -> bytes | None:
        barrier.wait(_RACE_WAIT_S)
        try:
            outcome = store.put(key, body, mode=CREATE)
        except ConflictError:
            return None
        return body if outcome is PutOutcome.WRITTEN else None

    with ThreadPoolExecutor(len(bodies)) as pool:
        return [body for body in pool.map(create, bodies) if body is not None]


def _pattern(size_bytes: int) -> bytes:
    """Bytes in which a swapped or shifted piece shows."""
    words = b"".join(n.to_bytes(4, "big") for n in range(-(-size_bytes // 4)))
    return words[:size_bytes]
