"""The smaller parts of the training command."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from fusible import tex
from fusible.cli.training.interruption import Interruption
from fusible.cli.training.memory import PeakMemory
from fusible.cli.training.observation import summarize_calls
from fusible.cli.training.options import TrainOptions
from fusible.cli.training.plot import draw_losses, smooth
from fusible.cli.training.trainer import learning_rate


def test_learning_rate_rises_falls_and_stays_whatever_the_number_of_steps() -> None:
    options = TrainOptions(lr=2.0, decay_steps=100)
    rates = [learning_rate(step, options) for step in range(120)]
    assert rates[0] == pytest.approx(2.0 / 20) and max(rates) == rates[19]
    assert rates[50] == pytest.approx(2.0 * (0.05 + 0.95 / 2)) and rates[100] == rates[119] == pytest.approx(2.0 / 20)
    assert rates == [learning_rate(step, replace(options, steps=7)) for step in range(120)]


def test_smooth_is_the_mean_of_the_neighbours_there_are() -> None:
    assert smooth([1, 2, 6, 3], 3) == pytest.approx([1.5, 3, 11 / 3, 4.5])
    assert smooth([5.0], 9) == pytest.approx([5.0])
    values = np.random.default_rng(0).normal(size=20)
    assert smooth(list(values), 5)[10] == pytest.approx(values[8:13].mean())


def test_a_picture_is_drawn_for_one_and_for_several_runs() -> None:
    run = {"recipe": "bf16", "loss": [3.0, 2.0], "held_out_loss": 2.5}
    for runs in ([run], [run, {**run, "recipe": "delayed", "loss": [3.0, 2.5, 2.0]}]):
        assert draw_losses(runs, 3.2).startswith(b"\x89PNG")


def test_peak_memory_sees_what_came_and_went() -> None:
    with PeakMemory(interval=0.001) as quiet:
        pass
    with PeakMemory(interval=0.001) as busy:
        fresh = mmap.mmap(-1, 2**26)  # pages of its own: what the allocator hands out may have been resident before
        fresh.write(bytes(2**26))
        time.sleep(0.05)
        fresh.close()
    assert quiet.peak > 0
    assert busy.peak - quiet.peak > 2**25


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_interrupt_asks_and_the_second_raises(number: signal.Signals) -> None:
    former = signal.getsignal(number)
    with Interruption() as interruption:
        assert not interruption.asked
        signal.raise_signal(number)
        assert interruption.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is former


def test_calls_are_counted_by_backend_precision_and_direction() -> None:
    a, b = torch.ones(4, 8), torch.ones(2, 8)
    with tex.set_backend("torch", strict=True), tex.record() as calls:
        tex.generic_gemm(a, True, b, False, None, None, None, None, None, False, None, False, None, 0, False, True)
        tex.gelu(a, None)
    none = {"fprop": 0, "dgrad": 0, "wgrad": 0}
    assert summarize_calls(calls, 1) == {
        "backend": "torch",
        "calls": {"torch": 2},
        "matrix_products": 1,
        "gemms": {"fp8": none, "fp4": none, "other": {**none, "fprop": 1}},
    }


def test_asking_for_help_loads_no_torch() -> None:
    program = "import sys\nfrom fusible.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    sys.exit('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "train" in ended.stdout and "info" in ended.stdout
