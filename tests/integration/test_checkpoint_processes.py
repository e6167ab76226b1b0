"""Checkpoints and processes: what one that is killed leaves, and how much memory one takes that loads a checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _printed(program: str, *arguments: str) -> dict[str, dict[str, float]]:
    done = subprocess.run([sys.executable, str(HERE / program), *arguments], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, and memory is counted as Linux does")
def test_a_checkpoint_whose_writer_is_killed_is_whole_or_absent(tmp_path: Path) -> None:
    found = _printed("killed_checkpoints.py", str(tmp_path), "5", "12")
    assert found["whole"] >= 12 and found["left in the middle"] > 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, and memory is counted as Linux does")
def test_a_large_checkpoint_is_held_once(tmp_path: Path) -> None:
    """Each way holds it once at most, and beside it a part of a file; quantizing it a few tensors, 8 MB each and twice that in fp32."""
    found = _printed("checkpoint_memory.py", str(tmp_path), "3.2e9")
    print(found)
    peaks = {way: figures["peak over size"] for way, figures in found.items()}
    assert peaks["mapped"] > 0.9 and peaks["copied"] > 0.9  # the measure sees what is held
    assert max(peaks.values()) < 1.1 and peaks["quantized"] < 0.5, peaks
