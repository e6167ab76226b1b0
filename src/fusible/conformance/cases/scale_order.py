"""Records of the order of block scales, and of the transposes of packed codes and of their scales: exact bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.cases.block_tensors import in_tiles
from fusible.conformance.table import Arguments, Output, Sample, record
from fusible.quantized import Float8TensorStorage, GroupedTensorStorage, MXFP8Quantizer, MXFP8TensorStorage, NVFP4Quantizer, NVFP4TensorStorage
from fusible.tex import DType

__all__ = []

BlockTensor = MXFP8TensorStorage | NVFP4TensorStorage
_FLAG = "_with_gemm_swizzled_scales"


def numbers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def padded(rows: int, columns: int, four_bits: bool, columnwise: bool) -> tuple[int, int]:
    """The shape of a matrix's scales, padded to multiples of 128 lines and 4 blocks. Column-wise scales of MXFP8 are not transposed."""
    lines, along = (columns, rows) if columnwise else (rows, columns)
    blocks = -(-along // (16 if four_bits else 32))
    lines, blocks = -(-lines // 128) * 128, -(-blocks // 4) * 4
    return (blocks, lines) if columnwise and not four_bits else (lines, blocks)


def used(plain: Tensor, rows: int, columns: int, four_bits: bool, columnwise: bool) -> Tensor:
    """The scales of a matrix ``[rows, columns]``, with zeros as padding."""
    length = 16 if four_bits else 32
    if four_bits and columnwise:
        rows, columns = columns, rows
    lines, blocks = (-(-rows // length), columns) if columnwise and not four_bits else (rows, -(-columns // length))
    kept = torch.zeros_like(plain)
    kept[:lines, :blocks] = plain[:lines, :blocks]
    return kept


def tensor_of(generator: torch.Generator, rows: int, columns: int, four_bits: bool) -> BlockTensor:
    row, column = (numbers(generator, *padded(rows, columns, four_bits, columnwise)) for columnwise in (False, True))
    if not four_bits:
        data = [numbers(generator, rows, columns) for _ in range(2)]
        return MXFP8TensorStorage(data[0], row, data[1], column, DType.kFloat8E4M3, MXFP8Quantizer(DType.kFloat8E4M3), False)
    data, turned = numbers(generator, rows, columns // 2), numbers(generator, columns, rows // 2)
    return NVFP4TensorStorage(data, row, turned, column, torch.ones(1), torch.ones(1), DType.kFloat4E2M1, NVFP4Quantizer(), False)


def scales_of(at: str, tensor: BlockTensor, rowwise: bool = True, columnwise: bool = True, *, checked: bool = True) -> tuple[Output, ...]:
    """Both scale matrices of ``tensor`` at ``at``. Those asked for are reordered, and where they are ``checked``, their padding becomes zeros."""
    outputs = []
    for usage, asked in (("rowwise", rowwise), ("columnwise", columnwise)):
        plain = getattr(tensor, f"_{usage}_scale_inv")
        four_bits = isinstance(tensor, NVFP4TensorStorage)
        transposed = usage == "columnwise" and not four_bits
        if asked and checked and plain is not None:
            data = tensor._columnwise_data.flatten(1) if four_bits else tensor._columnwise_data.flatten(0, -2)
            rows, columns = (2 * data.shape[1], data.shape[0]) if four_bits else data.shape
            plain = used(plain, rows, columns, four_bits, usage == "columnwise")
        wanted = None if plain is None else in_tiles(plain, transposed) if asked else plain.clone()
        outputs.append(Output(f"{at}._{usage}_scale_inv", wanted))
    return tuple(outputs)


_MATRICES = ((544, 320), (128, 128), (32, 64), (0, 64))


@record("swizzle_scales_for_gemm_", dtypes=(torch.uint8,))
def swizzle(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for rows, columns in _MATRICES:
        for four_bits in (False, True):
            tensor = tensor_of(generator, rows, columns, four_bits)
            outputs = (*scales_of("tensor", tensor), Output(f"tensor.{_FLAG}", True))
            yield Sample(f"{[rows, columns]} {four_bits}", {"tensor": tensor}, (*outputs, *kept(tensor)))
            if rows == 128:
                deep = tensor_of(generator, rows, columns, four_bits)
                deep._rowwise_data = deep._rowwise_data.view(2, 64, -1)
                deep._columnwise_data = deep._columnwise_data.view(*((128, 2, 32) if four_bits else (2, 64, 128)))
                yield Sample(f"of three dimensions {four_bits}", {"tensor": deep}, (*scales_of("tensor", deep), Output(f"tensor.{_FLAG}", True)))
            done = tensor_of(generator, rows, columns, four_bits)
            done._with_gemm_swizzled_scales = True
            yield Sample(f"{[rows, columns]} {four_bits} done", {"tensor": done}, scales_of("tensor", done, False, False))


def kept(tensor: BlockTensor) -> tuple[Output, ...]:
    """The former scales are unchanged, as other tensors may share them."""
    former = [(x, x.clone()) for x in (tensor._rowwise_scale_inv, tensor._columnwise_scale_inv)]
    return tuple(Output(lambda result, arguments, x=x: x, copy) for x, copy in former)


def some(generator: torch.Generator) -> list[Any]:
    """Tensors of both formats: some without row-wise scales, already reordered, without block scales, or without elements."""
    tensors = [tensor_of(generator, *shape, four_bits) for shape, four_bits in zip(_MATRICES[:3], (False, True, False), strict=True)]
    tensors += [tensor_of(generator, 32, 64, False) for _ in range(2)]
    tensors[3]._rowwise_data = tensors[3]._rowwise_scale_inv = None
    tensors[4]._with_gemm_swizzled_scales = True
    plain = {"data": numbers(generator, 4, 4), "fp8_scale_inv": torch.ones(1), "fp8_dtype": DType.kFloat8E4M3}
    return [*tensors, Float8TensorStorage(**plain, fake_dtype=torch.float32), tensor_of(generator, 0, 64, False)]


_USAGES = ((True, True), (True, False), (False, True))


@record("multi_tensor_swizzle_scales_for_gemm_", dtypes=(torch.uint8,))
def swizzle_many(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for usages in _USAGES:
        tensors = some(generator)
        outputs = [Output("tensors.5._data", tensors[5]._data.clone()), Output("tensors.5._scale_inv", torch.ones(1))]
        for i, tensor in ((i, tensor) for i, tensor in enumerate(tensors) if i != 5):
            outputs += scales_of(f"tensors.{i}", tensor, *(usages if i != 4 else (False, False)))
            swizzled = i == 4 or usages[1] or tensor._rowwise_scale_inv is not None
            outputs.append(Output(f"tensors.{i}.{_FLAG}", swizzled))
        yield Sample(str(usages), {"tensors": tensors, "rowwise_usage": usages[0], "columnwise_usage": usages[1]}, tuple(outputs))


@record("multi_tensor_swizzle_scales_for_gemm_unchecked_", dtypes=(torch.uint8,))
def swizzle_unchecked(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for usages in _USAGES:
        tensors = some(generator)[:5]
        outputs = []
        for i, tensor in enumerate(tensors):
            outputs += [*scales_of(f"tensors.{i}", tensor, *usages, checked=False), Output(f"tensors.{i}.{_FLAG}", i == 4)]
        # Scales of any whole tiles, those of the columns in two matrices.
        other = tensor_of(generator, 64, 64, False)
        other._rowwise_scale_inv, columns = numbers(generator, 256, 4), numbers(generator, 8, 128)
        other._columnwise_scale_inv = columns.view(2, 4, 128)
        outputs.append(Output("tensors.5._rowwise_scale_inv", in_tiles(other._rowwise_scale_inv) if usages[0] else other._rowwise_scale_inv.clone()))
        outputs.append(Output("tensors.5._columnwise_scale_inv", (in_tiles(columns, True) if usages[1] else columns.clone()).view(2, 4, 128)))
        arguments = {"tensors": [*tensors, other], "rowwise_usage": usages[0], "columnwise_usage": usages[1]}
        yield Sample(str(usages), arguments, (*outputs, Output(f"tensors.5.{_FLAG}", False)))


_GROUPS = (([(160, 96), (32, 96), (0, 96), (256, 96)], "first"), ([(64, 32), (64, 320)], "last"), ([(96, 64)] * 3, "none"))


@record("grouped_swizzle_for_gemm", dtypes=(torch.uint8,))
def swizzle_group(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for (shapes, dims), four_bits in ((group, four_bits) for group in _GROUPS for four_bits in (False, True)):
        rows, columns = zip(*shapes, strict=True)
        logical = (rows[0], sum(columns)) if dims == "last" else (sum(rows), columns[0])
        for known, usages in ((known, usages) for known in (False, True) for usages in _USAGES):
            plain, wanted = {}, {}
            for name, columnwise, asked in (("scale_inv", False, usages[0]), ("columnwise_scale_inv", True, usages[1])):
                each = [numbers(generator, *padded(*shape, four_bits, columnwise)) for shape in shapes]
                clear = [used(x, *shape, four_bits, columnwise) for x, shape in zip(each, shapes, strict=True)]
                done = [in_tiles(x, columnwise and not four_bits) for x in clear] if asked else each
                plain[name], wanted[name] = (torch.cat([x.reshape(-1) for x in matrices]) for matrices in (each, done))
            size = sum(m * n for m, n in shapes) // (2 if four_bits else 1)
            data = {name: numbers(generator, size) for name in ("data", "columnwise_data")}
            varying = {"first_dims": torch.tensor(rows) if dims == "first" else None, "last_dims": torch.tensor(columns) if dims == "last" else None}
            quantizer = NVFP4Quantizer() if four_bits else MXFP8Quantizer(DType.kFloat8E4M3)
            options: dict[str, Any] = {"num_tensors": len(shapes), "shapes": shapes if known else None, "quantizer": quantizer}
            tensor = GroupedTensorStorage(logical, torch.bfloat16, **{**options, **data, **plain, **varying})
            outputs = [Output(f"tensor.{name}", x) for name, x in wanted.items()]
            arguments = {"tensor": tensor, "rowwise": usages[0], "columnwise": usages[1]}
            yield Sample(f"{shapes} {four_bits} {known} {usages}", arguments, (*outputs, Output(f"tensor.{_FLAG}", True)))


@record("swizzle_scales_and_pack_ptrs_for_discrete_weights", dtypes=(torch.uint8,))
def swizzle_discrete(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for kind, columns, four_bits in (("mxfp8_rowwise", False, False), ("mxfp8_columnwise", True, False), ("nvfp4", False, True)):
        shapes = [(160, 96), (224, 256), (256, 128), (256, 128)] if columns else [(n, 80 if four_bits else 160) for n in (128, 255, 16, 40)]
        scales = [numbers(generator, *padded(*shape, four_bits, columns)) for shape in shapes]
        data = [numbers(generator, m, n // 2 if four_bits else n) for m, n in shapes]
        starts = torch.tensor([0, 1024, 3072, 4096])

        def places(result: Any, arguments: Arguments, starts: Tensor = starts) -> Tensor:
            return result[1][0].cpu() + starts

        def addresses(result: Any, arguments: Arguments) -> Tensor:
            """The addresses of the data if the backend got these tensors; on another device any addresses but 0."""
            pointers = torch.tensor([x.data_ptr() for x in arguments["data_tensors"]])
            return pointers if result[1][0] == result[2].data_ptr() or not result[0].all() else result[0].cpu().to(torch.int64)

        clear = [used(x, *shape, four_bits, columns) for x, shape in zip(scales, shapes, strict=True)]
        buffer = torch.cat([in_tiles(x, columns).reshape(-1) for x in clear])
        outputs = (Output(0, addresses), Output("result.0.shape", torch.Size([4])), Output(1, places), Output(2, buffer))
        arguments = {"data_tensors": data, "scale_tensors": scales, "swizzle_type": kind, "device": torch.device("cpu")}
        yield Sample(kind, arguments, outputs)
    yield with_nothing(generator)


def with_nothing(generator: torch.Generator) -> Sample:
    """An expert without rows, which has no scales and may have any address, and one whose data has three dimensions."""
    shapes = [(128, 160), (0, 160), (40, 160)]
    scales = [numbers(generator, *padded(*shape, False, False)) for shape in shapes]
    buffer = torch.cat([in_tiles(used(x, *shape, False, False)).reshape(-1) for x, shape in zip(scales, shapes, strict=True)])

    def places(result: Any, arguments: Arguments) -> Tensor:
        """The returned addresses if the scales of the two other experts are contiguous."""
        found = result[1].cpu()
        return found if found[2] - found[0] == scales[0].numel() else torch.zeros(3)

    outputs = (Output("result.0.shape", torch.Size([3])), Output(1, places), Output(2, buffer))
    data = [numbers(generator, *shape) for shape in shapes]
    data[2] = data[2].view(5, 8, 160)
    arguments = {"data_tensors": data, "scale_tensors": scales, "swizzle_type": "mxfp8_rowwise", "device": torch.device("cpu")}
    return Sample("an expert without rows, and one of three dimensions", arguments, outputs)


def turned(data: Tensor) -> Tensor:
    """The codes of a matrix transposed; the low nibble is the even column's."""
    codes = torch.stack([data & 15, data >> 4], -1).flatten(1).t()
    return (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous()


@record("nvfp4_data_transpose", dtypes=(torch.uint8,))
def data_transpose(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for shape in ((4, 3), (2, 1), (16, 8), (0, 4), (2, 3, 5), (34, 33), (96, 50)):
        data = numbers(generator, *shape)
        wanted = turned(data.view(-1, shape[-1]))
        yield Sample(str(list(shape)), {"input": data, "out": None}, (Output(None, wanted),))
        yield Sample(f"{list(shape)} given", {"input": data, "out": torch.zeros_like(wanted)}, (Output("out", wanted), Output(None, wanted)))


def scale_matrices(generator: torch.Generator, down: int, across: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scales of tiles, one byte per row of a tile, with padding of 200; a buffer for their transpose; and the transpose, padded with zeros."""
    tiles = numbers(generator, down, across)
    row, column = (torch.full((-(-m // 8) * 128, -(-k // 4) * 4), 200, dtype=torch.uint8) for m, k in ((down, across), (across, down)))
    row[: 16 * down, :across] = tiles.repeat_interleave(16, 0)
    wanted = torch.zeros_like(column)
    wanted[: 16 * across, :down] = tiles.t().repeat_interleave(16, 0)
    return row, column, wanted


@record("nvfp4_2d_scale_transpose", dtypes=(torch.uint8,))
def scale_transpose(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for down, across in ((2, 3), (1, 1), (9, 2), (9, 40), (0, 3)):
        row, column, wanted = scale_matrices(generator, down, across)
        yield Sample(f"{[down, across]}", {"input": row, "output": column, "M_tiles": down, "K_tiles": across}, (Output("output", wanted),))


@record("nvfp4_2d_multi_tensor_transpose", dtypes=(torch.uint8,))
def transpose_many(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for several in ([(32, 48), (18, 16), (16, 34)], [(64, 32)], [(96, 128)], [(0, 48), (16, 0)]):
        names = ("rowwise_data_list", "columnwise_data_list", "rowwise_scale_inv_list", "columnwise_scale_inv_list")
        lists: dict[str, list[Tensor]] = {name: [] for name in names}
        outputs = []
        for i, (m, k) in enumerate(several):
            data = numbers(generator, m, k // 2)
            row, column, wanted = scale_matrices(generator, -(-m // 16), -(-k // 16))
            for name, x in zip(names, (data, numbers(generator, k, m // 2), row, column), strict=True):
                lists[name].append(x)
            outputs += [Output(f"columnwise_data_list.{i}", turned(data)), Output(f"columnwise_scale_inv_list.{i}", wanted)]
        yield Sample(str(several), {**lists, "M_list": [m for m, _ in several], "K_list": [k for _, k in several]}, tuple(outputs))
