"""Numbers that line up are compared by eye: tables of versions, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.cli.chart import sparkline
from deltastore.cli.output import Document, console, share_text, size_text, stamp_text
from deltastore.cli.stages import STAGES
from deltastore.format.manifest import VersionKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from deltastore.events import VersionPublished
    from deltastore.format.manifest import VersionManifest
    from deltastore.repository.run import Run


def history_table(
    run: Run, manifests: Sequence[VersionManifest], stages: Mapping[int, VersionPublished]
) -> RenderableType:
    """The versions, one a row, and lines of bars: density, size and time of each."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    title = f"{run.name}: {len(run.layout)} tensors, {size_text(run.dense_bytes)} dense"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("version", "kind", "steps", "changed", "density", "size", "of dense"):
        table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
    if stages:
        for name in ("capture", "encode", "upload", "commit", "total"):
            table.add_column(name, justify="right", no_wrap=True)
    table.add_column("created", no_wrap=True)
    table.add_column("policy hash", no_wrap=True)
    for manifest in manifests:
        core = manifest.core
        delta = core.kind is VersionKind.DELTA
        table.add_row(
            str(core.version),
            core.kind.value,
            _steps_text(manifest),
            str(core.nnz) if delta else "-",
            share_text(core.nnz, run.layout.elements) if delta else "-",
            size_text(core.delta_bytes),
            share_text(core.delta_bytes, run.dense_bytes),
            *(_times(stages.get(core.version)) if stages else ()),
            stamp_text(core.created_ms),
            manifest.policy_hash[:12],
        )
    return Group(table, *(Text(line) for line in _bars(run, manifests, stages)))


def _bars(
    run: Run, manifests: Sequence[VersionManifest], stages: Mapping[int, VersionPublished]
) -> list[str]:
    """What changes from version to version, as bars; nothing for fewer than two deltas."""
    deltas = [m.core for m in manifests if m.core.kind is VersionKind.DELTA]
    if len(deltas) < 2:
        return []
    encoding = console().encoding
    elements = run.layout.elements
    changes = [core.nnz for core in deltas]
    sizes = [core.delta_bytes for core in deltas]
    dense = f"{share_text(min(changes), elements)} to {share_text(max(changes), elements)}"
    weights = f"{size_text(min(sizes))} to {size_text(max(sizes))}"
    lines = [
        f"density  {sparkline(changes, encoding=encoding)}  {dense}",
        f"size     {sparkline(sizes, encoding=encoding)}  {weights}",
    ]
    totals = [stages[core.version].total_s for core in deltas if core.version in stages]
    if totals:
        lines.append(
            f"publish  {sparkline(totals, encoding=encoding)}  {min(totals):.3g} s"
            f" to {max(totals):.3g} s"
        )
    return lines


def _times(event: VersionPublished | None) -> list[str]:
    if event is None:
        return ["-"] * len(STAGES)
    return [f"{getattr(event, name):.3g} s" for name in STAGES]


def version_table(
    run: Run, head: int, manifest: VersionManifest, shortcuts: Sequence[Document]
) -> Table:
    """One version, a fact a row."""
    from rich.table import Table

    core = manifest.core
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    rows = [
        ("run", f"{run.name} ({run.record.run_id})"),
        ("version", f"{core.version} of {head}, {core.kind.value}"),
        ("policy hash", manifest.policy_hash),
        ("base", "-" if core.base_version is None else str(core.base_version)),
        ("base policy hash", core.base_policy_hash or "-"),
        ("fingerprint", str(core.fingerprint_after)),
        ("steps", _steps_text(manifest)),
        ("changed", f"{core.nnz} ({share_text(core.nnz, run.layout.elements)})"),
        ("size", f"{size_text(core.delta_bytes)} of {size_text(run.dense_bytes)} dense"),
        ("encodings", ", ".join(core.encodings) or "-"),
        ("generation", str(core.generation)),
        ("created", stamp_text(core.created_ms)),
        ("signed by", ", ".join(s.key_id for s in manifest.signatures) or "nobody"),
    ]
    rows += [("segment", f"{s.key}  {size_text(s.size_bytes)}") for s in core.segments]
    rows += [("file", f"{f.name}  {size_text(f.size_bytes)}") for f in core.files]
    for shortcut in shortcuts:
        base = shortcut["base_version"]
        way = "anchor" if base is None else f"composite from {base}"
        objects = f"{shortcut['objects']} objects"
        rows.append(("shortcut", f"{way}, {size_text(shortcut['size_bytes'])} in {objects}"))
    for row in rows:
        table.add_row(*row)
    return table


def _steps_text(manifest: VersionManifest) -> str:
    first, last = manifest.core.step_first, manifest.core.step_last
    return str(last) if first == last else f"{first}-{last}"
