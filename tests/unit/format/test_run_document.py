"""FORMAT.md is enough to read a run: a reader that has only the document finds every version."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from deltastore.chain.diff import diff_tensor
from deltastore.chain.lattice import Span
from deltastore.format.bundle import Bundle
from deltastore.format.mixing import fingerprint_state
from deltastore.format.signing import SigningKey, sign_with
from deltastore.maintenance.anchors import write_anchor
from deltastore.maintenance.composites import write_composite
from deltastore.maintenance.settings import MaintenanceSettings
from deltastore.repository.way import survey
from deltastore.storage.fs import FileStore
from tests import second_reader, second_reader_run
from tests.second_reader import RefusedError
from tests.unit.pipeline.harness import RUN, World

if TYPE_CHECKING:
    from pathlib import Path

HEAD = 5
SETTINGS = MaintenanceSettings()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path]:
    """A run in a folder: five signed deltas, a composite over three of them, an anchor at HEAD."""
    folder = tmp_path_factory.mktemp("bucket")
    world = World(tmp_path_factory.mktemp("files"), home_store=FileStore(folder))
    publisher = world.publisher(signer=sign_with(SigningKey(bytes(32))))
    for step in range(1, HEAD):
        world.step(publisher, step)
    publisher.close()
    found = survey(world.run, HEAD, lowest=0, streams=2)
    write_composite(world.run, found, Span(1, 4), clock=world.clock, settings=SETTINGS)
    write_anchor(world.run, HEAD, clock=world.clock)
    return world, folder / RUN


def as_lists(world: World) -> list[list[int]]:
    """The trainer's state as the second reader has it."""
    return [bits.tolist() for bits in world.state.arrays]


def test_a_reader_of_the_document_rebuilds_every_state(published: tuple[World, Path]) -> None:
    """Delta by delta, by a composite, and from an anchor: all three are the trainer's bits, and the
    chain of policy hashes is the library's."""
    world, folder = published
    run = second_reader_run.Run(folder)
    assert run.head() == HEAD
    assert run.rebuilt(HEAD) == as_lists(world)
    assert run.rebuilt(HEAD, {1: 4}) == as_lists(world)
    assert run.anchored(HEAD) == as_lists(world)
    newest = run.version(HEAD)
    assert newest.policy_hash == world.actor().advance().policy_hash
    [[key_id, signature]] = newest.signatures
    assert key_id == SigningKey(bytes(32)).public.key_id
    assert re.fullmatch("[0-9a-f]{128}", signature)


def test_a_reader_of_the_document_reads_bundles(published: tuple[World, Path]) -> None:
    """A bundle of two states leads from one to the other."""
    world, _folder = published
    text = world.layout.canonical_bytes()
    pairs = zip(world.zero.arrays, world.state.arrays, strict=True)
    blocks = [b for t, two in enumerate(pairs) for b in diff_tensor(world.layout, t, *two)]
    before, after = fingerprint_state(world.zero), fingerprint_state(world.state)
    data = Bundle.of(world.layout, before, iter([blocks[:2], blocks[2:]])).to_bytes()
    found, *prints = second_reader_run.read_bundle(text, data)
    assert prints == [str(before), str(after)]
    state = [bits.tolist() for bits in world.zero.arrays]
    second_reader.apply(text, state, found)
    assert state == as_lists(world)
    with pytest.raises(RefusedError, match="bytes after"):
        second_reader_run.read_bundle(text, data + b"x")


def test_a_reader_of_the_document_finds_damage(published: tuple[World, Path]) -> None:
    """A version manifest with one bit changed is refused, or breaks the chain above it."""
    _world, folder = published
    path = folder / "versions" / "0000000003.json"
    whole = path.read_bytes()
    for at in range(0, whole.index(b"\n"), 23):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises((RefusedError, FileNotFoundError, TypeError, ValueError)):
            second_reader_run.Run(folder).rebuilt(HEAD)
    path.write_bytes(whole)
    assert second_reader_run.Run(folder).rebuilt(HEAD)
