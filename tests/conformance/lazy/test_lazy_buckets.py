"""Buckets: a program of padded tensors gives what that of the true sizes gives, whatever the padding holds; and few are compiled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fusible.lazy as tp
from fusible.errors import ArgumentError, CompileError, DTypeError, ShapeError
from fusible.lazy.compilation import buckets as under_test
from fusible.lazy.compilation.masking import masked
from fusible.lazy.dims import symbols
from fusible.lazy.evaluation.executor import CACHE
from fusible.lazy.trace.checker import check_trace

_SIZES = (1, 5, 16)
_BUCKETS = (4, 8, 16)
_LENGTHS = (1, 3, 4, 7, 16)
_N, _M = tp.NamedDimension("n", *_SIZES), tp.NamedDimension("m", 1, 3, 6)


def _info(*shape: Any, dtype: tp.dtype = tp.float32) -> tp.InputInfo:
    return tp.InputInfo(shape, dtype)


def _numbers(*shape: int) -> np.ndarray:
    """Whole numbers from -3 to 3 without 0: sums and products of 16 of them are exact in float32."""
    values = np.random.default_rng(math.prod(shape)).integers(1, 4, shape)
    return (values * np.where(np.random.default_rng(len(shape)).random(shape) < 0.5, -1, 1)).astype(np.float32)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding holds NaN, or numbers that are no index."""

    def beyond(shape: tuple[int, ...], of: tp.dtype) -> np.ndarray:
        return np.full(shape, np.nan if of.is_floating else True if of is tp.bool else of.min, of.numpy)

    monkeypatch.setattr(under_test, "_beyond", beyond)


def _attention(x: Any) -> Any:
    q, k, v = x * 0.5, x.flip(1), x + 1.0
    length = x.shape[0]
    causal = tp.tril(tp.ones((16, 16)))[:length, :length] == 0.0
    return tp.softmax(tp.masked_fill(q @ k.transpose(0, 1), causal, -float("inf")), -1) @ v


