"""The flat call of compiled functions: what goes in and out, in place or copied, checked, synchronous, from threads and forked children."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from fusible import lazy
from fusible.errors import ArgumentError, CompileError, DTypeError, ForkError, ShapeError

_F32 = lazy.float32


def _double(shape: tuple[int, ...], of: lazy.dtype = _F32) -> lazy.Executable:
    return lazy.compile(lambda x: x + x, args=[lazy.InputInfo(shape, of)])


def _strided(of: torch.dtype) -> dict[str, torch.Tensor]:
    base = torch.arange(200).to(of)
    return {
        "unaligned": base[1:36].view(5, 7),
        "transposed": base[:35].view(7, 5).t(),
        "expanded": base[:7].expand(5, 7),
        "stepped": base[:140].view(10, 14)[::2, ::2],
        "column": base[:175].view(5, 7, 5)[:, :, 3],
    }


@pytest.mark.parametrize("ours", [lazy.float32, lazy.bfloat16], ids=str)
@pytest.mark.parametrize("name", _strided(torch.float32))
def test_a_torch_tensor_that_is_no_plain_block_is_copied_not_misread(name: str, ours: lazy.dtype) -> None:
    x = _strided(torch.float32 if ours is lazy.float32 else torch.bfloat16)[name]
    want = x.to(torch.float64).numpy()
    np.testing.assert_array_equal(_double((5, 7), ours).run(x)[0].numpy().astype(np.float64), 2 * want)
    np.testing.assert_array_equal(lazy.Tensor(x).numpy().astype(np.float64), want)


def test_a_strided_numpy_array_is_copied_not_misread() -> None:
    n = np.arange(350.0, dtype=np.float32).reshape(10, 35)
    frozen = n[:5, :7].copy()
    frozen.flags.writeable = False
    executable = _double((5, 7))
    for x in (n[::2, ::5], n[4::-1, 6::-1], n[:5, :7], np.asfortranarray(n[:5, :7]), frozen):
        np.testing.assert_array_equal(executable.run(x)[0].numpy(), 2 * x)


class _Reversed:
    """An exporter of negative strides, which torch cannot make: numpy's own."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self) -> Any:
        return self.array.__dlpack__()


def test_negative_strides_are_copied_not_misread() -> None:
    x = np.arange(35.0, dtype=np.float32).reshape(5, 7)[::-1, ::-1]
    np.testing.assert_array_equal(_double((5, 7)).run(_Reversed(x))[0].numpy(), 2 * x)


_TORCH = [
    (torch.float32, lazy.float32),
    (torch.float16, lazy.float16),
    (torch.bfloat16, lazy.bfloat16),
    (torch.float64, lazy.float64),
    (torch.float8_e4m3fn, lazy.float8),
    (torch.float8_e5m2, lazy.float8e5m2),
    (torch.int8, lazy.int8),
    (torch.int32, lazy.int32),
    (torch.int64, lazy.int64),
    (torch.uint8, lazy.uint8),
    (torch.bool, lazy.bool),
]


@pytest.mark.parametrize(("theirs", "ours"), _TORCH, ids=[str(ours) for _, ours in _TORCH])
def test_every_torch_dtype_goes_in_and_comes_out(theirs: torch.dtype, ours: lazy.dtype) -> None:
    for shape in ((3, 5), (0, 5), (64, 5)):
        x = (torch.randn(shape) * 10).to(theirs)
        out = torch.from_dlpack(lazy.compile(lambda t: t.transpose(0, 1), args=[lazy.InputInfo(shape, ours)]).run(x)[0])
        assert out.dtype == theirs
        assert torch.equal(out.to(torch.float64), x.t().to(torch.float64))
        back = torch.from_dlpack(lazy.Tensor(x))
        assert back.dtype == theirs and torch.equal(back.to(torch.float64), x.to(torch.float64))


