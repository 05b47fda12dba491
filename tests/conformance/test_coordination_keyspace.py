"""A key nobody documented is a key nobody can clean up."""

from __future__ import annotations

import re
from importlib import resources

from deltastore.coordination.scripts import NAMES, load_scripts, read_lua


def _documented() -> set[str]:
    text = (resources.files("deltastore.coordination") / "KEYSPACE.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `([a-z]+)` \|", text, re.MULTILINE))


def test_keyspace_lists_every_key() -> None:
    """KEYSPACE.md lists the keys the scripts use, no more and no fewer."""
    used = {key for script in load_scripts().values() for key in script.keys}
    assert used == _documented()


def test_scripts_use_the_keys_they_name() -> None:
    """Each script, with what it calls, touches only keys of its KEYS line, and all of them."""
    prelude = read_lua("prelude")
    functions = dict(re.findall(r"^local function (\w+)\(.*?\n(.*?)^end$", prelude, re.M | re.S))
    touches = {name: set(re.findall(r"K\.(\w+)", body)) for name, body in functions.items()}
    calls = {
        name: {other for other in functions if re.search(rf"\b{other}\(", body)}
        for name, body in functions.items()
    }

    def closure(name: str) -> set[str]:
        return touches[name] | {key for other in calls[name] - {name} for key in closure(other)}

    for name in NAMES:
        body = "\n".join(line for line in read_lua(name).splitlines() if not line.startswith("--"))
        used = set(re.findall(r"K\.(\w+)", body))
        for function in functions:
            if re.search(rf"\b{function}\(", body):
                used |= closure(function)
        named = set(load_scripts()[name].keys)
        if name != "now":  # its key only routes the call
            assert used - {"taken", "rates", "pulls"} <= named, name
            assert named <= used, name


def test_scripts_open_with_their_contract() -> None:
    """Every script opens with keyspace, KEYS, ARGV and result, and takes time from Redis alone."""
    for name in NAMES:
        lines = read_lua(name).splitlines()
        header = "\n".join(line for line in lines[:16] if line.startswith("--"))
        assert lines[0].startswith("-- Keyspace: "), name
        for word in ("-- KEYS ", "-- ARGV ", "-- Result: "):
            assert word in header, (name, word)
        assert "'TIME'" not in "\n".join(lines), name
    assert read_lua("clock").count("'TIME'") == 1
