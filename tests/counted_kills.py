"""A process that kills itself at the n-th call of functions that it counts."""

from __future__ import annotations

COUNTED = """
import os, signal, sys
from pathlib import Path
left = 0
def counted(function):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call
"""
"""The beginning of such a process's program: what ``counted`` gives counts from ``left`` down."""
