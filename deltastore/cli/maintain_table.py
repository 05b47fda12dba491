"""A thousand deletions printed one by one are not read: people get counts, reasons and examples."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from deltastore.cli.output import Document, one_line, size_text

if TYPE_CHECKING:
    from rich.table import Table

MAX_REASONS = 6

__all__ = ["Document", "outcome_table"]


def outcome_table(document: Document) -> Table:
    """What a round of maintenance did, task by task."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    plan = document["mode"] == "plan"
    for task, describe in _DESCRIBE.items():
        part = document[task]
        if part is None:
            continue
        for number, text in enumerate(describe(part, plan)):
            table.add_row("" if number else task, one_line(text))
    return table


def _anchors(part: Document, plan: bool) -> list[str]:
    chain = f"{part['chain_links']} links, {size_text(part['chain_bytes'])}"
    if part["written"] is not None:
        return [f"made anchor {part['written']}, {size_text(part['size_bytes'])}"]
    if part["due"] is None:
        return [f"none due: {chain} after the whole state of {part['start']}"]
    if plan:
        return [f"anchor {part['due']} is due: {chain} after {part['start']}"]
    return [f"anchor {part['due']} was made by another worker"]


def _composites(part: Document, plan: bool) -> list[str]:
    words = [f"{len(part['written'])} made, {len(part['missing'])} missing"]
    if part["missing"]:
        shown = ", ".join(f"{base}-{version}" for base, version in part["missing"][:8])
        words.append(f"missing: {shown}{', ...' if len(part['missing']) > 8 else ''}")
    if part["failed"]:
        shown = ", ".join(f"{base}-{version}" for base, version in part["failed"][:8])
        words.append(f"could not be made: {shown} (`deltastore verify --deep` says why)")
    return words


def _retention(part: Document, plan: bool) -> list[str]:
    floor = f"floor {part['floor']}"
    if part["planned_floor"] != part["floor"]:
        floor += f", would be raised to {part['planned_floor']}"
    return [f"HEAD {part['head']}, {floor}", *_deletions(part)]


def _deletions(part: Document) -> list[str]:
    what = f"{len(part['deletions'])} objects, {size_text(part['deletions_bytes'])}"
    if part["deleted"]:
        return [f"deleted {what}"]
    if not part["deletions"]:
        return ["nothing to delete"]
    reasons = Counter(one["reason"] for one in part["deletions"])
    common = [f"{count} x {reason}" for reason, count in reasons.most_common(MAX_REASONS)]
    if len(reasons) > MAX_REASONS:
        common.append(f"and {len(reasons) - MAX_REASONS} other reasons: see --json")
    return [f"would delete {what} (--execute does)", *common]


def _janitor(part: Document, plan: bool) -> list[str]:
    uploads = len(part["idle_uploads"])
    return [*_deletions(part), *([f"{uploads} unfinished uploads are idle"] if uploads else [])]


def _replicate(part: Document, plan: bool) -> list[str]:
    if not part["behind"]:
        return [f"every relay holds version {part['head']}"]
    behind = [f"not at version {part['head']}: {', '.join(part['behind'])}"]
    return behind + [f"{p['region']}: {p['kind']}: {p['message']}" for p in part["problems"]]


_DESCRIBE = {
    "replicate": _replicate,
    "anchors": _anchors,
    "composites": _composites,
    "retention": _retention,
    "janitor": _janitor,
}