def test_aligned_memory_is_shared_both_ways() -> None:
    x = torch.zeros(1024)
    assert x.data_ptr() % 64 == 0
    assert lazy.Tensor(x).numpy().ctypes.data == x.data_ptr()
    (out,) = _double((1024,)).run(x)
    assert torch.from_dlpack(out).data_ptr() == out.numpy().ctypes.data


def test_an_output_outlives_everything_else() -> None:
    out = torch.from_dlpack(_double((1000,)).run(torch.ones(1000))[0])
    gc.collect()
    assert out.sum() == 2000


def test_outputs_own_their_memory() -> None:
    stored = lazy.Tensor([1.0, 2.0])
    executable = lazy.compile(lambda x: (x, x, stored, [x + 1.0, x + 1.0], lazy.full((2,), 7.0)), args=[lazy.InputInfo((2,), _F32)])
    x = torch.tensor([3.0, 4.0])
    outs = [torch.from_dlpack(o) for o in executable.run(x)]
    for out in outs:
        out.fill_(-1)
    assert len({out.data_ptr() for out in outs}) == 6
    assert x.tolist() == [3, 4] and stored.tolist() == [1, 2]
    assert [o.numpy().tolist() for o in executable.run(x)] == [[3, 4], [3, 4], [1, 2], [4, 5], [4, 5], [7, 7]]


def test_a_call_has_finished_when_it_returns() -> None:
    executable = lazy.compile(lambda a: lazy.matmul(a, a) @ a, args=[lazy.InputInfo((400, 400), _F32)])
    for value in range(1, 6):
        a = torch.full((400, 400), float(value))
        (out,) = executable.run(a)
        a.zero_()
        assert (out.numpy() == 160000.0 * value**3).all()


def test_one_sentence_for_every_wrong_input() -> None:
    executable = _double((4,))
    wrong: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (ArgumentError, "expected 1 inputs", ()),
        (ArgumentError, "expected 1 inputs", (np.zeros(4, np.float32), 1)),
        (ShapeError, r"x of the executable .*: expected shape \(4,\)", (torch.zeros(2, 2),)),
        (DTypeError, "x of the executable .*: expected dtype float32", (torch.zeros(4, dtype=torch.int32),)),
        (DTypeError, "x of the executable .*: expected dtype float32", (torch.zeros(4, dtype=torch.bfloat16),)),
        (DTypeError, "type code 5 of 64 bits", (torch.zeros(4, dtype=torch.complex64),)),
        (DTypeError, "expected an element type", (np.zeros(4, np.complex64),)),
        (ArgumentError, "detach", (torch.zeros(4, requires_grad=True),)),
        (ArgumentError, "__dlpack__", ("text",)),
    ]
    for kind, text, inputs in wrong:
        with pytest.raises(kind, match=text):
            executable.run(*inputs)


def test_what_cannot_be_compiled_says_so() -> None:
    info = lazy.InputInfo((2,), _F32)
    for use in (lambda x: x.numpy(), lambda x: x if x.sum() > 0.0 else -x, lambda x: (x * 2.0).tolist(), lambda x: float(x.sum())):
        with pytest.raises(CompileError, match="of a function being compiled"):
            lazy.compile(use, args=[info])
    for value in (None, [], {"x": 1}, 3.0):
        with pytest.raises(ArgumentError, match="return value"):
            lazy.compile(lambda x, value=value: value, args=[info])
    with pytest.raises(DTypeError, match="dtype of fusible.lazy"):
        lazy.InputInfo((2,), np.float32)  # type: ignore[arg-type]
    with pytest.raises(ShapeError):
        lazy.InputInfo((-1,), _F32)


def test_constants_and_other_arguments_are_captured() -> None:
    weight = lazy.Tensor(np.arange(6, dtype=np.float32).reshape(3, 2))
    executable = lazy.compile(lambda x, n, w: x @ w * n, args=[lazy.InputInfo((1, 3), _F32), 3, weight])
    np.testing.assert_array_equal(executable.run(np.ones((1, 3), np.float32))[0].numpy(), [[18, 27]])
    assert repr(executable).endswith("inputs=1, outputs=1)")


