"""A figure without its conditions cannot be checked: every row carries its baseline and density.

A benchmark collects rows, prints them as one table, and writes build/bench/NAME.json. Nothing in
either is typed in by hand: values are measured, ratios computed, conditions read from the machine.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

FOLDER = Path("build/bench")


@dataclass(frozen=True, slots=True)
class Target:
    """What a row's value, or its ratio to the baseline, must reach."""

    least: float | None = None
    most: float | None = None
    of_ratio: bool = False

    def holds(self, value: float, ratio: float | None) -> bool:
        """Whether the figure is good enough."""
        figure = ratio if self.of_ratio else value
        if figure is None:
            return False
        above = self.least is None or figure >= self.least
        return above and (self.most is None or figure <= self.most)

    def __str__(self) -> str:
        what = "ratio " if self.of_ratio else ""
        bound = f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"
        return what + bound


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure.

    Args:
        name: what was measured.
        value, unit: the figure.
        baseline: the figure of what it is compared with, in the same unit and run.
        ratio: how many times better than the baseline the value is.
        target: the bound, as text; None where the figure is for information.
        ok: whether the target holds; None without one.
        density: share of elements that change.
        conditions: what else the figure depends on.
    """

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    target: str | None = None
    ok: bool | None = None
    density: float | None = None
    conditions: dict[str, Any] = field(default_factory=dict)


class Report:
    """Collects the rows of one benchmark."""

    def __init__(self, name: str, **conditions: Any) -> None:
        self.name = name
        self.conditions = machine() | conditions
        self.rows: list[Row] = []

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        baseline: float | None = None,
        target: Target | None = None,
        density: float | None = None,
        larger_is_better: bool = True,
        **conditions: Any,
    ) -> Row:
        """Add a figure; the ratio to its baseline says how many times better it is."""
        ratio = None
        if baseline:
            ratio = value / baseline if larger_is_better else baseline / value
        row = Row(
            name,
            value,
            unit,
            baseline,
            ratio,
            None if target is None else str(target),
            None if target is None else target.holds(value, ratio),
            density,
            conditions,
        )
        self.rows.append(row)
        return row

    def finish(self) -> int:
        """Print the table, write the JSON; 0 when every target holds, else 1."""
        console = Console(width=None if os.isatty(1) else 150)
        facts = ", ".join(f"{name} {value}" for name, value in self.conditions.items())
        table = Table(title=f"{self.name}: {facts}")
        for heading in ("what", "value", "unit", "baseline", "ratio", "target", "ok", "density"):
            table.add_column(heading, justify="left" if heading in {"what", "unit"} else "right")
        for row in self.rows:
            table.add_row(
                row.name + "".join(f", {k} {v}" for k, v in row.conditions.items()),
                f"{row.value:.4g}",
                row.unit,
                "" if row.baseline is None else f"{row.baseline:.4g}",
                "" if row.ratio is None else f"{row.ratio:.2f}x",
                row.target or "",
                {None: "", True: "yes", False: "NO"}[row.ok],
                "" if row.density is None else f"{row.density:.3%}",
            )
        console.print(table)
        FOLDER.mkdir(parents=True, exist_ok=True)
        path = FOLDER / f"{self.name}.json"
        document = {
            "name": self.name,
            "conditions": self.conditions,
            "rows": [asdict(row) for row in self.rows],
        }
        path.write_text(json.dumps(document, indent=1) + "\n")
        missed = [row.name for row in self.rows if row.ok is False]
        console.print(f"{path}: {len(missed)} of {len(self.rows)} rows miss their target")
        return 1 if missed else 0


def machine() -> dict[str, Any]:
    """Processor, cores and versions of what the figures depend on."""
    found = {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
    }
    for package in ("numpy", "numba", "zstandard", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
