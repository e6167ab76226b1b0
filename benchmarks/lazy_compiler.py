"""What the lazy compiler costs: recording, evaluating again, calling an executable, and a whole GPT-2-sized forward from cold."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from itertools import count
from typing import Any

import numpy as np

import fusible.lazy as tp
from benchmarks import gpt2
from fusible.cli.bench.timing import side_by_side

__all__ = ["lazy_calls", "lazy_gpt2", "lazy_recording"]

HAS_JAX = importlib.util.find_spec("jax") is not None


def lazy_recording() -> list[dict[str, Any]]:
    """Microseconds to record an operation (target 8), and from the user's calls to a numpy value where the program is cached (target 40).

    Then of evaluations that each have a literal or an index of their own, which one program reads (target 60).
    """
    x = tp.full((2, 3), value=0.5)
    stored = tp.Tensor(np.ones((1000, 8), np.float32)).eval()
    small, number = tp.Tensor(np.ones((2, 3), np.float32)).eval(), count(1)
    calls = {
        "record tanh(x)": lambda: tp.tanh(x),
        "record x.tanh()": lambda: x.tanh(),
        "record x + x": lambda: x + x,
        "record x * 2.0": lambda: x * 2.0,
        "record full((2, 3))": lambda: tp.full((2, 3), value=0.5),
        "evaluate tanh(full((2, 3)))": lambda: tp.tanh(tp.full((2, 3), value=0.5)).numpy(),
        "evaluate x * s, another s each time": lambda: (small * (next(number) + 0.5)).eval(),
        "evaluate x[i], another i each time": lambda: stored[next(number) % 1000].eval(),
    }
    return [{"call": name, "us": seconds * 1e6} for name, seconds in side_by_side(calls).items()]


def lazy_calls() -> list[dict[str, Any]]:
    """Microseconds of one call of a small MLP (8 rows, 64 -> 64 -> 8). Target: at most 2x the same function under jax.jit."""
    rng = np.random.default_rng(0)
    w1, b1, w2 = (rng.standard_normal(shape, np.float32) for shape in ((64, 64), (64,), (64, 8)))
    x = rng.standard_normal((8, 64), np.float32)
    constants = [tp.Tensor(w) for w in (w1, b1, w2)]

    def network(x: tp.Tensor) -> tp.Tensor:
        return tp.tanh(x @ constants[0] + constants[1]) @ constants[2]

    executable = tp.compile(network, args=[tp.InputInfo((8, 64), tp.float32)])
    stored = tp.Tensor(x).eval()
    calls = {"fusible": lambda: executable(stored)}
    if HAS_JAX:
        import jax  # pyright: ignore[reportMissingImports]

        weights, held = [jax.numpy.asarray(w) for w in (w1, b1, w2)], jax.numpy.asarray(x)
        jitted = jax.jit(lambda x: jax.numpy.tanh(x @ weights[0] + weights[1]) @ weights[2])
        calls["jax.jit"] = lambda: jitted(held).block_until_ready()
        np.testing.assert_allclose(np.asarray(executable(stored)), np.asarray(jitted(held)), rtol=1e-4, atol=1e-5)
    times = side_by_side(calls)
    jax_us = times["jax.jit"] * 1e6 if HAS_JAX else float("nan")
    return [{"call": "MLP, stored input", "fusible_us": times["fusible"] * 1e6, "jax_us": jax_us, "ratio": times["fusible"] * 1e6 / jax_us}]


def lazy_gpt2() -> list[dict[str, Any]]:
    """Seconds of a forward of GPT-2 small's size (T=128, fp32): the first in a new process (target 1.5), then each (targets: torch, 1.2x jax.jit)."""
    first = subprocess.run([sys.executable, "-m", "benchmarks.lazy_compiler"], capture_output=True, text=True, check=True)
    weights, ids = gpt2.parameters(), np.arange(gpt2.LENGTH, dtype=np.int32) % gpt2.VOCABULARY
    calls, results = _models(weights, ids)
    for name, result in results.items():
        np.testing.assert_allclose(result(), results["fusible"](), rtol=1e-3, atol=1e-3, err_msg=name)
    times = side_by_side(calls, rounds=9)
    started = json.loads(first.stdout)
    rows = [{"call": "first, from the call to the logits", "fusible_s": started["first"], "torch_s": float("nan"), "jax_s": float("nan")}]
    rows.append({"call": "each later one", "fusible_s": times["fusible"], "torch_s": times["torch"], "jax_s": times.get("jax", float("nan"))})
    return rows


def _models(weights: dict[str, Any], ids: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Calls, and functions that give their logits as numpy, of the model by each."""
    import torch

    ours, run = _compiled(weights)
    theirs = {name: torch.from_numpy(w) for name, w in weights.items()}
    index = torch.from_numpy(ids).long()

    def eager() -> Any:
        with torch.inference_mode():
            return gpt2.forward(gpt2.over_torch(), theirs, index)

    calls: dict[str, Any] = {"fusible": lambda: run(ours), "torch": eager}
    results: dict[str, Any] = {"fusible": lambda: np.asarray(run(ours)), "torch": lambda: eager().numpy()}
    if HAS_JAX:
        import jax  # pyright: ignore[reportMissingImports]

        held = {name: jax.numpy.asarray(w) for name, w in weights.items()}
        jitted = jax.jit(lambda p, i: gpt2.forward(gpt2.over_jax(), p, i))
        calls["jax"] = lambda: jitted(held, ids).block_until_ready()
        results["jax"] = lambda: np.asarray(jitted(held, ids))
    return calls, results


def _compiled(weights: dict[str, Any]) -> tuple[Any, Any]:
    held = {name: tp.Tensor(w) for name, w in weights.items()}
    ids = tp.Tensor(np.arange(gpt2.LENGTH, dtype=np.int32) % gpt2.VOCABULARY)
    return ids, tp.compile(lambda i: gpt2.forward(gpt2.over_lazy(), held, i), args=[tp.InputInfo((gpt2.LENGTH,), tp.int32)])


def _first_call() -> None:
    """Print the seconds from the first call (the recording) to the first logits, in this process, whose weights are there."""
    held = {name: tp.Tensor(w) for name, w in gpt2.parameters().items()}
    ids = tp.Tensor(np.arange(gpt2.LENGTH, dtype=np.int32))
    start = time.perf_counter()
    logits = gpt2.forward(gpt2.over_lazy(), held, ids).numpy()
    assert np.isfinite(logits).all()
    print(json.dumps({"first": time.perf_counter() - start}))


if __name__ == "__main__":
    _first_call()
