"""Grouped lazy tensors: their quantization and their products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible import lazy
from fusible.errors import ArgumentError, NotServedError, ShapeError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla.block_formats import BLOCKS
from fusible.tex.backends.xla.dtypes import to_lazy
from fusible.tex.backends.xla.group_formats import group_values, groups_of, quantize_group
from fusible.tex.backends.xla.grouped_list import listed_products
from fusible.tex.backends.xla.groups import Groups, Tiles, groups
from fusible.tex.backends.xla.operands import dense, flat, fp32, plain
from fusible.tex.calls.grouped import is_grouped
from fusible.tex.formats import PLAIN, format_of, logical_shape
from fusible.tex.formulas.grouped import GroupedFormulas
from fusible.tex.interface.declare import CallArguments, by_name
from fusible.tex.protocol import check_shape, outer

__all__ = ["GroupedKernels"]


class GroupedKernels(GroupedFormulas):
    @by_name
    def group_quantize(self, call: CallArguments) -> Any:
        for name in ("last_dims", "noop_flag", "output"):
            if getattr(call, name) is not None:
                raise NotServedError(expected(f"no {name}", of="group_quantize of lazy tensors", got="some", do="quantize rows into a new tensor"))
        return quantize_group(flat(plain(call.tensor)), call)[0]

    @by_name
    def bgrad_group_quantize(self, call: CallArguments) -> Any:
        if call.last_dims is not None:
            raise ArgumentError(expected("no last_dims", of="bgrad_group_quantize", got="some", do="pass members of equal width"))
        x = flat(plain(call.tensor))
        grouped, of = quantize_group(x, call)
        tiles = of.tiles()
        return [grouped, lazy.cast(tiles.sums(lazy.sum(tiles.put(fp32(x)), 1)), x.dtype)]

    def _group_values(self, x: Any, otype: Any) -> Tensor:
        of = groups_of(x)
        values = lazy.where(of.inside[:, None], group_values(x, "rowwise" if x.rowwise_data is not None else "columnwise", of), 0.0)
        return lazy.reshape(lazy.cast(values, to_lazy(otype)), (-1,))

    @by_name
    def te_general_grouped_gemm(self, call: CallArguments) -> Any:
        return listed_products(self.generic_gemm, call)  # type: ignore[attr-defined]

    def _multiply_groups(self, call: CallArguments) -> None:
        """Two kinds of products: of each group's rows with a matrix of its own, and of two groups' rows over those rows."""
        A, B, D = call.A, call.B, call.D
        if not is_grouped(B) or (call.transb and call.transa):
            do = "group the rows of B, and transpose one of the two at most"
            raise NotServedError(expected("products of groups of rows", of="a grouped GEMM of lazy tensors", got="others", do=do))
        if call.bias_scale is not None and call.bias is None:
            raise ArgumentError(expected("a bias", of="a grouped GEMM with bias_scale", got="None", do="pass one, or no bias_scale"))
        of = groups_of(B)
        if not call.transb:
            _write_rows(D, call, of)
        elif call.bias is None:
            _write_each(D, _over_rows(A, B, of), call.alpha, call.beta, of)
        else:
            do = "add it elsewhere"
            raise NotServedError(expected("no bias", of="a grouped GEMM over the rows of lazy tensors", got="one", do=do))


def _matrices(A: Any, along_rows: bool, of: Groups, height: int) -> Tensor:
    """The groups' matrices in fp32, ``[groups, height, K]``: the product says how many rows each has."""
    if is_grouped(A):
        (rows, columns), lies = A.logical_shape, groups_of(A)
        values = group_values(A, "rowwise" if along_rows else "columnwise", lies)
        if A.first_dims is None and A.tensor_offsets is None:
            found = lazy.reshape(values, (A.num_tensors, rows // A.num_tensors, columns))
        else:
            found = lazy.gather(values, 0, lies.starts[:, None] + lazy.iota((1, height), 1, lazy.int32))
    else:
        found = lazy.stack([_values(matrix, along_rows) for matrix in A], 0)
    if found.shape[0] != of.count:
        got = f"{found.shape[0]} and {of.count}"
        raise ArgumentError(expected("equally many members", of="A and B of a grouped GEMM", got=got, do="describe the same problems"))
    return found


def _values(x: Any, along_rows: bool) -> Tensor:
    """The fp32 matrix that a product reads of ``x``."""
    form = format_of(x)
    if not form.block_scaled:
        return fp32(x) if form is PLAIN else dense(x)
    way = "rowwise" if along_rows else "columnwise"
    values, factor = BLOCKS.reader.values(x, way)
    return values if factor is None else values * lazy.reshape(factor, (-1, 1) if along_rows else (1, -1))


def _by_matrix(A: Any, transa: bool, B: Any, of: Groups, into: Groups, width: int) -> Tensor:
    """``B_i @ op(A_i)`` of every group in fp32, ``[rows, width]``, in the rows of ``into``."""
    matrices, tiles = _matrices(A, transa, of, width if transa else B.logical_shape[1]), of.tiles()
    depth = matrices.shape[2 if transa else 1]
    if depth != B.logical_shape[1]:
        got = f"{B.logical_shape[1]} and {depth}"
        raise ShapeError(expected("one contracted dimension", of="B and A of a grouped GEMM", got=got, do="transpose or reshape one of them"))
    own = lazy.gather(matrices, 0, tiles.group)
    rows = tiles.put(group_values(B, "rowwise", of))
    return tiles.take(lazy.dot_general(rows, own, ((2,), (2 if transa else 1,)), ((0,), (0,)), lazy.float32), into)


def _over_rows(A: Any, B: Any, of: Groups) -> Tensor:
    """``B_i.T @ A_i`` of every group in fp32, ``[groups, N, K]``. A may be a list."""
    count = A.num_tensors if is_grouped(A) else len(A)
    if count != B.num_tensors:
        got = f"{count} and {B.num_tensors}"
        raise ArgumentError(expected("equally many members", of="A and B of a grouped GEMM", got=got, do="describe the same problems"))
    if is_grouped(A):
        beside = groups_of(A)
        values = group_values(A, "columnwise", beside)
    else:
        rows = [outer(logical_shape(a)) for a in A]
        beside, values = groups(sum(rows), count, lazy.Tensor(rows, dtype=lazy.int32)), lazy.concatenate([flat(_values(a, False)) for a in A], 0)
    shift = of.tiles().shift
    wanted = max(Tiles(each, shift).count for each in (of, beside))
    tiles, right = (Tiles(each, shift, wanted) for each in (of, beside))
    product = lazy.dot_general(tiles.put(group_values(B, "columnwise", of)), right.put(values), ((1,), (1,)), ((0,), (0,)), lazy.float32)
    return tiles.sums(product)


def _factor(values: Tensor, of: Groups, name: str) -> Tensor:
    """One number per group of an fp32 ``[1]`` or ``[groups]``."""
    if values.size not in (1, of.count):
        check_shape(values, (of.count,), f"{name} of a grouped GEMM")
    return lazy.broadcast_to(lazy.reshape(values, (-1,)), (of.count,))


def _accumulated(result: Tensor, former: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    return result * alpha + lazy.where(beta == 0.0, 0.0, fp32(former) * beta)


def _write_rows(D: Any, call: CallArguments, of: Groups) -> None:
    """Products of rows with a matrix of their group, into the rows of ``D``, which may lie elsewhere."""
    listed = not is_grouped(D)
    into = of if listed else groups_of(D)
    result = _by_matrix(call.A, call.transa, call.B, of, into, D[0].shape[-1] if listed else D.logical_shape[1])
    places, columns = [*D] if listed else [D.rowwise_data], result.shape[1]
    rows = [place.size // max(columns, 1) for place in places]
    if sum(place.size for place in places) != sum(rows) * columns or (len(places) != of.count if listed else rows != [into.rows] and columns):
        got = [list(place.shape) for place in places] if listed else list(D.logical_shape)
        raise ShapeError(expected(f"{of.count} members of {columns} columns", of="D of a grouped GEMM", got=got, do="pass one for each of B"))
    result = result * into.spread(_factor(call.alpha, of, "alpha"))[:, None]
    beta, added = _factor(call.beta, of, "beta"), _bias_rows(call, of, into, columns)
    if not listed:
        former = lazy.reshape(D.rowwise_data, result.shape)
        new = _finished(result, former, into.spread(beta)[:, None], added)
        D.rowwise_data.assign_(lazy.reshape(lazy.where(into.inside[:, None], new, former), D.rowwise_data.shape))
        return
    for i, (place, count) in enumerate(zip(places, rows, strict=True)):
        if not place.size:
            continue
        row = lazy.iota((count,), 0, lazy.int32)
        own, former = lazy.gather(result, 0, of.starts[i] + row), lazy.reshape(place, (count, columns))
        new = _finished(own, former, beta[i], lazy.gather(added, 0, of.starts[i] + row) if added is not None else None)
        owned: Any = row < of.sizes[i]
        place.assign_(lazy.reshape(lazy.where(owned[:, None], new, former), place.shape))


def _bias_rows(call: CallArguments, of: Groups, into: Groups, columns: int) -> Tensor | None:
    """What each row takes of its group's bias, in fp32."""
    if call.bias is None:
        return None
    bias = call.bias.rowwise_data if is_grouped(call.bias) else call.bias
    rows = into.spread(fp32(lazy.reshape(bias, (of.count, columns))))
    return rows if call.bias_scale is None else rows * _row_factors(call.bias_scale, into)[:, None]


def _finished(result: Tensor, former: Tensor, beta: Tensor, added: Tensor | None) -> Tensor:
    """The product and what is accumulated, in the dtype of ``former``; a bias is added to what was rounded."""
    new = lazy.cast(_accumulated(result, former, lazy.ones(()), beta), former.dtype)
    return new if added is None else lazy.cast(fp32(new) + added, former.dtype)


def _row_factors(factors: Tensor, into: Groups) -> Tensor:
    """The factor of each row of ``into``: they are given for the members' rows, one after the other."""
    before = lazy.cumsum(into.sizes, 0) - into.sizes
    return lazy.gather(fp32(lazy.reshape(factors, (-1,))), 0, into.spread(before) + into.position)


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
