"""Whatever happens to the demo, none of its processes stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from deltastore.clock import SystemClock
from deltastore.testing.clock import FakeClock
from workers.demo.fleet import DemoError, Fleet
from workers.demo.meter import MemoryMeter, total_bytes

ROOT = Path(__file__).resolve().parents[2]
SLEEPER = "import signal, sys\nprint('up', flush=True)\nsignal.pause()\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPER


def _module(folder: Path, name: str, text: str) -> dict[str, str]:
    """Write a module that a child can run, and return the environment in which it finds it."""
    (folder / f"{name}.py").write_text(text)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PATH": os.environ["PATH"]}


def _wait_for(path: Path, text: str) -> None:
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + 30
    while not (path.exists() and text in path.read_text()):
        assert clock.monotonic_s() < deadline_s, f"{path} never said {text!r}"
        clock.sleep_s(0.02)


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_leaving_the_fleet_ends_even_a_child_that_ignores_sigterm(tmp_path: Path) -> None:
    """After the block every child is gone: politely, or by SIGKILL once the grace time is over."""
    environment = _module(tmp_path, "stubborn", STUBBORN) | _module(tmp_path, "sleeper", SLEEPER)
    with Fleet(tmp_path / "logs", environment, FakeClock()) as fleet:
        children = [
            fleet.start(name, name, [], threads=1, nice=1) for name in ("stubborn", "sleeper")
        ]
        for child in children:
            _wait_for(child.log_path, "up")
        assert psutil.Process(children[0].process.pid).nice() == psutil.Process().nice() + 1
    assert [child.process.returncode is not None for child in children] == [True, True]
    assert children[0].process.returncode == -signal.SIGKILL


def test_a_child_may_run_in_another_environment(tmp_path: Path) -> None:
    """Actors on an engine that needs its own environment are started with that one's Python."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$ENGINE with $4 $5"\n')
    python.chmod(0o755)
    with Fleet(tmp_path / "logs", {}, SystemClock()) as fleet:
        variables = {"ENGINE": "vllm"}
        child = fleet.start("a1", "actor", [], threads=1, python=python, variables=variables)
        child.process.wait(timeout=30)
    assert child.tail() == "vllm with 0 actor"


def test_a_failed_child_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    """An unexpected exit stops the demo with the child's name, code and last words."""
    environment = _module(tmp_path, "failing", "import sys\nprint('no disk')\nsys.exit(7)\n")
    with Fleet(tmp_path / "logs", environment, SystemClock()) as fleet:
        child = fleet.start("a9", "failing", [], threads=1)
        child.process.wait(timeout=30)
        with pytest.raises(DemoError, match=r"a9 ended with exit code 7.*\n.*no disk"):
            fleet.check()


def test_a_child_killed_on_purpose_is_no_failure(tmp_path: Path) -> None:
    """The SIGKILL that the demo itself sends does not stop the demo; a name is used once."""
    environment = _module(tmp_path, "sleeper", SLEEPER)
    with Fleet(tmp_path / "logs", environment, SystemClock()) as fleet:
        child = fleet.start("a2", "sleeper", [], threads=1)
        _wait_for(child.log_path, "up")
        fleet.kill("a2")
        fleet.check()
        assert fleet.running(["a2"]) == []
        with pytest.raises(DemoError, match="a2 was started already"):
            fleet.start("a2", "sleeper", [], threads=1)


def test_children_die_with_a_demo_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL on the demo itself leaves none of its workers behind."""
    environment = _module(tmp_path, "sleeper", SLEEPER)
    demo = textwrap.dedent(
        f"""
        import signal, sys
        from pathlib import Path
        from deltastore.clock import SystemClock
        from workers.demo.fleet import Fleet
        fleet = Fleet(Path({str(tmp_path / "logs")!r}), {environment!r}, SystemClock())
        print(fleet.start("a1", "sleeper", [], threads=1).process.pid, flush=True)
        signal.pause()
        """
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", demo], stdout=subprocess.PIPE, env=environment, cwd=ROOT
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    _wait_for(tmp_path / "logs" / "a1.log", "up")
    assert not _gone(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + 10
    while not _gone(pid):
        assert clock.monotonic_s() < deadline_s, "the worker outlived the demo"
        clock.sleep_s(0.02)


def test_memory_of_children_is_counted(tmp_path: Path) -> None:
    """The meter sees what a child process holds, and keeps the peak after it is gone."""
    hog = "body = bytearray(b'x' * (64 << 20))\n" + SLEEPER
    environment = _module(tmp_path, "hog", hog)
    with Fleet(tmp_path / "logs", environment, SystemClock()) as fleet:
        before_bytes = total_bytes()
        child = fleet.start("hog", "hog", [], threads=1)
        _wait_for(child.log_path, "up")
        with MemoryMeter(SystemClock()) as meter:
            clock = SystemClock()
            deadline_s = clock.monotonic_s() + 10
            while meter.peak_bytes == 0 and clock.monotonic_s() < deadline_s:
                clock.sleep_s(0.02)
        assert meter.peak_bytes - before_bytes > 60 << 20
