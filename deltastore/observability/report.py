"""Numbers that scrolled by cannot be shown to anybody: a run leaves one page that says it all.

One self-contained HTML file: no script, no font, no image from elsewhere, everything escaped.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from deltastore.observability.svg import Chart, Series, draw, legend
from deltastore.observability.table import NOTHING, number, seconds, share_of, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deltastore.observability.view import RunView, VersionRow


@dataclass(frozen=True, slots=True)
class Check:
    """Something that had to hold at the end, and whether it did."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Page:
    """What the page says beside the view."""

    title: str
    facts: Sequence[tuple[str, str]]
    """(name, value) tiles on top."""
    checks: Sequence[Check]


def render(view: RunView, page: Page) -> str:
    """Return the whole page."""
    rows = view.published()
    body = "".join(
        [
            f"<h1>{escape(page.title)}</h1>",
            _tiles(page.facts),
            _checks(page.checks),
            '<div class="charts">',
            *(_figure(chart) for chart in _charts(view, rows)),
            "</div>",
            _joins(view),
            _versions(view, rows),
            _notes(view),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(page.title)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _charts(view: RunView, rows: Sequence[VersionRow]) -> list[Chart]:
    accuracy = Series("sampled accuracy", view.accuracies())
    density = Series("density", [(row.version, row.density) for row in rows])
    return [
        Chart("Sampled accuracy", "step", [accuracy], lambda value: f"{value:.2f}", y_max=1.0),
        Chart("Density: changed elements", "version", [density], lambda value: share_of(value)),
        Chart(
            "Bytes per version, logarithmic",
            "version",
            [
                Series("dense", [(row.version, _dense_bytes(row)) for row in rows]),
                Series("delta", [(row.version, _delta_bytes(row)) for row in rows]),
            ],
            size,
            logarithmic=True,
        ),
        Chart(
            "Time per version, logarithmic",
            "version",
            [
                Series("encode", [(row.version, _encode_s(row)) for row in rows]),
                Series("upload", [(row.version, _upload_s(row)) for row in rows]),
                Series("stage, mean", [(row.version, row.stage_s) for row in rows]),
                Series("activate, longest", [(row.version, row.activate_s) for row in rows]),
            ],
            seconds,
            logarithmic=True,
        ),
        _staleness(view),
    ]


def _staleness(view: RunView) -> Chart:
    start_ms = view.first_ms or 0
    end_ms = view.last_ms or start_ms
    series = []
    for name, actor in sorted(view.actors.items()):
        points = [((point.at_ms - start_ms) / 1000, point.staleness) for point in actor.staleness]
        if points:
            until_ms = end_ms if actor.ended_at_ms is None else actor.ended_at_ms
            points.append(((until_ms - start_ms) / 1000, points[-1][1]))
            series.append(Series(name, points))
    marks = [((mark.at_ms - start_ms) / 1000, mark.text) for mark in view.marks]
    return Chart(
        "Staleness: versions behind HEAD",
        "seconds",
        series,
        lambda value: f"{value:g}",
        steps=True,
        whole=True,
        marks=marks,
    )


def _dense_bytes(row: VersionRow) -> float | None:
    return None if row.published is None else row.published.dense_bytes


def _delta_bytes(row: VersionRow) -> float | None:
    return None if row.published is None else row.published.delta_bytes


def _encode_s(row: VersionRow) -> float | None:
    return None if row.published is None else row.published.encode_s


def _upload_s(row: VersionRow) -> float | None:
    return None if row.published is None else row.published.upload_s


def _figure(chart: Chart) -> str:
    names = legend(chart.series) if len(chart.series) > 1 else ""
    return f"<figure><figcaption>{escape(chart.title)}</figcaption>{draw(chart)}{names}</figure>"


def _tiles(facts: Iterable[tuple[str, str]]) -> str:
    tiles = (
        f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in facts
    )
    return f'<section class="tiles">{"".join(tiles)}</section>'


def _checks(checks: Iterable[Check]) -> str:
    items = (
        f'<li class="{"yes" if check.passed else "no"}"><b>{escape(check.name)}</b> '
        f"{escape(check.detail)}</li>"
        for check in checks
    )
    return f'<h2>Final checks</h2><ul class="checks">{"".join(items)}</ul>'


def _joins(view: RunView) -> str:
    cells = [
        (join.actor, f"{join.version}", join.via, size(join.size_bytes), seconds(join.seconds))
        for _, actor in sorted(view.actors.items())
        for join in actor.joins
    ]
    return "<h2>Joins</h2>" + _table(("actor", "version", "from", "bytes", "time"), cells)


def _versions(view: RunView, rows: Sequence[VersionRow]) -> str:
    head = ("version", "step", "accuracy", "density", "changed", "delta", "dense/delta")
    times = ("capture", "encode", "upload", "commit", "total", "stage", "activate")
    cells = []
    for row in rows:
        event = row.published
        if event is None:
            continue
        cells.append(
            (
                f"{event.version}",
                f"{event.step_first}"
                if event.step_first == event.step_last
                else f"{event.step_first}-{event.step_last}",
                number(view.accuracy_of(row)),
                share_of(row.density, 3),
                f"{event.nnz:,}",
                size(event.delta_bytes),
                NOTHING if row.ratio is None else f"{row.ratio:.1f}",
                *(
                    seconds(value)
                    for value in (
                        event.capture_s,
                        event.encode_s,
                        event.upload_s,
                        event.commit_s,
                        event.total_s,
                        row.stage_s,
                        row.activate_s,
                    )
                ),
            )
        )
    return "<h2>Versions</h2>" + _table(head + times, cells)


def _notes(view: RunView) -> str:
    start_ms = view.first_ms or 0
    marks = sorted([*view.marks, *view.problems], key=lambda mark: mark.at_ms)
    noted = [(f"{(mark.at_ms - start_ms) / 1000:.1f} s", mark.text) for mark in marks]
    outcomes = [(name, str(count)) for name, count in sorted(view.outcomes.items())]
    return (
        "<h2>What happened</h2>"
        + _table(("at", "what"), noted)
        + "<h2>Results offered</h2>"
        + _table(("outcome", "count"), outcomes)
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    body = "".join(lines) or f'<tr><td colspan="{len(head)}">none</td></tr>'
    table = f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'


_STYLE = """
:root{--ink:#1b1f24;--paper:#fff;--soft:#6a737d;--line:#e1e4e8;--yes:#116329;--no:#b00020}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--paper:#0d1117;--soft:#9aa4af;
--line:#30363d;--yes:#3fb950;--no:#ff7b72}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:0}
main{max-width:1200px;margin:0 auto;padding:24px}
h1{font-size:24px}h2{font-size:18px;margin-top:32px}
.tiles{display:flex;flex-wrap:wrap;gap:12px}
.tiles div{border:1px solid var(--line);border-radius:8px;padding:10px 16px}
.tiles b{display:block;font-size:19px}.tiles span{color:var(--soft);font-size:13px}
.checks{list-style:none;padding:0}.checks li:before{display:inline-block;width:1.6em}
.yes:before{content:"\\2713";color:var(--yes)}.no:before{content:"\\2717";color:var(--no)}
.no b{color:var(--no)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:20px;margin-top:24px}
figure{margin:0;border:1px solid var(--line);border-radius:8px;padding:12px}
figcaption{font-weight:600}
svg{width:100%;height:auto}
.grid{stroke:var(--line)}.axis{font-size:11px;fill:var(--soft)}.none{fill:var(--soft)}
.mark{stroke:var(--no);stroke-dasharray:4 3}
.legend{font-size:13px}.legend span{margin-right:14px}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:5px}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}
th,td{padding:4px 12px 4px 0;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:500}
"""
