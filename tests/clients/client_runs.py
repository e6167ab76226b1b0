"""How tests run a client: by the very command line that the page gives its users."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["ALONE", "LAUNCHED", "RECIPES", "TWO_LAUNCHED", "TWO_OF_TORCHRUN", "apart", "check_quantized", "fall", "printed"]

ALONE = "fusible run --device cpu train.py"
LAUNCHED = "fusible run --device cpu -m accelerate.commands.launch --mixed_precision fp8 train.py"
TWO_LAUNCHED = "fusible run --device cpu -m accelerate.commands.launch --multi_gpu --num_processes 2 --mixed_precision fp8 train.py"
TWO_OF_TORCHRUN = "fusible run --device cpu -m torch.distributed.run --nproc-per-node 2 train.py"
"""Commands, for a program ``train.py``."""

RECIPES = {"delayed": "delayed", "current": "current", "block": "FP8 in blocks", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}
"""By what programs call it, what the page does: every recipe of NVIDIA's."""

PROGRAMS = Path(__file__).with_name("programs")


def printed(command: str, program: str, *arguments: str, options: tuple[str, ...] = (), **environment: str) -> Any:
    """What ``programs/program`` prints last, as JSON, or None where it prints nothing, when it is run in the place of ``train.py``.
    ``options``: more of ``fusible run``; the rest is of the environment."""
    words = shlex.split(command)
    assert words[:2] == ["fusible", "run"] and words[-1] == "train.py", command
    words = [sys.executable, "-m", "fusible", "run", *options, *words[2:-1], str(PROGRAMS / program), *arguments]
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **environment}
    done = subprocess.run(words, capture_output=True, text=True, timeout=1200, env={**os.environ, **settings})
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None


def apart(losses: list[float], others: list[float]) -> float:
    """The largest difference of two runs' losses, in parts of the second's first."""
    return max(abs(a - b) for a, b in zip(losses, others, strict=True)) / others[0]


def fall(losses: list[float]) -> float:
    """By how much training lowered the loss."""
    return losses[0] - losses[-1]


def check_quantized(found: dict[str, Any], plain: dict[str, Any], products: int = 3, first: int = 0) -> None:
    """``products`` a linear layer and step, all of quantized operands; the losses of the same model in bf16, to some roundings of 8 bits; and more
    than half of what they fall by. ``first``: layers that get data, which has no gradient."""
    steps = len(plain["losses"])
    assert plain["products"] == 0 < found["linears"] and found["products"] == (products * found["linears"] - first) * steps
    assert 2 * fall(found["losses"]) > fall(plain["losses"]) > 0
    assert apart(found["losses"], plain["losses"]) < 0.03
