"""Lets each allocation of native calls fail in turn; run as a program, with ``failing_allocator`` preloaded.

Prints a line a call: its name, how many allocations failed, and what went wrong, or "right". Each attempt is made by a new thread, whose scratch
memory (and that of the threads that OpenMP gives it) is fresh.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch
from cpp_calls import CALLS, invoke, run, tensors
from torch import Tensor

_THREADS = 2
_MOST = 60
"""Allocations that are let fail, of those that a call makes: the first ones, among which is every kind of scratch memory."""


def _large() -> dict[str, Callable[[], dict[str, Any]]]:
    """Calls of a size at which several threads take part, each with scratch memory; a gemm in each of its ways."""
    wide = torch.randn(300, 512)
    made: dict[str, Callable[[], dict[str, Any]]] = {}

    def gemm(left: Tensor, right: Tensor, turned: tuple[bool, bool]) -> Callable[[], dict[str, Any]]:
        rows, cols = left.shape[1] if turned[0] else left.shape[0], right.shape[0] if turned[1] else right.shape[1]
        kinds = (torch.float32, 1.0)
        return lambda: {
            "left": left, "left_transposed": turned[0], "left_dtype": kinds[0], "left_scale": 1.0, "right": right, "right_transposed": turned[1],
            "right_dtype": kinds[0], "right_scale": 1.0, "dst": torch.zeros(rows, cols), "dtype": kinds[0], "column_sums": torch.zeros(cols),
            "pre_gelu": torch.zeros(rows, cols), "gelu": 1,
        }  # fmt: skip

    made["gemm few rows"] = gemm(wide[:8], wide, (False, True))
    made["gemm turned"] = gemm(wide[:100], torch.randn(400, 512), (False, True))
    made["gemm few blocks"] = gemm(wide, wide, (True, False))
    made["gemm rounds"] = gemm(torch.randn(8, 5000), torch.randn(5000, 24), (False, False))
    return made


def _attention(rows: int, keys: int) -> dict[str, Any]:
    q, k, v = torch.randn(1, rows, 4, 32), torch.randn(1, keys, 2, 32), torch.randn(1, keys, 2, 32)
    written = {"out": torch.zeros_like(q), "stats": torch.zeros(1, rows, 4, 1), "largest": torch.zeros(1, rows, 4, 1)}
    rules = {"scale": 0.2, "causal": False, "causal_bottom_right": False, "window_left": -1, "window_right": -1, "window_bottom_right": False}
    return {"q": q, "k": k, "v": v, **written, **rules}


def _backward() -> dict[str, Any]:
    forward = _attention(40, 80)
    run("attention_forward", forward)
    given = {name: value for name, value in forward.items() if name not in ("largest",)}
    return {
        **given, "grad": torch.ones_like(forward["q"]), "dq": torch.zeros_like(forward["q"]), "dk": torch.zeros_like(forward["k"]),
        "dv": torch.zeros_like(forward["v"]),
    }  # fmt: skip


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    torch.manual_seed(0)
    found = {name: (name, make()) for name, make in CALLS.items()}
    found |= {name: ("gemm", make()) for name, make in _large().items()}
    found["attention of many queries"] = ("attention_forward", _attention(200, 90))
    found["attention over many keys"] = ("attention_forward", _attention(1, 2000))
    found["attention_backward in parts"] = ("attention_backward", _backward())
    return found


def _copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else [x.clone() for x in value] if isinstance(value, list) else value
        for name, value in arguments.items()
    }


def _bits(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.contiguous().view(torch.uint8).clone() if x.dim() else x.reshape(1).view(torch.uint8) for name, x in found.items()}


def _same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return all(torch.equal(x, wanted[name]) for name, x in _bits(found).items())


class Attempt(threading.Thread):
    """A call of which one allocation fails, and then the same call with memory."""

    def __init__(self, call: str, arguments: dict[str, Any], allocator: Any, number: int) -> None:
        super().__init__()
        self.call, self.arguments, self.allocator, self.number = call, arguments, allocator, number
        self.error: BaseException | None = None
        self.after: dict[str, Tensor] = {}

    def run(self) -> None:
        first = _copied(self.arguments)
        self.allocator.fail_after(self.number)
        try:
            invoke(self.call, first)
        except BaseException as error:  # whatever comes is looked at
            self.error = error
        finally:
            self.allocator.fail_after(-1)
        self.after = run(self.call, _copied(self.arguments))


def check(call: str, arguments: dict[str, Any], allocator: Any) -> tuple[int, str]:
    arguments = {**arguments, "num_threads": _THREADS}
    wanted = _bits(run(call, _copied(arguments)))
    count = 0
    for number in range(_MOST):
        before = allocator.failed()
        attempt = Attempt(call, arguments, allocator, number)
        attempt.start()
        attempt.join()
        if not _same(attempt.after, wanted):
            return count, f"the call after failure {number} differs"
        if allocator.failed() == before:
            return (count, "right") if attempt.error is None else (count, f"{attempt.error!r} without a failure")
        count += 1
        if not isinstance(attempt.error, MemoryError):
            return count, f"failure {number} gave {attempt.error!r}"
    return count, "right"


def main() -> None:
    allocator = ctypes.CDLL(None)
    allocator.failed.restype = ctypes.c_long
    allocator.fail_after.argtypes = [ctypes.c_long]
    for name, (call, arguments) in cases().items():
        assert tensors(arguments)
        print(f"{name}: ", end="", flush=True)
        count, words = check(call, arguments, allocator)
        print(f"{count} {words}", flush=True)


if __name__ == "__main__":
    main()
