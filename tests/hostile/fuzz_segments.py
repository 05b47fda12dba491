"""Feeds the reader damaged segments: `python -m tests.hostile.fuzz_segments SEED SECONDS [keep]`.

Run with NUMBA_BOUNDSCHECK=1 and a cache folder of its own, so that a kernel that reads or writes
beyond its arrays fails loudly. Every input must be refused with a FormatError (IntegrityError for
another identity), or be read; what is read, the second reader must read the same, and it must
refuse what is refused. An input that breaks this is written to tests/hostile/corpus, which later
runs start from. With `keep` the smallest input of every way to be taken is written there too.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import resource
import struct
import sys
import time
from pathlib import Path

import zstandard

from deltastore.errors import FormatError, IntegrityError
from deltastore.format.layout import Layout
from deltastore.format.segment import HEADER, HEADER_BYTES, DecodeLimits, decode_segment
from tests import second_reader

GOLDEN = Path(__file__).parent.parent / "golden" / "v1"
CORPUS = Path(__file__).parent / "corpus"
LIMITS = DecodeLimits(max_table_bytes=1 << 20, max_decoded_bytes=64 << 20)
MEMORY_BYTES = 6 << 30
HANG_S = 10.0
KEPT_BYTES = 2048
"""Larger inputs are not kept in the corpus: a smaller one is refused in the same words."""
SMALL_NNZ = 3000
"""Above so many values the second reader would spend the time of thousands of inputs."""


class Seed:
    """A segment to start from, its layout, and how it is to be taken (None: read, it is sound)."""

    def __init__(self, name: str, layout_text: bytes, data: bytes, taken: str | None) -> None:
        self.name = name
        self.taken = taken
        self.layout_text = layout_text
        self.layout = Layout.from_bytes(layout_text)
        self.data = data


def load_seeds() -> list[Seed]:
    """The golden segments, one input of every way to be taken, and all that broke the reader."""
    seeds = []
    for path in sorted([*GOLDEN.glob("*.seg"), *CORPUS.glob("*.seg")]):
        document = json.loads(path.with_suffix(".json").read_text())
        layout, data = document["layout"].encode(), path.read_bytes()
        seeds.append(Seed(path.stem, layout, data, document.get("taken")))
    return seeds


def mutate(chance: random.Random, data: bytes) -> bytes:
    """A damaged copy: bytes, ranges, or parts of the table with the header made to fit again."""
    if chance.random() < 0.6 and len(data) > HEADER_BYTES:
        data = rebuilt(chance, data)
    if chance.random() < 0.5:
        data = scrambled(chance, data, chance.choice((1, 1, 2, 5)))
    return data


def scrambled(chance: random.Random, data: bytes, times: int) -> bytes:
    """Bytes changed, ranges removed or repeated."""
    out = bytearray(data)
    for _ in range(times):
        if not out:
            break
        at = chance.randrange(len(out))
        kind = chance.random()
        if kind < 0.5:
            out[at] ^= 1 << chance.randrange(8)
        elif kind < 0.75:
            out[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        elif kind < 0.85:
            del out[at : at + chance.randrange(1, 9)]
        else:
            out[at:at] = out[at : at + chance.randrange(1, 9)]
    return bytes(out)


def rebuilt(chance: random.Random, data: bytes) -> bytes:
    """Table or streams damaged, sizes in the header true to what is left: the fault lies deeper."""
    fields = list(HEADER.unpack(data[:HEADER_BYTES]))
    blocks, raw, stored = fields[7], fields[10], fields[11]
    end = HEADER_BYTES + stored
    table = data[HEADER_BYTES:end]
    changes = data[end : end + 16 * blocks]
    body = data[end + 16 * blocks :]
    if stored < raw:
        try:
            table = zstandard.ZstdDecompressor().decompress(table, max_output_size=1 << 20)
        except zstandard.ZstdError:  # a seed whose table was damaged before
            return data
    if chance.random() < 0.7:
        table = scrambled(chance, table, chance.choice((1, 1, 2, 3)))
    else:
        body = scrambled(chance, body, 1)
    if chance.random() < 0.05:
        fields[chance.choice((7, 8))] = chance.randrange(20)
    if chance.random() < 0.3:
        fields[9] = chance.choice((fields[9] + chance.randrange(-2, 3), chance.getrandbits(64)))
    changes = changes.ljust(16 * fields[7], b"\0")[: 16 * fields[7]]
    fields[9] %= 1 << 64
    fields[10] = fields[11] = len(table)
    fields[12] = len(body)
    try:
        header = HEADER.pack(*fields)
    except struct.error:
        return data
    return header + table + changes + body


def outcome(seed: Seed, data: bytes) -> list[tuple] | None:
    """What the library reads, or None where it refuses."""
    try:
        decoded = decode_segment(seed.layout, data, limits=LIMITS)
    except (FormatError, IntegrityError):
        return None
    return [
        (
            block.tensor,
            list(block.box.start),
            list(block.box.shape),
            block.kind.value,
            None if block.indices is None else block.indices.tolist(),
            block.values.tolist() if block.nnz <= SMALL_NNZ else None,
        )
        for block in decoded.blocks
    ]


def taken(seed: Seed, data: bytes) -> str:
    """How the library takes these bytes, in words without numbers: the same for one way to fail."""
    try:
        decode_segment(seed.layout, data, limits=LIMITS)
    except (FormatError, IntegrityError) as err:
        words = err.message.partition("does not decompress")  # the rest is zstd's own
        text = re.sub(r"\b[0-9a-f]{8,}\b|0x[0-9a-f]+|-?\d+", "N", "".join(words[:2]))
        return f"{type(err).__name__} {err.kind.value}: {text}"
    return "read"


def second_outcome(seed: Seed, data: bytes) -> list[tuple] | None:
    """What the second reader reads, or None."""
    try:
        _base, _version, blocks = second_reader.read_segment(seed.layout_text, data)
    except (second_reader.RefusedError, zstandard.ZstdError):
        return None
    return [(b.tensor, b.start, b.sizes, b.kind, b.indices, b.values) for b in blocks]


def try_one(seed: Seed, data: bytes) -> str | None:
    """What is wrong with how the readers took these bytes; None if nothing."""
    started = time.monotonic()
    try:
        found = outcome(seed, data)
    except Exception as err:  # noqa: BLE001 - any other error is what the fuzzer looks for
        return f"{type(err).__name__}: {err}"
    if time.monotonic() - started > HANG_S:
        return "took too long"
    declared = struct.unpack_from("<Q", data, 72)[0] if len(data) >= 80 else 0
    if declared > SMALL_NNZ:
        return None
    other = second_outcome(seed, data)
    if found != other:
        return f"library {'refused' if found is None else 'read'} it, second reader differs"
    return None


def main(seed_number: int, seconds: float, *, keep: bool = False) -> int:
    """Fuzz; 0 when nothing was found."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    chance = random.Random(seed_number)
    seeds = load_seeds()
    for seed in seeds:
        problem = try_one(seed, seed.data)
        if problem:
            sys.stdout.write(f"{seed.name}: {problem}\n")
            return 1
    tried = read = 0
    smallest: dict[str, tuple[bytes, Seed]] = {}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        seed = chance.choice(seeds)
        data = mutate(chance, seed.data)
        tried += 1
        problem = try_one(seed, data)
        read += problem is None and data != seed.data and outcome(seed, data) is not None
        if problem:
            path = write_input(seed, data, found=problem)
            sys.stdout.write(f"{path}: {problem}\n")
            return 1
        if keep and len(data) <= KEPT_BYTES:
            how = taken(seed, data)
            if how not in smallest or len(data) < len(smallest[how][0]):
                smallest[how] = data, seed
    known = {seed.taken for seed in seeds}
    for how, (data, seed) in sorted(smallest.items()):
        if how not in known | {"read"}:
            write_input(seed, data, taken=how)
    sys.stdout.write(f"{tried} inputs, {read} of them read, none mistaken\n")
    return 0 if tried > 100 else 1


def write_input(seed: Seed, data: bytes, **about: str) -> Path:
    """Keep an input for later runs."""
    CORPUS.mkdir(exist_ok=True)
    path = CORPUS / f"{hashlib.sha256(data).hexdigest()[:16]}.seg"
    path.write_bytes(data)
    document = {"from": seed.name, "layout": seed.layout_text.decode(), **about}
    path.with_suffix(".json").write_text(json.dumps(document) + "\n")
    return path


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), float(sys.argv[2]), keep="keep" in sys.argv[3:]))
