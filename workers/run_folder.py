"""Processes that agree on file names by habit stop agreeing: the run's folder is described once.

    events/<worker>.jsonl       what each worker did
    scratch/<worker>/           config and tokenizer files fetched from the bucket
    trainer_state.safetensors   the trainer's serving state after its last step
    trainer_done.json           its version, policy hash and fingerprint: the run is over
    stop.json                   {"version": v}: everybody catches up to v, reports, and leaves
    actors/<id>.json            an actor's last version, policy hash and whole fingerprint

Files appear whole: written beside their place, then renamed.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from deltastore.errors import FormatError, Kind
from deltastore.ids import check_name, check_version

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.format.fingerprint import Fingerprint
    from deltastore.pipeline.engine_control import ServedVersion
    from deltastore.repository.points import ActiveVersion

TRAINER = "trainer"  # the trainer's name as a worker


@dataclass(frozen=True, slots=True)
class FinalReport:
    """The last thing a worker says: where its live weights are, by a whole pass over them."""

    worker: str
    version: int
    policy_hash: str
    fingerprint: str

    @classmethod
    def of(
        cls, worker: str, active: ActiveVersion | ServedVersion, fingerprint: Fingerprint
    ) -> FinalReport:
        """The report of a worker at `active` whose live weights have that fingerprint."""
        return cls(worker, active.version, active.policy_hash, str(fingerprint))


class RunFolder:
    """The local folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def events(self, worker: str) -> Path:
        """Where a worker's events go."""
        return self.path / "events" / f"{check_name(worker, 'worker')}.jsonl"

    def scratch(self, worker: str) -> Path:
        """A worker's own folder for files that can be fetched again."""
        return self.path / "scratch" / check_name(worker, "worker")

    def made_scratch(self, worker: str) -> Path:
        """The same folder, made if it is not there."""
        folder = self.scratch(worker)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def trainer_state(self) -> Path:
        """The trainer's serving state after its last step."""
        return self.path / "trainer_state.safetensors"

    @property
    def trainer_done(self) -> Path:
        """The trainer's final report."""
        return self.path / "trainer_done.json"

    @property
    def stop_file(self) -> Path:
        """What tells everybody to finish."""
        return self.path / "stop.json"

    def actor_report(self, actor_id: str) -> Path:
        """An actor's final report."""
        return self.path / "actors" / f"{check_name(actor_id, 'actor id')}.json"

    def ask_to_stop(self, version: int) -> None:
        """Tell every worker to catch up to `version`, report, and leave."""
        write_whole_file(self.stop_file, _json({"version": check_version(version)}))

    def read_stop(self) -> int | None:
        """The version to stop at, once somebody has asked for it."""
        try:
            document = json.loads(self.stop_file.read_bytes())
            return check_version(document["version"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as err:
            raise FormatError(
                f'{self.stop_file} is not {{"version": number}}', kind=Kind.FIELD
            ) from err

    def report(self, path: Path, report: FinalReport) -> None:
        """Write a final report."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole_file(path, _json(asdict(report)))


def read_report(path: Path) -> FinalReport:
    """Read a final report; FormatError(field) if it is none."""
    try:
        return FinalReport(**json.loads(path.read_bytes()))
    except (ValueError, TypeError) as err:
        raise FormatError(f"{path} is not a final report", kind=Kind.FIELD) from err


def write_whole_file(path: Path, body: bytes) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"
