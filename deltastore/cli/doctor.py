"""A run that an engine cannot follow is noticed when the first version does not come: ask before.

`deltastore doctor` starts the engine here, as a server would be, and says what it found: what is
covered, what has to be reloaded whole, what memory that takes, how long a pause will be.
"""

from __future__ import annotations

import json
import os
from pathlib import Path  # noqa: TC003 - the framework evaluates annotations at run time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltastore.cli.options import (  # noqa: TC001 - evaluated at run time, too
    AsJson,
    EndpointUrl,
    Profile,
    Region,
)
from deltastore.cli.output import Output, one_line, share_text, size_text
from deltastore.errors import InvalidInputError, Kind

if TYPE_CHECKING:
    from rich.console import RenderableType

    from deltastore.adapters.vllm.inspection import Inspection, MeasuredPause
    from deltastore.cli.output import Document
    from deltastore.pipeline.engine_control import RankStatus


def doctor(
    run_url: Annotated[
        str, typer.Option("--run", metavar="RUN_URL", help="The run to follow.", show_default=False)
    ],
    model: Annotated[
        Path,
        typer.Option(
            "--model", metavar="DIR", help="Checkpoint folder that the engine loads.", exists=True
        ),
    ],
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", min=1, max=64, help="Ranks of the engine.")
    ] = 1,
    settings: Annotated[
        str,
        typer.Option(
            "--settings",
            metavar="JSON",
            help='More of the section "deltastore": {"allow_dense": true, "unused": ["mtp.*"]}.',
        ),
    ] = "{}",
    engine: Annotated[
        str,
        typer.Option("--engine", metavar="JSON", help='Arguments of vllm.LLM: {"dtype": "auto"}.'),
    ] = "{}",
    pause: Annotated[
        bool, typer.Option("--pause/--no-pause", help="Measure the pause of an activation.")
    ] = True,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Start vLLM here and say whether, and how well, it would follow a run."""
    connection = {"endpoint": endpoint_url, "region": region, "profile": profile}
    section = {
        **{name: value for name, value in connection.items() if value is not None},
        **_object(settings, "--settings"),
        "run": run_url,
    }
    _examine(
        model.absolute(),
        section,
        tensor_parallel=tensor_parallel,
        more=_object(engine, "--engine"),
        pause=pause,
        output=Output(as_json),
    )


def _examine(
    model: Path,
    section: dict[str, Any],
    *,
    tensor_parallel: int,
    more: dict[str, Any],
    pause: bool,
    output: Output,
) -> None:
    import threading

    _quieten_engine(tensor_parallel)
    from deltastore.adapters.vllm.inspection import started_engine
    from deltastore.adapters.vllm.settings import parse_settings
    from deltastore.adapters.vllm.versions import SUPPORTED, find_facts, require_supported
    from deltastore.cli.connection import Connection
    from deltastore.clock import SystemClock
    from deltastore.repository.resolve import find_head

    require_supported(find_facts())
    found = parse_settings(section, {})
    connection = Connection(found.endpoint, found.region, found.profile)
    with connection.run(found.run) as run:
        newest = find_head(run)
        tensors, elements = len(run.layout), run.layout.elements
    never, measured = threading.Event(), None
    with started_engine(
        model, section, SystemClock(), tensor_parallel=tensor_parallel, more=more
    ) as inspection:
        statuses = inspection.follow()
        if pause:
            measured = _pause(inspection, model, never, newest)
    document: Document = {
        "run": found.run,
        "model": str(model),
        "supported": [f"{major}.{minor}" for major, minor in SUPPORTED],
        "installed": find_facts().version,
        "tensor_parallel": tensor_parallel,
        "head": newest,
        "tensors": tensors,
        "elements": elements,
        **_covered(statuses),
        "pause": None if measured is None else _pause_document(measured),
        "ok": True,
    }
    output.emit(document, lambda: _render(document))


def _quieten_engine(tensor_parallel: int) -> None:
    """Before vLLM is imported: stdout is the result's, and one rank needs no process of its own."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if tensor_parallel == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def _pause(inspection: Inspection, model: Path, never: Any, newest: int) -> MeasuredPause:
    """Of the run's own last versions, or of a made-up one."""
    measured = inspection.pause_of_run(never, newest=newest)
    return measured or inspection.pause_of_made_up(model, never)


def _covered(statuses: list[RankStatus]) -> Document:
    first = statuses[0]
    return {
        "version": None if first.active is None else first.active.version,
        "policy_hash": None if first.active is None else first.active.policy_hash,
        "coverage": dict(first.coverage),
        "dense_share": max(one.dense_share for one in statuses),
        "shadow_bytes": sum(one.shadow_bytes for one in statuses),
        "scratch_bytes": max(one.scratch_bytes for one in statuses),
    }


def _pause_document(measured: MeasuredPause) -> Document:
    return {
        "source": measured.source,
        "base_version": measured.base_version,
        "version": measured.version,
        "nnz": measured.nnz,
        "density": measured.density,
        "seconds": round(measured.seconds, 6),
    }


def _render(document: Document) -> RenderableType:
    from rich.table import Table

    coverage, measured = document["coverage"], document["pause"]
    table = Table(show_header=False, box=None, pad_edge=False)
    dense = coverage.get("dense_names", [])
    rows = [
        ("vLLM", f"{document['installed']} (supported: {', '.join(document['supported'])})"),
        ("run", f"{document['run']}, HEAD {document['head']}"),
        ("weights are at", f"version {document['version']}"),
        ("tensors", f"{document['tensors']}, of them {coverage.get('placed')} written in place"),
        ("reloaded whole", f"{coverage.get('dense', 0)}, {_share(document)} of the bytes"),
        *[("", one_line(f"{name}: {why}")) for name, why in dense[:10]],
        ("unused", ", ".join(coverage.get("unused", [])[:10]) or "none"),
        ("not filled", ", ".join(coverage.get("unfilled", [])[:10]) or "none"),
        ("shadow", size_text(document["shadow_bytes"]) + " on the host, of all ranks"),
        ("scratch", size_text(document["scratch_bytes"]) + " per rank"),
        ("expected pause", "not measured" if measured is None else _pause_text(measured)),
        ("verdict", "this engine follows the run"),
    ]
    for name, text in rows:
        table.add_row(name, text)
    return table


def _share(document: Document) -> str:
    coverage = document["coverage"]
    return share_text(int(coverage.get("dense_bytes", 0)), int(coverage.get("total_bytes", 0)))


def _pause_text(measured: Document) -> str:
    if measured["source"] == "run":
        of = f"versions {measured['base_version']} to {measured['version']} of the run"
    else:
        of = f"a made-up change of {100 * measured['density']:.2g} %"
    return f"{1000 * measured['seconds']:.1f} ms for {of}"


def _object(text: str, option: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidInputError(
            f"{option} is not a JSON object: {text!r}",
            kind=Kind.SETTING,
            hint=f"{option} '{{\"name\": value}}'",
        )
    return found
