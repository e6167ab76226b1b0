"""The order of block scales: where each byte goes, and what becomes of the tensors that hold them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tex_backends import Runner, on_backends
from torch import Tensor

from fusible.conformance.cases.scale_order import used
from fusible.errors import ArgumentError, ShapeError
from fusible.quantized import Float8CurrentScalingQuantizer, MXFP8Quantizer, NVFP4Quantizer
from fusible.tex import DType
from fusible.tex.backends.torch_backend.swizzle import _swizzled_group, _swizzled_there
from fusible.tex.calls.grouped import layout_of_grouped
from fusible.tex.calls.scale_order import swizzle, unswizzle
from fusible.tex.formats import MXFP8, NVFP4

on_all = on_backends(
    "swizzle_scales_for_gemm_",
    "multi_tensor_swizzle_scales_for_gemm_",
    "multi_tensor_swizzle_scales_for_gemm_unchecked_",
    "grouped_swizzle_for_gemm",
    "swizzle_scales_and_pack_ptrs_for_discrete_weights",
)


def scale_shape(shape: tuple[int, ...], four_bits: bool, columnwise: bool) -> tuple[int, int]:
    return (NVFP4 if four_bits else MXFP8).scale_shape(shape, columnwise, False)


def scales(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def ordered(plain: Tensor) -> Tensor:
    """Byte by byte: scale ``(r, c)`` lies in the tile of its 128 rows and 4 blocks at 16 bytes per row within 32, 4 per group of 32 rows."""
    rows, blocks = plain.shape
    out = torch.zeros(rows * blocks, dtype=torch.uint8)
    for r in range(rows):
        for c in range(blocks):
            tile = (r // 128) * (blocks // 4) + c // 4
            out[512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4] = plain[r, c]
    return out


@pytest.mark.parametrize("shape", [(128, 4), (256, 12), (384, 4), (128, 8)])
def test_every_byte_goes_to_its_place_and_back(shape: tuple[int, int]) -> None:
    plain = scales(*shape)
    assert torch.equal(swizzle(plain).view(-1), ordered(plain)) and swizzle(plain).shape == plain.shape
    columns = plain.t().contiguous()
    assert torch.equal(swizzle(columns, columnwise=True).view(-1), ordered(plain)) and swizzle(columns, columnwise=True).shape == columns.shape
    assert torch.equal(unswizzle(swizzle(plain)), plain)
    assert torch.equal(unswizzle(swizzle(columns, columnwise=True), columnwise=True), columns)


def test_matrices_are_ordered_one_by_one_and_keep_their_dtype() -> None:
    plain = scales(2, 3, 256, 8)
    for columnwise, batch in ((False, plain), (True, plain.mT.contiguous())):
        each = torch.stack([swizzle(x, columnwise) for x in batch.flatten(0, 1)]).view(batch.shape)
        assert torch.equal(swizzle(batch, columnwise), each) and torch.equal(unswizzle(each, columnwise), batch)
    numbers = torch.randn(128, 4)
    assert torch.equal(unswizzle(swizzle(numbers)), numbers)
    assert swizzle(plain[:, :0]).shape == (2, 0, 256, 8)


@pytest.mark.parametrize("shape", [(127, 4), (128, 3), (512,), (4, 128)])
def test_scales_that_are_not_padded_are_refused(shape: tuple[int, ...]) -> None:
    for f in (swizzle, unswizzle):
        with pytest.raises(ShapeError, match="block scales"):
            f(scales(*shape))


def test_padded_shapes() -> None:
    assert [scale_shape((64, 160), False, column) for column in (False, True)] == [(128, 8), (4, 256)]
    assert [scale_shape((2, 48, 80), True, column) for column in (False, True)] == [(128, 8), (128, 8)]
    assert scale_shape((0, 32), False, False) == (0, 4)


class OfMXFP8(SimpleNamespace):
    """A class answers once what the format of its tensors is."""


class OfNVFP4(SimpleNamespace):
    pass


def mxfp8(rows: int, columns: int, **changes: Any) -> SimpleNamespace:
    fields = {
        "_rowwise_data": torch.zeros(rows, columns, dtype=torch.uint8),
        "_columnwise_data": torch.zeros(rows, columns, dtype=torch.uint8),
        "_rowwise_scale_inv": scales(*scale_shape((rows, columns), False, False)),
        "_columnwise_scale_inv": scales(*scale_shape((rows, columns), False, True)),
        "_fp8_dtype": 7,
        "_with_gemm_swizzled_scales": False,
    }
    return OfMXFP8(**{**fields, **changes})


def nvfp4(rows: int, columns: int) -> SimpleNamespace:
    return OfNVFP4(
        _rowwise_data=torch.zeros(rows, columns // 2, dtype=torch.uint8),
        _columnwise_data=torch.zeros(columns, rows // 2, dtype=torch.uint8),
        _rowwise_scale_inv=scales(*scale_shape((rows, columns), True, False)),
        _columnwise_scale_inv=scales(*scale_shape((rows, columns), True, True)),
        _fp4_dtype=10,
        _with_gemm_swizzled_scales=False,
    )


def expected(tensor: SimpleNamespace, usage: str, *, checked: bool = True) -> Tensor:
    four_bits, columnwise = hasattr(tensor, "_fp4_dtype"), usage == "columnwise"
    rows, columns = tensor._rowwise_data.shape
    plain = getattr(tensor, f"_{usage}_scale_inv")
    plain = used(plain, rows, 2 * columns if four_bits else columns, four_bits, columnwise) if checked else plain
    transposed = columnwise and not four_bits
    return ordered(plain.t() if transposed else plain).view(plain.shape)


@on_all
@pytest.mark.parametrize("make", [mxfp8, nvfp4])
@pytest.mark.parametrize("size", [(160, 320), (128, 128), (32, 64)])
def test_both_scales_are_replaced_once(runner: Runner, make: Any, size: tuple[int, int]) -> None:
    tensor = make(*size)
    former = tensor._rowwise_scale_inv
    row, column, kept = expected(tensor, "rowwise"), expected(tensor, "columnwise"), former.clone()
    for _ in range(2):
        assert runner("swizzle_scales_for_gemm_", tensor=tensor) is None
        assert torch.equal(tensor._rowwise_scale_inv, row) and torch.equal(tensor._columnwise_scale_inv, column)
        assert tensor._with_gemm_swizzled_scales is True
    assert torch.equal(former, kept)


@on_all
def test_only_what_is_there_and_asked_for_is_swizzled(runner: Runner) -> None:
    no_blocks = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, "cpu")(torch.ones(2, 4))
    tensors = [mxfp8(160, 320), mxfp8(32, 64, _rowwise_scale_inv=None), mxfp8(32, 64, _with_gemm_swizzled_scales=True), no_blocks]
    rows = [expected(tensors[0], "rowwise"), None, tensors[2]._rowwise_scale_inv.clone()]
    columns = [tensor._columnwise_scale_inv.clone() for tensor in tensors[:3]]
    runner("multi_tensor_swizzle_scales_for_gemm_", tensors=tensors, rowwise_usage=True, columnwise_usage=False)
    assert torch.equal(tensors[0]._rowwise_scale_inv, rows[0]) and torch.equal(tensors[2]._rowwise_scale_inv, rows[2])
    assert all(torch.equal(tensor._columnwise_scale_inv, column) for tensor, column in zip(tensors, columns, strict=False))
    assert [getattr(tensor, "_with_gemm_swizzled_scales", None) for tensor in tensors] == [True, False, True, None]


@on_all
def test_the_unchecked_form_takes_scales_of_any_whole_tiles_and_leaves_the_flag_to_its_caller(runner: Runner) -> None:
    tensor = mxfp8(64, 64, _rowwise_scale_inv=scales(256, 4), _columnwise_scale_inv=scales(2, 4, 128))
    row, column = expected(tensor, "rowwise", checked=False), swizzle(tensor._columnwise_scale_inv.view(8, 128), True).view(2, 4, 128)
    plain = tensor._columnwise_scale_inv.clone()
    runner("multi_tensor_swizzle_scales_for_gemm_unchecked_", tensors=[tensor], rowwise_usage=True, columnwise_usage=False)
    assert torch.equal(tensor._rowwise_scale_inv, row) and torch.equal(tensor._columnwise_scale_inv, plain)
    runner("multi_tensor_swizzle_scales_for_gemm_unchecked_", tensors=[tensor], rowwise_usage=False, columnwise_usage=True)
    assert torch.equal(tensor._rowwise_scale_inv, row) and torch.equal(tensor._columnwise_scale_inv, column)
    assert tensor._with_gemm_swizzled_scales is False


@on_all
def test_a_list_with_a_tensor_that_does_not_fit_is_refused_as_a_whole(runner: Runner) -> None:
    tensors = [mxfp8(32, 64), mxfp8(32, 64, _columnwise_scale_inv=scales(8, 128))]
    former = tensors[0]._rowwise_scale_inv
    with pytest.raises(ShapeError, match=r"the columnwise scales .*: expected \[4, 128\]"):
        runner("multi_tensor_swizzle_scales_for_gemm_", tensors=tensors, rowwise_usage=True, columnwise_usage=True)
    assert tensors[0]._rowwise_scale_inv is former and not tensors[0]._with_gemm_swizzled_scales


def grouped(
    shapes: list[tuple[int, int]], four_bits: bool, dims: str, known: bool, spare: int = 0
) -> tuple[SimpleNamespace, dict[str, list[Tensor]]]:
    """A grouped tensor of ``shapes``, and the plain scale matrices of its members, without what pads them."""
    matrices = {
        name: [scales(*scale_shape(shape, four_bits, column)) for shape in shapes]
        for name, column in (("scale_inv", False), ("columnwise_scale_inv", True))
    }
    rows, columns = zip(*shapes, strict=True)
    logical = (rows[0], sum(columns)) if dims == "last" else (sum(rows), columns[0])
    tensor = SimpleNamespace(
        num_tensors=len(shapes),
        logical_shape=logical,
        tensor_shapes=shapes if known else None,
        first_dims=torch.tensor(rows) if dims == "first" else None,
        last_dims=torch.tensor(columns) if dims == "last" else None,
        tensor_offsets=None,
        quantizer=NVFP4Quantizer() if four_bits else MXFP8Quantizer(DType.kFloat8E4M3),
        _with_gemm_swizzled_scales=False,
        **{name: torch.cat([*(x.view(-1) for x in each), scales(spare)]) for name, each in matrices.items()},
    )
    clear = {
        name: [used(x, *shape, four_bits, name != "scale_inv") for x, shape in zip(each, shapes, strict=True)] for name, each in matrices.items()
    }
    return tensor, clear


GROUPS = [([(160, 96), (32, 96), (0, 96), (256, 96)], "first"), ([(64, 32), (64, 320)], "last"), ([(96, 64)] * 3, "none")]


@on_all
@pytest.mark.parametrize(("shapes", "dims"), GROUPS)
@pytest.mark.parametrize("four_bits", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("usages", [(True, False), (False, True), (True, True)])
def test_members_of_a_group_are_swizzled_one_by_one(
    runner: Runner, shapes: list[tuple[int, int]], dims: str, four_bits: bool, known: bool, usages: tuple[bool, bool]
) -> None:
    tensor, matrices = grouped(shapes, four_bits, dims, known)
    assert list(layout_of_grouped(tensor).shapes) == shapes
    former = {name: getattr(tensor, name) for name in matrices}
    assert runner("grouped_swizzle_for_gemm", tensor=tensor, rowwise=usages[0], columnwise=usages[1]) is None
    for wanted, (name, each) in zip(usages, matrices.items(), strict=True):
        columns = name == "columnwise_scale_inv" and not four_bits
        done = torch.cat([ordered(x.t() if columns else x) for x in each])
        assert torch.equal(getattr(tensor, name), done if wanted else former[name])
        assert (getattr(tensor, name) is former[name]) is not wanted
    assert tensor._with_gemm_swizzled_scales is True


@on_all
@pytest.mark.parametrize("spare", [512, 7])
def test_what_a_group_has_allocated_beyond_its_members_may_be_anything(runner: Runner, spare: int) -> None:
    tensor, matrices = grouped([(160, 96), (32, 96)], False, "first", False, spare)
    runner("grouped_swizzle_for_gemm", tensor=tensor, rowwise=True, columnwise=True)
    for name, each in matrices.items():
        done = torch.cat([ordered(x.t() if name.startswith("column") else x) for x in each])
        assert torch.equal(getattr(tensor, name)[: done.numel()], done)


@on_all
def test_a_group_of_other_scales_or_already_swizzled_is_left_alone_and_a_short_one_refused(runner: Runner) -> None:
    tensor, _ = grouped([(32, 64)] * 2, False, "none", True)
    tensor.scale_inv, tensor.columnwise_scale_inv = torch.ones(2), None
    runner("grouped_swizzle_for_gemm", tensor=tensor, rowwise=True, columnwise=True)
    assert torch.equal(tensor.scale_inv, torch.ones(2)) and tensor._with_gemm_swizzled_scales is False
    tensor, _ = grouped([(32, 64)] * 2, False, "none", True)
    tensor._with_gemm_swizzled_scales, former = True, tensor.scale_inv
    runner("grouped_swizzle_for_gemm", tensor=tensor, rowwise=True, columnwise=True)
    assert tensor.scale_inv is former
    tensor._with_gemm_swizzled_scales, tensor.columnwise_scale_inv = False, tensor.columnwise_scale_inv[:512]
    with pytest.raises(ShapeError, match="1024 scales"):
        runner("grouped_swizzle_for_gemm", tensor=tensor, rowwise=True, columnwise=True)
    assert tensor.scale_inv is former and not tensor._with_gemm_swizzled_scales


@on_all
@pytest.mark.parametrize("kind", ["mxfp8_rowwise", "mxfp8_columnwise", "nvfp4"])
def test_discrete_weights_get_pointers(runner: Runner, kind: str) -> None:
    shape, four_bits = (8, 128) if kind == "mxfp8_columnwise" else (128, 8), kind == "nvfp4"
    byte, sizes = torch.uint8, {"mxfp8_rowwise": (100, 160), "mxfp8_columnwise": (160, 96), "nvfp4": (100, 40)}
    data, plain = [torch.zeros(sizes[kind], dtype=byte) for _ in range(2)], [scales(*shape), scales(*shape) ^ 1]
    blank = [used(x, 160 if kind == "mxfp8_columnwise" else 100, sizes[kind][1] * (2 if four_bits else 1), four_bits, shape[0] == 8) for x in plain]
    kept = [x.clone() for x in plain]
    function = "swizzle_scales_and_pack_ptrs_for_discrete_weights"
    pointers, places, buffer = runner(function, data_tensors=data, scale_tensors=plain, swizzle_type=kind, device=torch.device("cpu"))
    assert pointers.dtype is places.dtype is torch.int64 and pointers.tolist() == [x.data_ptr() for x in data]
    assert places.tolist() == [buffer.data_ptr(), buffer.data_ptr() + 1024]
    assert torch.equal(buffer, torch.cat([ordered(x.t() if kind == "mxfp8_columnwise" else x) for x in blank]))
    assert all(torch.equal(x, y) for x, y in zip(plain, kept, strict=True))
    with pytest.raises(ArgumentError, match="'mxfp8_rowwise' or"):
        runner(function, data_tensors=data, scale_tensors=plain, swizzle_type="mxfp8", device="cpu")
    with pytest.raises(ArgumentError, match="lists of equal length"):
        runner(function, data_tensors=data[:1], scale_tensors=plain, swizzle_type=kind, device="cpu")


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize("form", [MXFP8, NVFP4])
@pytest.mark.parametrize("rows", [[160, 32, 0, 256], [0, 0, 32], [128], [32, 96]])
def test_on_a_device_members_are_ordered_as_where_their_rows_are_read(rows: list[int], form: Any, beyond: int) -> None:
    """There is no device here: what runs there is called on the CPU, against what runs on the CPU."""
    columns = 96
    (_, width), (_, width_used) = (f((sum(rows), columns), False, False) for f in (form.scale_shape, form.used_scales))
    height = sum(form.scale_shape((n, columns), False, False)[0] for n in rows) + 128 * beyond
    plain, quantizer = scales(height, width), MXFP8Quantizer(DType.kFloat8E4M3) if form is MXFP8 else NVFP4Quantizer()
    group = SimpleNamespace(
        quantizer=quantizer, num_tensors=len(rows), logical_shape=(sum(rows), columns), first_dims=torch.tensor(rows), last_dims=None, shapes=None,
        tensor_shapes=None, fake_dtype=torch.bfloat16, tensor_offsets=None, rowwise_data=None, columnwise_data=None,
    )  # fmt: skip
    assert torch.equal(_swizzled_there(plain, width_used, group.first_dims), _swizzled_group(group, plain, False))
