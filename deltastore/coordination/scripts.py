"""A script whose keys are listed in two places drifts: its own KEYS line is what the caller reads.

Each `lua/*.lua` names its keys in a comment line `-- KEYS a b c`. From that line come both the
keys sent with the call and the table `K` the script sees. Every key of a run shares one hash tag,
so a cluster keeps them on one node (CASE L6).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from deltastore.coordination.limits import LUA_LIMITS

if TYPE_CHECKING:
    from collections.abc import Mapping

_KEYS_LINE = re.compile(r"^-- KEYS ([a-z ]+)$", re.MULTILINE)
_SHARED = ("clock", "prelude")
NAMES = (
    "announce",
    "announce_segment",
    "counts",
    "grant",
    "hand_back",
    "heartbeat",
    "leave",
    "limit_pulls",
    "members",
    "now",
    "offer",
    "outcomes",
    "reap",
    "register",
    "renew",
    "running",
    "set_throughput",
    "settle",
    "take",
    "throughput",
    "withdraw",
)


def key_of(run: str, name: str) -> str:
    """The Redis key `name` of a run: `deltastore:{run}:name`."""
    return f"deltastore:{{{run}}}:{name}"


@dataclass(frozen=True, slots=True)
class Script:
    """One script, ready to send."""

    name: str
    keys: tuple[str, ...]
    """Short names; `key_of` makes them keys of a run."""
    text: str
    sha1: str
    """What EVALSHA calls it: an address inside Redis, not an integrity check."""


def read_lua(name: str) -> str:
    """The text of `lua/<name>.lua` as shipped."""
    folder = resources.files("deltastore.coordination") / "lua"
    return (folder / f"{name}.lua").read_text(encoding="utf-8")


def load_scripts(clock_lua: str | None = None) -> Mapping[str, Script]:
    """All scripts by name. `clock_lua` replaces `clock.lua`: only for tests that move time."""
    clock = read_lua("clock") if clock_lua is None else clock_lua
    prelude = read_lua("prelude")
    limits = ", ".join(f"{name} = {value}" for name, value in LUA_LIMITS.items())
    scripts = {}
    for name in NAMES:
        body = read_lua(name)
        found = _KEYS_LINE.search(body)
        if found is None:
            raise ValueError(f"lua/{name}.lua has no KEYS line")
        keys = tuple(found[1].split())
        table = ", ".join(f"{key} = KEYS[{i}]" for i, key in enumerate(keys, 1))
        head = f"local K = {{{table}}}\nlocal LIMIT = {{{limits}}}\n"
        text = "\n".join((head, clock, prelude, body))
        sha1 = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        scripts[name] = Script(name, keys, text, sha1)
    return scripts
