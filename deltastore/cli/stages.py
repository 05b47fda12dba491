"""Times are in no manifest, or policy hashes would differ: `log` takes them from the event log.

Only events whose policy hash is that of the version in the bucket count: an event log may hold
several runs, and versions that another writer overtook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.cli.files import require_regular, typed_errors
from deltastore.errors import Kind, NotFoundError
from deltastore.events import VersionPublished
from deltastore.observability.jsonl import iter_events

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from deltastore.cli.output import Document
    from deltastore.format.manifest import VersionManifest

STAGES = ("capture_s", "encode_s", "upload_s", "commit_s", "total_s")


def read_stages(
    paths: Sequence[Path], manifests: Iterable[VersionManifest]
) -> dict[int, VersionPublished]:
    """What the event logs say of the publishing of these versions."""
    hashes = {m.core.version: m.policy_hash for m in manifests}
    found: dict[int, VersionPublished] = {}
    for path in paths:
        with typed_errors(path):
            is_there = path.exists()
        if not is_there:
            raise NotFoundError(
                f"{str(path)!r} does not exist", kind=Kind.FILE_MISSING, hint="check --events"
            )
        with typed_errors(path):
            require_regular(path)
            for stamped in iter_events(path):
                event = stamped.event
                if isinstance(event, VersionPublished) and (
                    hashes.get(event.version) == event.policy_hash
                ):
                    found[event.version] = event
    return found


def stages_document(version: int, event: VersionPublished) -> Document:
    """One version's stages as `--json` prints them."""
    times = {name: round(float(getattr(event, name)), 6) for name in STAGES}
    return {"version": version, **times}
