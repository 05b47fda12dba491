"""A stager that outlives its engine stages for nobody: one that an engine started ends with it.

SIGTERM and a closed stdin end it after the request in flight, with exit code 0; its updates are
removed, and what a rank has mapped stays readable to it. A store that does not answer does not end
it: the ranks are told, and it goes on.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltastore.cli.connection import Watched
from deltastore.cli.files import typed_errors
from deltastore.cli.observing import Observing
from deltastore.cli.output import one_line, size_text
from deltastore.cli.signals import ring_on_sigterm
from deltastore.clock import SystemClock
from deltastore.errors import ConflictError, Kind
from deltastore.events import Event, VersionStaged, both
from deltastore.ids import check_name
from deltastore.pipeline.stager import Stager
from deltastore.storage.observed import Observers
from deltastore.storage.store_use import UseCounter
from deltastore.storage.url import split_run_url

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.cli.connection import Connection
    from deltastore.cli.output import Document, Output
    from deltastore.config import FollowerSettings
    from deltastore.format.signing import TrustedKeys
    from deltastore.storage.observed import StoreObserver

NAME = "stager"
_OF_A_SPOOL = ("ranks", "whole")  # whoever comes first, stager or engine, makes one of them
_OF_A_NEW_DISK = {"lost+found"}


@dataclass(frozen=True, slots=True)
class Staging:
    """How to stage.

    Args:
        folder: where the stager meets the ranks of its host.
        until_stdin_ends: whether a closed stdin ends it.
        region_name: what events and metrics call the bucket's region; None: as the run calls home.
    """

    folder: Path
    settings: FollowerSettings
    until_stdin_ends: bool = False
    observing: Observing = Observing()  # noqa: RUF009 - it is frozen
    region_name: str | None = None
    trusted: TrustedKeys | None = None


def require_spool(folder: Path) -> None:
    """Refuse a folder that holds something and is no spool: a mistyped one gets no files of ours.

    Raises ConflictError(output_exists), and what the system says of the folder.
    """
    with typed_errors(folder):
        try:
            folders = {path.name: path.is_dir() for path in folder.iterdir()}
        except FileNotFoundError:
            return  # it is made
    if folders.keys() - _OF_A_NEW_DISK and not any(folders.get(name) for name in _OF_A_SPOOL):
        raise ConflictError(
            f"{str(folder)!r} holds other files, and is no stager's folder",
            kind=Kind.OUTPUT_EXISTS,
            hint="name a new or an empty folder",
        )


def stage_run(run_url: str, connection: Connection, staging: Staging, output: Output) -> None:
    """Stage a run for this host until told to stop.

    Raises InvalidInputError(lease_held) when the folder has its stager, ConflictError
    (output_exists) when it is something else, and what opening the run raises.
    """
    require_spool(staging.folder)
    if staging.region_name is not None:
        check_name(staging.region_name, "region name")
    stopping = threading.Event()
    ring_on_sigterm(stopping.set)
    if staging.until_stdin_ends:
        threading.Thread(target=_watch_stdin, args=(stopping,), name="stdin", daemon=True).start()
    clock = SystemClock()
    with ExitStack() as stack:
        sink, metrics = staging.observing.begin(stack, split_run_url(run_url)[1], clock)
        counter, region = UseCounter(), staging.region_name
        if region is None and metrics is not None:
            region = connection.home_name(run_url)
        told: tuple[StoreObserver, ...] = (counter,) if metrics is None else (counter, metrics)
        watched = Watched(Observers(told), region)
        streams = staging.settings.streams
        run = stack.enter_context(connection.run(run_url, streams=streams, watched=watched))
        document: Document = {"run": run.name, "folder": str(staging.folder), "version": None}
        document |= {"region": run.region, "read_bytes": 0, "parts": 0, "nnz": 0, "seconds": 0.0}

        def tell(event: Event) -> None:
            if isinstance(event, VersionStaged):
                row = {"version": event.version, "read_bytes": event.size_bytes, "nnz": event.nnz}
                row |= {"parts": event.parts}
                _emit(document | row | {"seconds": round(event.stage_s, 3)}, output)

        with typed_errors(staging.folder):
            stager = Stager(
                run,
                staging.folder,
                name=NAME,
                clock=clock,
                settings=staging.settings,
                sink=both(tell, sink),
                trusted=staging.trusted,
                use=counter,
            )
        _emit(document, output)
        stager.run(stopping)


def _watch_stdin(stopping: threading.Event) -> None:
    while os.read(0, 1 << 12):
        continue  # what it says is of no interest, only that it ends
    stopping.set()


def _emit(document: dict[str, Any], output: Output) -> None:
    if output.as_json:
        text = json.dumps(document, ensure_ascii=True, allow_nan=False)
    elif document["version"] is None:
        text = one_line(f"{document['run']}: staging in {document['folder']}")
    else:
        size, seconds = size_text(document["read_bytes"]), document["seconds"]
        text = f"version {document['version']}: {document['nnz']} changes, {size}, {seconds} s"
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
