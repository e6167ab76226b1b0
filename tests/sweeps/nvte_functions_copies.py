"""Right calls of nvte: sums, copies, the order of columns, and casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from nvte_draws import DRAWN_CALLS, FP8, Draw, DrawnCall, Wanted, draws, f64
from nvte_functions_activations import transposed

from fusible import nvte
from fusible.nvte import Tensor, Type
from fusible.quantized import MXFP8Quantizer

# Sums, copies, the order of columns.


@draws("add")
def _(draw: Draw) -> DrawnCall:
    rows, columns, type = draw.rows(), draw.columns(), draw.out()
    a, b = draw.tensor(rows, columns), draw.tensor(*draw.of((rows, columns), (columns,), (1, columns)))
    return DrawnCall({"a": a, "b": b, "type": type}, [Wanted(f64(a) + f64(b), 1, f64(a).abs() + f64(b).abs(), type=type)])


@draws("scale")
def _(draw: Draw) -> DrawnCall:
    x, factor, type = draw.tensor(draw.rows(), draw.columns()), draw.of(0.0, 1.0, -2.5, 1e-3), draw.out()
    return DrawnCall({"x": x, "factor": factor, "type": type}, [Wanted(f64(x) * factor, type=type)])


@draws("copy")
def _(draw: Draw) -> DrawnCall:
    x = draw.tensor(draw.rows(), draw.columns())
    return DrawnCall({"x": x}, [Wanted(f64(x), exact=True, type=x.type)])


@draws("accumulator")
def _(draw: Draw) -> DrawnCall:
    type = draw.type()

    def check(found: Any) -> None:
        assert found is nvte.DType.Float32

    return DrawnCall({"type": type}, check)


@draws("dbias")
def _(draw: Draw) -> DrawnCall:
    dy, type = draw.tensor(draw.rows(), draw.columns()), draw.type()
    return DrawnCall({"dy": dy, "type": type}, [Wanted(f64(dy).sum(0), dy.shape[0], f64(dy).abs().sum(0), type=type)])


@draws("reshape")
def _(draw: Draw) -> DrawnCall:
    a, b, columns = draw.rows(), draw.of(1, 2, 3), draw.columns()
    x = draw.tensor(a * b, columns)
    if draw.of(True, False):
        x = nvte.cast(x, FP8[0])
    return DrawnCall({"x": x, "shape": (a, b, columns)}, [Wanted(f64(x).reshape(a, b, columns), exact=True, type=x.type)])


def _blocks(x: torch.Tensor, outer: int, inner: int, size: int) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], outer, inner, size).transpose(-3, -2).reshape(x.shape)


@draws("interleave")
def _(draw: Draw) -> DrawnCall:
    size, count = draw.of(1, 2, 8), draw.of(1, 2, 3)
    x = draw.tensor(draw.rows(), 2 * size * count)
    return DrawnCall({"x": x, "size": size}, [Wanted(_blocks(f64(x), 2, count, size), exact=True, type=x.type)])


@draws("deinterleave")
def _(draw: Draw) -> DrawnCall:
    size, count = draw.of(1, 2, 8), draw.of(1, 2, 3)
    x = draw.tensor(draw.rows(), 2 * size * count)
    return DrawnCall({"x": x, "size": size}, [Wanted(_blocks(f64(x), count, 2, size), exact=True, type=x.type)])


@draws("split")
def _(draw: Draw) -> DrawnCall:
    dim, sizes = draw.of(0, 1), [draw.of(0, 1, 2, 5), draw.of(1, 3), draw.of(0, 2)]
    x = draw.tensor(*((sum(sizes), draw.columns()) if dim == 0 else (draw.rows(), sum(sizes))))
    return DrawnCall({"x": x, "sizes": sizes, "dim": dim}, [Wanted(part, exact=True, type=x.type) for part in f64(x).split(sizes, dim)])


@draws("concatenate")
def _(draw: Draw) -> DrawnCall:
    dim, kind, other = draw.of(0, 1), draw.type(), draw.columns()
    sizes = [draw.of(0, 1, 2, 5) for _ in range(draw.of(1, 2, 3))]
    xs = [draw.tensor(*((size, other) if dim == 0 else (other, size)), type=kind) for size in sizes]
    return DrawnCall({"xs": xs, "dim": dim}, [Wanted(torch.cat([f64(x) for x in xs], dim), exact=True, type=kind)])


@draws("stack")
def _(draw: Draw) -> DrawnCall:
    shape, kind = (draw.rows(), draw.columns()), draw.type()
    tensors = [draw.tensor(*shape, type=kind) for _ in range(draw.of(1, 2, 3))]
    return DrawnCall({"tensors": tensors}, [Wanted(torch.stack([f64(x) for x in tensors]), exact=True, type=kind)])


@draws("unstack")
def _(draw: Draw) -> DrawnCall:
    x = draw.tensor(draw.of(1, 2, 3), draw.rows(), draw.columns())
    return DrawnCall({"x": x}, [Wanted(part, exact=True, type=x.type) for part in f64(x)])


@draws("zeros")
def _(draw: Draw) -> DrawnCall:
    shape, type = (draw.rows(), draw.columns()), draw.type()
    return DrawnCall({"shape": shape, "type": type, "like": draw.tensor(2)}, [Wanted(torch.zeros(shape).double(), exact=True, type=type)])


def _of_shape(shape: tuple[int, ...], type: Type) -> Callable[[Any], None]:
    def check(found: Any) -> None:
        for x in found if isinstance(found, list) else [found]:
            assert x.shape == shape and nvte.element(x.type) == nvte.element(type)

    return check


@draws("empty")
def _(draw: Draw) -> DrawnCall:
    shape, type = (draw.rows(), draw.columns()), draw.out()
    return DrawnCall({"shape": shape, "type": type, "like": draw.tensor(2)}, _of_shape(shape, type))


@draws("empty_like")
def _(draw: Draw) -> DrawnCall:
    x = draw.tensor(draw.rows(), draw.columns())
    return DrawnCall({"x": x}, _of_shape(x.shape, x.type))


@draws("multi_empty_share_metadata")
def _(draw: Draw) -> DrawnCall:
    shape, type = (draw.rows(), draw.columns()), draw.out()
    return DrawnCall({"type": type, "like": draw.tensor(2)}, _of_shape(shape, type), (shape, shape))


# Casts.


def _exact(x: Tensor, type: Type) -> Wanted:
    return Wanted(f64(x), type=type)


@draws("cast")
def _(draw: Draw) -> DrawnCall:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.out()
    return DrawnCall({"x": x, "type": type}, [_exact(x, type)])


@draws("cast_checked")
def _(draw: Draw) -> DrawnCall:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.of(None, draw.out())
    return DrawnCall({"x": x, "type": type}, [_exact(x, x.type if type is None else type)])


@draws("quantize")
def _(draw: Draw) -> DrawnCall:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.of(*FP8)
    return DrawnCall({"x": x, "type": type}, [_exact(x, type), None])


@draws("dequantize")
def _(draw: Draw) -> DrawnCall:
    x, dtype = nvte.cast(draw.tensor(draw.rows(), draw.columns()), draw.of(*FP8)), draw.type()
    return DrawnCall({"x": x, "dtype": dtype}, [_exact(x, dtype)])


@draws("unpadded")
def _(draw: Draw) -> DrawnCall:
    """A tensor with zeros behind it: its values, without them. Any other: itself."""
    rows, like = 32 * draw.of(1, 2) + draw.of(0, 1, 13), draw.type()
    e4m3 = nvte.DType.Float8E4M3
    x = nvte.cast(draw.tensor(rows, 64, type=like), nvte.QuantizedType(e4m3, "mxfp8", "", MXFP8Quantizer(e4m3)))
    return DrawnCall({"x": x}, [Wanted(f64(nvte.dequantize(x, like)), exact=True, type=like if rows % 32 else x.type)])


@draws("plain")
def _(draw: Draw) -> DrawnCall:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.type()
    return DrawnCall({"data": x.data, "type": type}, [_exact(x, type)])


@draws("emit")
def _(draw: Draw) -> DrawnCall:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.type()
    return DrawnCall({"data": x.data, "type": type, "quantizer": None}, [_exact(x, type)])


@draws("by_columns")
def _(draw: Draw) -> DrawnCall:
    x = nvte.cast(draw.tensor(draw.rows(), draw.columns()), draw.of(*FP8))
    return DrawnCall({"x": x}, [Wanted(f64(x), exact=True, type=x.type)])


@draws("transpose")
def _(draw: Draw) -> DrawnCall:
    x = draw.tensor(draw.rows(), draw.columns())
    if draw.of(True, False):
        x = nvte.cast(x, draw.of(*FP8))
    return DrawnCall({"x": x}, [Wanted(f64(x).T, exact=True, type=x.type)])


def _both(x: Tensor, type: Type) -> list[Wanted]:
    wanted = _exact(x, type)
    return [wanted, transposed(wanted)]


@draws("cast_transpose")
def _(draw: Draw) -> DrawnCall:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.out()
    return DrawnCall({"x": x, "type": type}, _both(x, type))


@draws("cast_transpose_checked")
def _(draw: Draw) -> DrawnCall:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.of(None, draw.out())
    return DrawnCall({"x": x, "type": type}, _both(x, x.type if type is None else type))


@draws("multi_cast_transpose")
def _(draw: Draw) -> DrawnCall:
    xs = [draw.tensor(draw.rows(), draw.columns()) for _ in range(2)]
    types = [draw.out() for _ in xs]
    return DrawnCall({"xs": xs, "types": types}, [w for x, type in zip(xs, types, strict=True) for w in _both(x, type)])


@draws("multi_cast_transpose_checked")
def _(draw: Draw) -> DrawnCall:
    return DRAWN_CALLS["multi_cast_transpose"](draw)


@draws("bgrad_cast")
def _(draw: Draw) -> DrawnCall:
    dy, type, dbias_type = draw.tensor(draw.rows(), draw.columns()), draw.out(), draw.type()
    sums = Wanted(f64(dy).sum(0), dy.shape[0], f64(dy).abs().sum(0), type=dbias_type, rounded=(dy.type,))
    return DrawnCall({"dy": dy, "type": type, "dbias_type": dbias_type}, [_exact(dy, type), sums])


@draws("cast_transpose_dbias_checked")
def _(draw: Draw) -> DrawnCall:
    given = DRAWN_CALLS["bgrad_cast"](draw)
    y, sums = given.wanted  # type: ignore[misc]
    return DrawnCall(given.arguments, [y, transposed(y), sums])


@draws("make_nvte_tensor")
def _(draw: Draw) -> DrawnCall:
    x = draw.tensor(draw.rows(), draw.columns())
    return DrawnCall({"data": x.data}, [Wanted(f64(x), exact=True, type=x.type)])


@draws("rescale")
def _(draw: Draw) -> DrawnCall:
    x, exponent = nvte.cast(draw.tensor(draw.rows(), draw.columns()), draw.of(*FP8)), draw.of(-3, 0, 1, 5)
    return DrawnCall({"x": x, "exponent": exponent}, [Wanted(f64(x) * 2.0**exponent, exact=True, type=x.type)])
