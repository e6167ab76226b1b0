"""The lock of what threads share: an interrupt at any moment leaves it as it was."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fusible.locks import Lock

INTERRUPTS = 3000
LONGEST = 4e-5
"""Seconds until an interrupt: some hundred turns of the loop, so that it comes at any place of one."""


def held_after(lock: Lock, interrupts: int, seed: int) -> int:
    """After how many of so many interrupts of threads' work under ``lock`` this thread held it still."""
    draw = random.Random(seed)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, interrupted)
    held = 0
    try:
        for _ in range(interrupts):
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, LONGEST))
                while True:
                    with lock:
                        pass
            except KeyboardInterrupt:
                held += lock._is_owned()
                while lock._is_owned():
                    lock.release()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    return held


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer that interrupts")
def test_no_interrupt_leaves_it_held() -> None:
    """In a process of its own: a signal comes to a main thread that does nothing else."""
    finished = subprocess.run([sys.executable, __file__], cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=300)
    assert finished.stdout.split() == ["0", str(INTERRUPTS)], finished.stdout + finished.stderr


def test_entering_it_is_the_interpreters_own_step() -> None:
    assert not {"__enter__", "__exit__", "acquire", "release"} & vars(Lock).keys()
    lock = Lock()
    with lock, lock:
        assert lock._is_owned()
    assert not lock._is_owned()


if __name__ == "__main__":
    print(held_after(Lock(), INTERRUPTS, seed=0), INTERRUPTS)