def _windows(x: Any) -> Any:
    """Whole windows of 4 rows, however many rows there are, each less its largest, and back."""
    length = x.shape[0]
    padded = tp.pad(x, [(0, (4 - length % 4) % 4), (0, 0)])
    parts = tp.reshape(padded, ((length + (4 - length % 4) % 4) / 4, 4, 3))
    return tp.reshape(parts - tp.max(parts, 1, keepdim=True), (-1, 3))[:length]


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "by place": lambda x: (-x, tp.exp(x), x + tp.iota(x.shape, 0), tp.where(x > 0.0, x, 1.0), x.cast(tp.int32), tp.zeros_like(x), x * x.shape[0]),
    "sums": lambda x: (x.sum(0), x.sum(), x.prod(0), x.max(0), x.min(), x.sum(1), tp.any(x > 2.0, 0), tp.all(x < 3.0, 0), tp.cumsum(x, 0)),
    "extremes": lambda x: (tp.argmax(x, 0), tp.argmin(-x, 0), tp.argmax(-tp.abs(x), 0), tp.argmax(x, 1)),
    "statistics": lambda x: (x.mean(), x.mean(0), tp.var(x, 0, correction=0), tp.softmax(x, 0), tp.softmax(x)),
    "products": lambda x: (x @ x.transpose(0, 1), x.transpose(0, 1) @ x, tp.dot_general(x, x, contracting=((0,), (0,)))),
    "slices": lambda x: (x[-1], x[0], x[1:], x[:-1], x[::-1], x[::2], x[x.shape[0] // 2 :], x[:, 1:], x[:1], x[-1:], x.flip((0, 1))),
    "joins": lambda x: (tp.concatenate([x, x + 1.0, x[:1]], 0), tp.stack([x, x]), tp.concatenate([x, x], 1), tp.repeat(x, 2, 1)),
    "reshapes": lambda x: (x.flatten(), x.reshape((-1, 1, 3)), x.unsqueeze(0).squeeze(0), x.reshape((x.shape[0] * 3,)), x.transpose(0, 1)),
    "borders": lambda x: (tp.pad(x, [(1, 2), (0, 0)], value=5.0), tp.pad(x, [(0, 0), (1, 1)], mode="reflect"), tp.pad(x, [(0, 3), (1, 0)])),
    "picks": lambda x: (x[tp.Tensor([-1, 0])], tp.gather(x, 0, tp.cast(tp.arange(x.shape[0]), tp.int32)), x[:, tp.Tensor([2, 0])]),
    "sizes": lambda x: (tp.Tensor(0) + x.shape[0], tp.arange(x.shape[0]), tp.full((x.shape[0],), 2.0), tp.Tensor(1) * ((x.shape[0] + 3) // 4 % 3)),
    "attention": _attention,
    "windows": _windows,
    "triangles": lambda x: tp.triu(x @ x.transpose(0, 1), 1),
    "constants": lambda x: (x + tp.Tensor(_numbers(3)), tp.Tensor(_numbers(2, 3)) @ x.transpose(0, 1)),
}


def _agree(got: Any, wanted: Any) -> None:
    """The same shapes and dtypes, and numbers to 32 epsilons of the largest: softmax adds up 48 numbers in another order."""
    for a, b in zip(*[[v] if isinstance(v, tp.Tensor) else v for v in (got, wanted)], strict=True):
        assert a.shape == b.shape and a.dtype is b.dtype
        a, b = (v.numpy().astype(np.float64) for v in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=32 * 2.0**-23 * max(1.0, np.abs(b).max(initial=0)))


@pytest.mark.parametrize("name", _FUNCTIONS)
@pytest.mark.usefixtures("poisoned")
def test_what_is_beyond_the_true_size_reaches_no_result(name: str) -> None:
    function = _FUNCTIONS[name]
    run = tp.compile(function, args=[_info(_N, 3)], buckets={"n": _BUCKETS})
    check_trace(masked(run.trace, sorted(symbols([t.shape for t in run.trace.inputs]), key=str)))
    for n in _LENGTHS:
        x = _numbers(n, 3)
        _agree(run(tp.Tensor(x)), function(tp.Tensor(x)))
    assert [a.numpy().shape for a in run.run(x)] == [a.shape for a in _listed(run(x))]


def _listed(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, tp.Tensor) else value


@pytest.mark.usefixtures("poisoned")
def test_two_dimensions_with_buckets_beside_one_without() -> None:
    def function(x: Any, y: Any, k: Any) -> Any:
        return x @ y, (x @ y).sum(1), tp.arange(k).sum() + x.sum(), y[-1], tp.concatenate([x.transpose(0, 1), y], 1)

    infos = [_info(_N, _M), _info(_M, (1, 2, 5)), tp.DimensionInputInfo((1, 2, 9))]
    run = tp.compile(function, args=infos, buckets={"n": _BUCKETS, "m": (2, 6), "k": (3, 9)})
    for n, m, j, k in ((5, 3, 2, 2), (1, 1, 1, 1), (16, 6, 5, 9), (4, 2, 5, 4)):
        x, y = _numbers(n, m), _numbers(m, j)
        _agree(run(x, y, k), function(tp.Tensor(x), tp.Tensor(y), k))


@pytest.mark.usefixtures("poisoned")
def test_what_mixes_other_dimensions_serves_any_number_of_images() -> None:
    grow = tp.ConvTranspose(3, 1, (2, 2), stride=(2, 2), bias=False)
    grow.weight = tp.Tensor(_numbers(3, 1, 2, 2))

    def function(x: Any) -> Any:
        small = tp.maxpool(x, (2, 2), stride=(2, 2))
        large = tp.resize(small, mode="nearest", scales=(1, 1, 2, 2))
        levels = tp.dequantize(tp.quantize(x, 0.5, tp.int8), 0.5, tp.float32)
        return small, large, levels, *tp.topk(x, 2, 3), grow(x), tp.avgpool(x, (2, 2)).sum(0)

    run = tp.compile(function, args=[_info(_N, 3, 4, 4)], buckets={"n": (16,)})
    for n in (1, 5):
        x = _numbers(n, 3, 4, 4)
        _agree(run(x), function(tp.Tensor(x)))


@pytest.mark.usefixtures("poisoned")
def test_images_of_any_size_under_a_convolution() -> None:
    weights = tp.Tensor(_numbers(2, 3, 3, 3))
    conv = tp.Conv(3, 2, (3, 3), stride=(2, 1), padding=[(1, 1), (1, 1)], bias=False)
    conv.weight = weights
    buckets = {"x.2": (8, 16), "n": (16,), "x.0": (4,)}
    run = tp.compile(lambda x: tp.relu(conv(x)).mean((2, 3)), args=[_info((1, 2, 4), 3, (3, 5, 16), _N)], buckets=buckets)
    for shape in ((1, 3, 3, 1), (2, 3, 5, 16), (4, 3, 9, 7)):
        x = _numbers(*shape)
        _agree(run(x), tp.relu(conv(tp.Tensor(x))).mean((2, 3)))


@pytest.mark.parametrize("dtype", [tp.float16, tp.bfloat16, tp.int32, tp.int64, tp.int8, tp.bool], ids=lambda d: d.name)
@pytest.mark.usefixtures("poisoned")
def test_inputs_of_every_kind_are_padded(dtype: tp.dtype) -> None:
    def function(x: Any) -> Any:
        return tp.flip(x, 0), tp.where(x, x, x) if dtype is tp.bool else tp.max(x, 0), x[-1], tp.concatenate([x, x], 0)

    run = tp.compile(function, args=[_info(_N, 2, dtype=dtype)], buckets={"n": _BUCKETS})
    for n in (1, 3, 5):
        x = tp.Tensor(_numbers(n, 2)).cast(dtype).eval()
        _agree(run(x), function(x))


class _Decoder(tp.Module):
    """A layer of a language model, and the logits of the last token."""

    def __init__(self) -> None:
        self.embedding, self.qkv = tp.Embedding(11, 8), tp.Linear(8, 24)
        self.norm, self.head = tp.LayerNorm(8), tp.Linear(8, 11)

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        q, k, v = tp.split(self.qkv(self.norm(x)), 3, -1)
        length = tokens.shape[1]
        later = tp.triu(tp.full((length, length), -float("inf")), 1)
        return self.head(x + tp.softmax(q @ k.transpose(1, 2) + later, -1) @ v)[:, -1]


def _decoder() -> _Decoder:
    model, numbers = _Decoder(), np.random.default_rng(1)
    model.load_state_dict({k: numbers.standard_normal(tuple(v.shape)).astype(np.float32) for k, v in model.state_dict().items()})
    return model


@pytest.mark.usefixtures("poisoned")
def test_generation_compiles_once_for_each_bucket_that_it_reaches() -> None:
    model = _decoder()
    info = _info(1, (1, 4, 16), dtype=tp.int32)
    exact, run = tp.compile(model, args=[info]), tp.compile(model, args=[info], buckets={"tokens.1": _BUCKETS})
    tokens, compiled = np.array([[3]], np.int32), []
    for _ in range(15):
        before = CACHE.compiled
        logits = run(tokens)
        compiled.append(CACHE.compiled - before)
        _agree(logits, exact(tokens))
        tokens = np.concatenate([tokens, logits.numpy().argmax(-1)[None].astype(np.int32)], 1)
    assert compiled == [0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert "true_tokens.1" in str(run.flat_ir) and "true_tokens.1" not in str(run.trace)
    with pytest.raises(ShapeError, match="a size from 1 to 16"):
        run(np.zeros((1, 17), np.int32))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: tp.reshape(x, (3, -1)), "move padding in between"),
        (lambda x: tp.flatten(x.transpose(0, 1)), "move padding in between"),
        (lambda x: tp.rand(x.shape), "cannot tell padding from elements"),
        (lambda x: tp.topk(x, 1, 0)[0], "mixes elements along it"),
        (lambda x: tp.maxpool(x.unsqueeze(0).unsqueeze(0), (1, 1)), "mixes elements along it"),
        (lambda x: tp.resize(x, (8, 6)), "mixes elements along it"),
        (lambda x: tp.quantize(x, tp.ones((x.shape[0],)), tp.int8, dim=0), "mixes elements along it"),
        (lambda x: tp.zeros((20 - x.shape[0],)), "may shrink"),
        (lambda x: tp.pad(x, [(x.shape[0], 0), (0, 0)]), "a border that depends on it"),
    ],
)
def test_what_would_depend_on_padding_is_refused_at_the_users_line(function: Any, said: str) -> None:
    with pytest.raises(CompileError, match=said) as error:
        tp.compile(function, args=[_info(_N, 3)], buckets={"n": _BUCKETS})
    assert f"at {__file__}:" in str(error.value) and "buckets for 'n'" in str(error.value)


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"length": (4, 16)}, ArgumentError, "buckets of compile: expected a dynamic dimension, of n, got 'length'"),
        ({"n": (4, 8)}, ArgumentError, "ascending sizes from 1 or more to 16"),
        ({"n": (8, 4, 16)}, ArgumentError, "ascending sizes"),
        ({"n": (0, 16)}, ArgumentError, "ascending sizes"),
        ({"n": ()}, ArgumentError, "ascending sizes"),
        ({"n": 16}, DTypeError, "a sequence of ints"),
        ({"n": (1.5, 16)}, DTypeError, "a sequence of ints"),
        ((4, 16), DTypeError, "a mapping"),
    ],
)
def test_buckets_that_are_none_are_refused(given: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        tp.compile(lambda x: x + 1.0, args=[_info(_N)], buckets=given)


@pytest.mark.usefixtures("poisoned")
def test_sizes_that_have_to_agree_do_so_in_buckets_or_are_refused() -> None:
    infos = [_info(_SIZES), _info(_SIZES)]
    with pytest.raises(CompileError, match=r"buckets in which .* == .*, got other ones for 'x.0' and 'y.0'"):
        tp.compile(lambda x, y: x + y, args=infos, buckets={"x.0": _BUCKETS})
    run = tp.compile(lambda x, y: x + y, args=infos, buckets={"x.0": _BUCKETS, "y.0": _BUCKETS})
    assert run(_numbers(3), _numbers(3)).tolist() == (2 * _numbers(3)).tolist()
    with pytest.raises(ShapeError, match="x.0 == y.0"):
        run(_numbers(3), _numbers(4))

    def pairs(x: Any) -> Any:
        return tp.reshape(x, (x.shape[0] // 2, 2))

    assert tp.compile(pairs, args=[_info(_SIZES)], buckets={"x.0": (6, 16)})(_numbers(4)).tolist() == _numbers(4).reshape(2, 2).tolist()
    with pytest.raises(CompileError, match=r"buckets in which .*, got other ones for 'x.0'"):
        tp.compile(pairs, args=[_info(_SIZES)], buckets={"x.0": (5, 16)})


def test_neither_donated_nor_saved(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no donated inputs"):
        tp.compile(lambda x: x + 1.0, args=[_info(_N)], donate=["x"], buckets={"n": _BUCKETS})
    run = tp.compile(lambda x: x + 1.0, args=[_info(_N)], buckets={"n": _BUCKETS})
    with pytest.raises(ArgumentError, match="an executable without buckets"):
        run.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
