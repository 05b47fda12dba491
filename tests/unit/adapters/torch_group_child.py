"""One rank of the tests of TorchGroup: `torch_group_child.py RANK SIZE STORE_FILE TIMEOUT_S`.

Reads one order a line and answers with one line each: `say N` (exchange N bytes of its own number),
`renew`, `die`. Nothing here waits but in the group itself.
"""

from __future__ import annotations

import hashlib
import os
import sys

import torch.distributed as dist

from deltastore.adapters.torch_group import TorchGroup
from deltastore.errors import ApplyError


def _answer(group: TorchGroup, order: str, number: int) -> str:
    if order == "renew":
        group.renew()
        return "renewed"
    own = bytes([group.rank]) * (number if group.rank else number // 2)
    told = group.exchange(own)
    return " ".join(f"{len(one)}:{hashlib.sha256(one).hexdigest()[:16]}" for one in told)


def _say(answer: str) -> None:
    sys.stdout.write(answer + "\n")
    sys.stdout.flush()


def main() -> None:
    """Do what is asked until stdin ends."""
    rank, size, timeout_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=size)
    group = TorchGroup.of(list(range(size)), timeout_s=timeout_s)
    group.renew()
    _say("ready")
    for line in sys.stdin:
        order, *number = line.split()
        if order == "die":
            os._exit(9)
        try:
            answer = _answer(group, order, int(number[0]) if number else 0)
        except ApplyError as err:
            answer = f"failed {err.kind.value}"
        _say(answer)


if __name__ == "__main__":
    main()
