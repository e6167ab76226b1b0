"""Right calls of nvte: sums, copies, the order of columns, and casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from nvte_draws import FP8, WORDS, Draw, Given, Wanted, f64, word
from nvte_words_activations import transposed

from fusible import nvte
from fusible.nvte import Tensor, Type
from fusible.quantized import MXFP8Quantizer

# Sums, copies, the order of columns.


@word("add")
def _(draw: Draw) -> Given:
    rows, columns, type = draw.rows(), draw.columns(), draw.out()
    a, b = draw.tensor(rows, columns), draw.tensor(*draw.of((rows, columns), (columns,), (1, columns)))
    return Given({"a": a, "b": b, "type": type}, [Wanted(f64(a) + f64(b), 1, f64(a).abs() + f64(b).abs(), type=type)])


@word("scale")
def _(draw: Draw) -> Given:
    x, factor, type = draw.tensor(draw.rows(), draw.columns()), draw.of(0.0, 1.0, -2.5, 1e-3), draw.out()
    return Given({"x": x, "factor": factor, "type": type}, [Wanted(f64(x) * factor, type=type)])


@word("copy")
def _(draw: Draw) -> Given:
    x = draw.tensor(draw.rows(), draw.columns())
    return Given({"x": x}, [Wanted(f64(x), exact=True, type=x.type)])


@word("accumulator")
def _(draw: Draw) -> Given:
    type = draw.type()

    def check(found: Any) -> None:
        assert found is nvte.DType.Float32

    return Given({"type": type}, check)


@word("dbias")
def _(draw: Draw) -> Given:
    dy, type = draw.tensor(draw.rows(), draw.columns()), draw.type()
    return Given({"dy": dy, "type": type}, [Wanted(f64(dy).sum(0), dy.shape[0], f64(dy).abs().sum(0), type=type)])


@word("reshape")
def _(draw: Draw) -> Given:
    a, b, columns = draw.rows(), draw.of(1, 2, 3), draw.columns()
    x = draw.tensor(a * b, columns)
    if draw.of(True, False):
        x = nvte.cast(x, FP8[0])
    return Given({"x": x, "shape": (a, b, columns)}, [Wanted(f64(x).reshape(a, b, columns), exact=True, type=x.type)])


def _blocks(x: torch.Tensor, outer: int, inner: int, size: int) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], outer, inner, size).transpose(-3, -2).reshape(x.shape)


@word("interleave")
def _(draw: Draw) -> Given:
    size, count = draw.of(1, 2, 8), draw.of(1, 2, 3)
    x = draw.tensor(draw.rows(), 2 * size * count)
    return Given({"x": x, "size": size}, [Wanted(_blocks(f64(x), 2, count, size), exact=True, type=x.type)])


@word("deinterleave")
def _(draw: Draw) -> Given:
    size, count = draw.of(1, 2, 8), draw.of(1, 2, 3)
    x = draw.tensor(draw.rows(), 2 * size * count)
    return Given({"x": x, "size": size}, [Wanted(_blocks(f64(x), count, 2, size), exact=True, type=x.type)])


@word("split")
def _(draw: Draw) -> Given:
    dim, sizes = draw.of(0, 1), [draw.of(0, 1, 2, 5), draw.of(1, 3), draw.of(0, 2)]
    x = draw.tensor(*((sum(sizes), draw.columns()) if dim == 0 else (draw.rows(), sum(sizes))))
    return Given({"x": x, "sizes": sizes, "dim": dim}, [Wanted(part, exact=True, type=x.type) for part in f64(x).split(sizes, dim)])


@word("concatenate")
def _(draw: Draw) -> Given:
    dim, kind, other = draw.of(0, 1), draw.type(), draw.columns()
    sizes = [draw.of(0, 1, 2, 5) for _ in range(draw.of(1, 2, 3))]
    xs = [draw.tensor(*((size, other) if dim == 0 else (other, size)), type=kind) for size in sizes]
    return Given({"xs": xs, "dim": dim}, [Wanted(torch.cat([f64(x) for x in xs], dim), exact=True, type=kind)])


@word("stack")
def _(draw: Draw) -> Given:
    shape, kind = (draw.rows(), draw.columns()), draw.type()
    tensors = [draw.tensor(*shape, type=kind) for _ in range(draw.of(1, 2, 3))]
    return Given({"tensors": tensors}, [Wanted(torch.stack([f64(x) for x in tensors]), exact=True, type=kind)])


@word("unstack")
def _(draw: Draw) -> Given:
    x = draw.tensor(draw.of(1, 2, 3), draw.rows(), draw.columns())
    return Given({"x": x}, [Wanted(part, exact=True, type=x.type) for part in f64(x)])


@word("zeros")
def _(draw: Draw) -> Given:
    shape, type = (draw.rows(), draw.columns()), draw.type()
    return Given({"shape": shape, "type": type, "like": draw.tensor(2)}, [Wanted(torch.zeros(shape).double(), exact=True, type=type)])


def _of_shape(shape: tuple[int, ...], type: Type) -> Callable[[Any], None]:
    def check(found: Any) -> None:
        for x in found if isinstance(found, list) else [found]:
            assert x.shape == shape and nvte.element(x.type) == nvte.element(type)

    return check


@word("empty")
def _(draw: Draw) -> Given:
    shape, type = (draw.rows(), draw.columns()), draw.out()
    return Given({"shape": shape, "type": type, "like": draw.tensor(2)}, _of_shape(shape, type))


@word("empty_like")
def _(draw: Draw) -> Given:
    x = draw.tensor(draw.rows(), draw.columns())
    return Given({"x": x}, _of_shape(x.shape, x.type))


@word("multi_empty_share_metadata")
def _(draw: Draw) -> Given:
    shape, type = (draw.rows(), draw.columns()), draw.out()
    return Given({"type": type, "like": draw.tensor(2)}, _of_shape(shape, type), (shape, shape))


# Casts.


def _exact(x: Tensor, type: Type) -> Wanted:
    return Wanted(f64(x), type=type)


@word("cast")
def _(draw: Draw) -> Given:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.out()
    return Given({"x": x, "type": type}, [_exact(x, type)])


@word("cast_checked")
def _(draw: Draw) -> Given:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.of(None, draw.out())
    return Given({"x": x, "type": type}, [_exact(x, x.type if type is None else type)])


@word("quantize")
def _(draw: Draw) -> Given:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.of(*FP8)
    return Given({"x": x, "type": type}, [_exact(x, type), None])


@word("dequantize")
def _(draw: Draw) -> Given:
    x, dtype = nvte.cast(draw.tensor(draw.rows(), draw.columns()), draw.of(*FP8)), draw.type()
    return Given({"x": x, "dtype": dtype}, [_exact(x, dtype)])


@word("unpadded")
def _(draw: Draw) -> Given:
    """A tensor with zeros behind it: its values, without them. Any other: itself."""
    rows, like = 32 * draw.of(1, 2) + draw.of(0, 1, 13), draw.type()
    e4m3 = nvte.DType.Float8E4M3
    x = nvte.cast(draw.tensor(rows, 64, type=like), nvte.QuantizedType(e4m3, "mxfp8", "", MXFP8Quantizer(e4m3)))
    return Given({"x": x}, [Wanted(f64(nvte.dequantize(x, like)), exact=True, type=like if rows % 32 else x.type)])


@word("plain")
def _(draw: Draw) -> Given:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.type()
    return Given({"data": x.data, "type": type}, [_exact(x, type)])


@word("emit")
def _(draw: Draw) -> Given:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.type()
    return Given({"data": x.data, "type": type, "quantizer": None}, [_exact(x, type)])


@word("by_columns")
def _(draw: Draw) -> Given:
    x = nvte.cast(draw.tensor(draw.rows(), draw.columns()), draw.of(*FP8))
    return Given({"x": x}, [Wanted(f64(x), exact=True, type=x.type)])


@word("transpose")
def _(draw: Draw) -> Given:
    x = draw.tensor(draw.rows(), draw.columns())
    if draw.of(True, False):
        x = nvte.cast(x, draw.of(*FP8))
    return Given({"x": x}, [Wanted(f64(x).T, exact=True, type=x.type)])


def _both(x: Tensor, type: Type) -> list[Wanted]:
    wanted = _exact(x, type)
    return [wanted, transposed(wanted)]


@word("cast_transpose")
def _(draw: Draw) -> Given:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.out()
    return Given({"x": x, "type": type}, _both(x, type))


@word("cast_transpose_checked")
def _(draw: Draw) -> Given:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.of(None, draw.out())
    return Given({"x": x, "type": type}, _both(x, x.type if type is None else type))


@word("multi_cast_transpose")
def _(draw: Draw) -> Given:
    xs = [draw.tensor(draw.rows(), draw.columns()) for _ in range(2)]
    types = [draw.out() for _ in xs]
    return Given({"xs": xs, "types": types}, [w for x, type in zip(xs, types, strict=True) for w in _both(x, type)])


@word("multi_cast_transpose_checked")
def _(draw: Draw) -> Given:
    return WORDS["multi_cast_transpose"](draw)


@word("bgrad_cast")
def _(draw: Draw) -> Given:
    dy, type, dbias_type = draw.tensor(draw.rows(), draw.columns()), draw.out(), draw.type()
    sums = Wanted(f64(dy).sum(0), dy.shape[0], f64(dy).abs().sum(0), type=dbias_type, rounded=(dy.type,))
    return Given({"dy": dy, "type": type, "dbias_type": dbias_type}, [_exact(dy, type), sums])


@word("cast_transpose_dbias_checked")
def _(draw: Draw) -> Given:
    given = WORDS["bgrad_cast"](draw)
    y, sums = given.wanted  # type: ignore[misc]
    return Given(given.arguments, [y, transposed(y), sums])


@word("make_nvte_tensor")
def _(draw: Draw) -> Given:
    x = draw.tensor(draw.rows(), draw.columns())
    return Given({"data": x.data}, [Wanted(f64(x), exact=True, type=x.type)])


@word("rescale")
def _(draw: Draw) -> Given:
    x, exponent = nvte.cast(draw.tensor(draw.rows(), draw.columns()), draw.of(*FP8)), draw.of(-3, 0, 1, 5)
    return Given({"x": x, "exponent": exponent}, [Wanted(f64(x) * 2.0**exponent, exact=True, type=x.type)])
