"""Grouped lazy tensors: their quantization and their products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible import lazy
from fusible.errors import ArgumentError, DTypeError, NotServedError, ShapeError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla.block_formats import block_values
from fusible.tex.backends.xla.dtypes import to_lazy
from fusible.tex.backends.xla.group_formats import group_values, groups_of, quantize_group
from fusible.tex.backends.xla.groups import Groups, groups
from fusible.tex.backends.xla.operands import dense, flat, fp32, plain
from fusible.tex.grouped_call import build_grouped, is_grouped
from fusible.tex.interface.declare import by_name
from fusible.tex.interface.grouped import Grouped
from fusible.tex.protocol import check_shape, format_of, to_torch

__all__ = ["GroupedKernels"]


class GroupedKernels(Grouped):
    def group_quantize(
        self,
        tensor: Any,
        quantizer: Any,
        num_tensors: int,
        first_dims: Any,
        last_dims: Any = None,
        tensor_offsets: Any = None,
        noop_flag: Any = None,
        output: Any = None,
    ) -> Any:
        for name, value in (("last_dims", last_dims), ("noop_flag", noop_flag), ("output", output)):
            if value is not None:
                raise NotServedError(expected(f"no {name}", of="group_quantize of lazy tensors", got="some", do="quantize rows into a new tensor"))
        return quantize_group(flat(plain(tensor)), quantizer, num_tensors, first_dims, tensor_offsets)[0]

    def bgrad_group_quantize(
        self, tensor: Any, quantizer: Any, num_tensors: int, first_dims: Any, last_dims: Any = None, tensor_offsets: Any = None
    ) -> Any:
        if last_dims is not None:
            raise ArgumentError(expected("no last_dims", of="bgrad_group_quantize", got="some", do="pass members of equal width"))
        x = flat(plain(tensor))
        grouped, of = quantize_group(x, quantizer, num_tensors, first_dims, tensor_offsets)
        tiles = of.tiles()
        return [grouped, lazy.cast(tiles.sums(lazy.sum(tiles.put(fp32(x)), 1)), x.dtype)]

    def group_dequantize(self, input: Any, otype: Any) -> Any:
        if not is_grouped(input) or input.quantizer is None:
            got = type(input).__qualname__ if not is_grouped(input) else "an unquantized one"
            raise DTypeError(expected("a quantized grouped tensor", of="group_dequantize", got=got, do="quantize it by group_quantize"))
        of = groups_of(input)
        values = lazy.where(of.inside[:, None], group_values(input, "rowwise" if input.rowwise_data is not None else "columnwise", of), 0.0)
        return build_grouped(
            input.quantizer,
            shape=tuple(input.logical_shape),
            dtype=to_torch(otype),
            num_tensors=input.num_tensors,
            quantizer=None,
            data=lazy.reshape(lazy.cast(values, to_lazy(otype)), (-1,)),
            first_dims=input.first_dims,
            tensor_offsets=input.tensor_offsets,
        )

    @by_name
    def te_general_grouped_gemm_for_grouped_tensor(self, call: Any) -> Any:
        """Two kinds of products: of each group's rows with a matrix of its own, and of two groups' rows over those rows."""
        A, B, D = call.A, call.B, call.D
        if not is_grouped(B) or (call.transb and (call.transa or not is_grouped(A))):
            do = "group the rows of B, and of A where B is transposed"
            raise NotServedError(expected("products of groups of rows", of="a grouped GEMM of lazy tensors", got="others", do=do))
        if getattr(D, "quantizer", None) is not None:
            raise DTypeError(expected("an unquantized D", of="a grouped GEMM", got="a quantized one", do="quantize the result by group_quantize"))
        if call.bias_scale is not None and call.bias is None:
            raise ArgumentError(expected("a bias", of="a grouped GEMM with bias_scale", got="None", do="pass one, or no bias_scale"))
        of = groups_of(B)
        if not call.transb:
            _write_rows(D, _by_matrix(A, call.transa, B, of), call.bias, call.bias_scale, call.alpha, call.beta, of)
        elif call.bias is None:
            _write_each(D, _over_rows(A, B, of), call.alpha, call.beta, of)
        else:
            do = "add it elsewhere"
            raise NotServedError(expected("no bias", of="a grouped GEMM over the rows of lazy tensors", got="one", do=do))
        return D

    te_general_grouped_gemm_for_discrete_in = te_general_grouped_gemm_for_grouped_tensor
    te_general_grouped_gemm_for_discrete_out = te_general_grouped_gemm_for_grouped_tensor

    def get_grouped_gemm_setup_workspace_size(self, num_tensors: int) -> int:
        return 0


def _matrices(A: Any, along_rows: bool, of: Groups) -> Tensor:
    """The groups' matrices in fp32, ``[groups, N, K]``."""
    if is_grouped(A):
        if A.first_dims is not None:
            do = "pass a list of matrices"
            raise NotServedError(expected("matrices of one shape", of="a grouped A of lazy tensors", got="others", do=do))
        rows, columns = A.logical_shape
        values = group_values(A, "rowwise" if along_rows else "columnwise", groups(rows, A.num_tensors, None))
        found = lazy.reshape(values, (A.num_tensors, rows // A.num_tensors, columns))
    else:
        found = lazy.stack([_values(matrix, along_rows) for matrix in A], 0)
    if found.shape[0] != of.count:
        got = f"{found.shape[0]} and {of.count}"
        raise ArgumentError(expected("equally many members", of="A and B of a grouped GEMM", got=got, do="describe the same problems"))
    return found


def _values(x: Any, along_rows: bool) -> Tensor:
    """The fp32 matrix that a product reads of ``x``."""
    if format_of(x) in ("none", "float8"):
        return fp32(x) if format_of(x) == "none" else dense(x)
    way = "rowwise" if along_rows else "columnwise"
    values, factor = block_values(x, way)
    return values if factor is None else values * lazy.reshape(factor, (-1, 1) if along_rows else (1, -1))


def _by_matrix(A: Any, transa: bool, B: Any, of: Groups) -> Tensor:
    """``B_i @ op(A_i)`` of every group in fp32, ``[rows, columns]``."""
    matrices, tiles = _matrices(A, transa, of), of.tiles()
    depth = matrices.shape[2 if transa else 1]
    if depth != B.logical_shape[1]:
        got = f"{B.logical_shape[1]} and {depth}"
        raise ShapeError(expected("one contracted dimension", of="B and A of a grouped GEMM", got=got, do="transpose or reshape one of them"))
    own = lazy.gather(matrices, 0, tiles.group)
    rows = tiles.put(group_values(B, "rowwise", of))
    return tiles.take(lazy.dot_general(rows, own, ((2,), (2 if transa else 1,)), ((0,), (0,)), lazy.float32))


def _over_rows(A: Any, B: Any, of: Groups) -> Tensor:
    """``B_i.T @ A_i`` of every group in fp32, ``[groups, N, K]``."""
    if A.num_tensors != B.num_tensors or A.logical_shape[0] != B.logical_shape[0]:
        got = f"{A.num_tensors} of {list(A.logical_shape)} and {B.num_tensors} of {list(B.logical_shape)}"
        raise ArgumentError(expected("the same groups", of="A and B of a grouped GEMM", got=got, do="describe the same problems"))
    tiles = of.tiles()
    left, right = (tiles.put(group_values(x, "columnwise", of)) for x in (B, A))
    return tiles.sums(lazy.dot_general(left, right, ((1,), (1,)), ((0,), (0,)), lazy.float32))


def _factor(values: Tensor, of: Groups, name: str) -> Tensor:
    """One number per group of an fp32 ``[1]`` or ``[groups]``."""
    if values.size not in (1, of.count):
        check_shape(values, (of.count,), f"{name} of a grouped GEMM")
    return lazy.broadcast_to(lazy.reshape(values, (-1,)), (of.count,))


def _accumulated(result: Tensor, former: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    return result * alpha + lazy.where(beta == 0.0, 0.0, fp32(former) * beta)


def _write_rows(D: Any, result: Tensor, bias: Any, bias_scale: Tensor | None, alpha: Tensor, beta: Tensor, of: Groups) -> None:
    if not is_grouped(D) or D.rowwise_data.size != result.size:
        got = list(D.logical_shape) if is_grouped(D) else type(D).__qualname__
        raise ShapeError(expected(f"a grouped tensor of {list(result.shape)}", of="D of a grouped GEMM", got=got, do="pass one"))
    former = lazy.reshape(D.rowwise_data, result.shape)
    result = result * of.spread(_factor(alpha, of, "alpha"))[:, None]
    if bias is not None:
        rows = bias.rowwise_data if is_grouped(bias) else bias
        added = of.spread(fp32(lazy.reshape(rows, (of.count, result.shape[1]))))
        result = result + (added if bias_scale is None else added * fp32(lazy.reshape(bias_scale, (-1,)))[: of.rows, None])
    result = _accumulated(result, former, lazy.ones(()), of.spread(_factor(beta, of, "beta"))[:, None])
    new = lazy.where(of.inside[:, None], lazy.cast(result, former.dtype), former)
    D.rowwise_data.assign_(lazy.reshape(new, D.rowwise_data.shape))


def _write_each(D: Any, result: Tensor, alpha: Tensor, beta: Tensor, of: Groups) -> None:
    alpha, beta = (lazy.reshape(_factor(values, of, name), (-1, 1, 1)) for values, name in ((alpha, "alpha"), (beta, "beta")))
    places: Sequence[Tensor] = [D.rowwise_data] if is_grouped(D) else D
    if sum(place.size for place in places) != result.size:
        got = [list(place.shape) for place in places]
        raise ShapeError(expected(f"{of.count} of {list(result.shape[1:])}", of="D of a grouped GEMM", got=got, do="pass one for each group"))
    if is_grouped(D):
        former = lazy.reshape(D.rowwise_data, result.shape)
        new = lazy.cast(_accumulated(result, former, alpha, beta), former.dtype)
        D.rowwise_data.assign_(lazy.reshape(new, D.rowwise_data.shape))
        return
    for i, place in enumerate(places):
        former = lazy.reshape(place, result.shape[1:])
        new = _accumulated(result[i], former, alpha[i], beta[i])
        place.assign_(lazy.reshape(lazy.cast(new, place.dtype), place.shape))
