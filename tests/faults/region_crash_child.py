"""Publishes to home and one region again and again, each time in a child that SIGKILLs itself.

Run as a program: `region_crash_child.py HOME_URL FAR_URL FOLDER OPTIONS`. Every child makes the
same run in folders of its own (p0, p1, ...) and dies at another put of version 2: before the store
has seen it, or when the store has answered and nobody has heard it. The first one lives, and says
how many segments there are. Home's manifest waits until the region has all bodies, so that every
death has one outcome. One line of JSON for each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import botocore.session
from botocore.loaders import create_loader

from deltastore.format.kernels import warm_up
from deltastore.pipeline.replicator import Region
from deltastore.repository.run import open_run
from deltastore.storage.url import open_store
from deltastore.storage.wrapper import StoreWrapper
from tests.faults.crash_child import kill_self
from tests.faults.crash_kit import FolderStore
from tests.unit.pipeline.harness import RUN, World

if TYPE_CHECKING:
    from deltastore.storage.store import Body, ObjectStore, PutMode, PutOutcome

BODY, MANIFEST, HINT = "/deltas/", "/versions/", "/hints/head"
_WAIT_S = 60.0
_SEGMENT_BYTES = 32  # every tensor that changed is a segment of its own


@dataclass(frozen=True, slots=True)
class Point:
    """The `nth` put of this kind to this store.

    Args:
        after: once the store has answered; else before it has seen the put.
        rescue: who goes on: the `trainer`, or the `worker` that replicates without one.
    """

    where: str
    what: str
    nth: int
    after: bool
    rescue: str = "trainer"


def points(segments: int) -> list[Point]:
    """Every put of a version with that many segments; where home is ahead, with both rescues."""
    puts = [(BODY, nth) for nth in range(1, segments + 1)] + [(MANIFEST, 1), (HINT, 1)]
    places = [(where, what, nth) for where in ("home", "far") for what, nth in puts]
    every = [Point(*place, after) for place in places for after in (False, True)]
    return [
        *every,
        Point("home", MANIFEST, 1, True, "worker"),
        Point("far", MANIFEST, 1, False, "worker"),
    ]


class Uploaded:
    """How many bodies each store has: home's manifest waits for the region's."""

    def __init__(self) -> None:
        self._counts = {"home": 0, "far": 0}
        self._changed = threading.Condition()

    def note(self, where: str) -> None:
        """One more."""
        with self._changed:
            self._counts[where] += 1
            self._changed.notify_all()

    def wait_for_region(self) -> int:
        """Until the region has as many as home; that number."""
        with self._changed:
            counts = self._counts
            if not self._changed.wait_for(lambda: counts["far"] >= counts["home"], _WAIT_S):
                os._exit(5)
            return counts["home"]


class DeadlyStore(StoreWrapper):
    """A store at one of whose puts this process dies, once it is armed."""

    def __init__(self, inner: ObjectStore, where: str, point: Point | None, up: Uploaded) -> None:
        super().__init__(inner)
        self.armed = False
        self.segments = 0
        self._where = where
        self._point = point if point is not None and point.where == where else None
        self._up = up
        self._lock = threading.Lock()
        self._seen = 0

    def put(self, key: str, body: Body, *, mode: PutMode, sha256: str | None = None) -> PutOutcome:
        """A put, perhaps the last thing that happens."""
        if not self.armed:
            return self.inner.put(key, body, mode=mode, sha256=sha256)
        if self._where == "home" and MANIFEST in key:
            self.segments = self._up.wait_for_region()
        hit = self._hit(key)
        if hit is not None and not hit.after:
            kill_self()
        outcome = self.inner.put(key, body, mode=mode, sha256=sha256)
        if hit is not None:
            kill_self()
        if BODY in key:
            self._up.note(self._where)
        return outcome

    def _hit(self, key: str) -> Point | None:
        point = self._point
        if point is None or point.what not in key:
            return None
        with self._lock:
            self._seen += 1
            return point if self._seen == point.nth else None


def publish(home: ObjectStore, far: ObjectStore, folder: Path, point: Point | None) -> int:
    """Make the run, let a trainer take over, publish version 2; the number of its segments."""
    up = Uploaded()
    deadly = {
        "home": DeadlyStore(home, "home", point, up),
        "far": DeadlyStore(far, "far", point, up),
    }
    world = World(folder, home_store=deadly["home"], region_stores={"far": deadly["far"]})
    publisher = world.publisher(regions=[Region("far", open_run(deadly["far"], RUN), streams=2)])
    assert publisher.wait_regions(_WAIT_S) == []
    publisher._segment_bytes = lambda: _SEGMENT_BYTES
    for store in deadly.values():
        store.armed = True
    world.step(publisher, 1)
    assert publisher.wait_regions(_WAIT_S) == []
    publisher.close()
    return deadly["home"].segments


def warm_client() -> None:
    """Read the description of S3 once for all children: a second of work each."""
    loader = create_loader()
    botocore.session.create_loader = lambda *_: loader
    loader.load_service_model("s3", "service-2")


def main(urls: tuple[str, str], folder: Path, options: dict[str, Any]) -> None:
    """One child that lives, then one for every point."""
    warm_up()
    warm_client()
    stores = [open_store(url, **options) for url in urls]
    plan: list[Point | None] = [None]
    for number in range(200):
        if number == len(plan):
            return
        name, point = f"p{number}", plan[number]
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                home, far = (FolderStore(store, name) for store in stores)
                os.write(send, bytes([publish(home, far, folder / name, point)]))
                os._exit(0)
            finally:
                os._exit(3)
        os.close(send)
        told = os.read(receive, 1)
        os.close(receive)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != (0 if point is None else -signal.SIGKILL):
            sys.exit(f"the child that was to die at {point} ended with {code}")
        if point is None:
            plan += points(told[0])
        row = {"folder": name, "point": None if point is None else asdict(point)}
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()  # else the next child would have this line too


if __name__ == "__main__":
    main((sys.argv[1], sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