def test_a_small_network_from_torch_agrees() -> None:
    torch.manual_seed(0)
    x, w1, b1, w2 = torch.randn(8, 16), torch.randn(16, 32), torch.randn(32), torch.randn(32, 4)

    def network(x: lazy.Tensor, w1: lazy.Tensor, b1: lazy.Tensor, w2: lazy.Tensor) -> lazy.Tensor:
        h = x @ w1 + b1
        return (h * lazy.sigmoid(h)) @ w2

    executable = lazy.compile(network, args=[lazy.InputInfo(tuple(t.shape), _F32) for t in (x, w1, b1, w2)])
    want = torch.nn.functional.silu(x.double() @ w1.double() + b1) @ w2.double()
    got = torch.from_dlpack(executable.run(x, w1, b1, w2)[0])
    assert torch.allclose(got.double(), want, rtol=0, atol=48 * torch.finfo(torch.float32).eps * want.abs().max().item() * 8)


def test_threads_share_executables_and_the_cache() -> None:
    executable = _double((64,))
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(40):
                x = np.full(64, seed * 1000 + i, np.float32)
                assert (executable.run(x)[0].numpy() == 2 * x).all()
                assert (lazy.Tensor(x) - float(seed)).numpy()[3] == x[3] - seed
                if not i % 8:
                    assert (lazy.Tensor(x) * float(i + seed / 8)).numpy()[3] == x[3] * (i + seed / 8)
        except BaseException as error:  # reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def _in_child(check: Callable[[], bool]) -> int:
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _refuses(action: Callable[[], Any]) -> bool:
    try:
        action()
    except ForkError as error:
        return "spawn" in str(error)
    return False


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_told_to_spawn() -> None:
    executable, x = _double((2,)), lazy.Tensor([1.0, 2.0])
    executable.run(x)
    assert _in_child(lambda: _refuses(lambda: executable.run(x)) and _refuses((x + 1.0).eval) and x.tolist() == [1, 2]) == 0


def test_many_calls_leak_nothing() -> None:
    executable = _double((1 << 16,))
    x = torch.zeros(1 << 16)

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    for _ in range(200):
        executable.run(x)
    before = resident()
    for _ in range(1000):
        executable.run(x)
    assert resident() - before < 64 << 20


def test_bfloat16_outputs_are_numpy_too() -> None:
    (out,) = _double((3,), lazy.bfloat16).run(torch.ones(3, dtype=torch.bfloat16))
    assert out.numpy().dtype == ml_dtypes.bfloat16 and out.dtype is lazy.bfloat16 and out.shape == (3,)
    assert np.asarray(out, np.float32).tolist() == [2, 2, 2]


def test_an_executable_shows_what_is_compiled_and_what_the_passes_did(tmp_path: Path) -> None:
    fixed = lazy.compile(lambda x: (x + x) * lazy.full((), 2.0).exp() + (x + x), args=[lazy.InputInfo((4,), lazy.float32)])
    dynamic = lazy.compile(lambda x: x * lazy.ones(x.shape) + lazy.zeros((x.shape[0],)), args=[lazy.InputInfo(((1, 3, 8),), lazy.float32)])
    for executable in (fixed, dynamic):
        optimized = executable.optimized_flat_ir
        assert [report.name for report in optimized.report] == ["constant-folding", "common-subexpression", "dot-layout", "dead-code"]
        assert optimized.report[-1].after == len(optimized.ops) < optimized.report[0].before
        assert not executable.flat_ir.report
    assert str(fixed.optimized_flat_ir).count("AddOp(x, x)") == 1 < str(fixed.flat_ir).count("AddOp(x, x)")
    # The program of the usual sizes, which are known where passes run.
    assert "?" not in dynamic.optimized_flat_ir.to_stablehlo().text and dynamic.optimized_flat_ir.outputs[0].shape == (3,)
    fixed.save(tmp_path / "program")
    with pytest.raises(ArgumentError, match="a FlatIR: expected an executable compiled in this process, got a loaded one"):
        _ = lazy.Executable.load(tmp_path / "program").optimized_flat_ir
