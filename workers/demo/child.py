"""A worker that outlives the demo holds memory: it asks the kernel to die with its parent.

`python -m workers.demo.child PARENT_PID NICE MODULE ARGUMENT…` runs MODULE as `python -m` does,
after arranging for SIGKILL when the parent is gone, however it went.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with(parent_pid: int) -> None:
    """Have this process killed when the thread that started it ends; exit if it has already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        sys.exit(1)


def main(arguments: list[str]) -> None:
    """Run a module as a child of the demo."""
    parent_pid, nice, module, *rest = arguments
    die_with(int(parent_pid))
    os.nice(int(nice))
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
