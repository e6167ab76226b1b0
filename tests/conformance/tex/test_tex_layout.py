"""Movements, paddings, transposes of packed codes, allocations and offsets: exact, on any dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tex_backends import Runner, on_backends
from torch import Tensor

from fusible.errors import ArgumentError, DTypeError, ShapeError

pytestmark = on_backends(
    "fused_multi_row_padding",
    "bulk_allocate",
    "splits_to_offsets_multi",
    "multi_tensor_transpose_to_bhsd",
    "nvfp4_data_transpose",
    "swap_first_dims",
)

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.int64]
CPU = torch.device("cpu")


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
    data = torch.randint(1, 100, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))
    return data.view(dtype) if dtype.itemsize == 1 else data.to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_segments_are_padded_and_back(runner: Runner, dtype: torch.dtype) -> None:
    rows, padded = [3, 0, 4, 1], [8, 2, 4, 2]
    x = numbers((8, 5), dtype)
    out = numbers((16, 5), dtype)
    former = out.clone()
    assert runner("fused_multi_row_padding", input=x, output=out, input_row_list=rows, padded_input_row_list=padded) is None
    zeros = torch.zeros(5, 5).to(dtype)
    assert same(out, torch.cat([x[:3], zeros, former[8:10], x[3:7], x[7:8], zeros[:1]]))  # the segment without rows is skipped
    back = torch.empty_like(x)
    assert runner("fused_multi_row_unpadding", input=out, output=back, input_row_list=padded, unpadded_input_row_list=rows) is None
    assert same(back, x)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"input_row_list": [3, 4]}, ShapeError, r"input, a matrix of the segments \[3, 4\], of .*: expected \[7, n\]"),
        ({"padded_input_row_list": [4, 5]}, ShapeError, r"\[9, n\]"),
        ({"padded_input_row_list": [2, 6]}, ShapeError, "padding does not shorten"),
        ({"input_row_list": [-1, 6]}, ShapeError, "padding does not shorten"),
        ({"padded_input_row_list": [8]}, ArgumentError, "lists of equal length"),
        ({"output": torch.ones(8, 4)}, ShapeError, "equal widths"),
        ({"output": torch.ones(8, 5).half()}, DTypeError, "output .*: expected .*float32"),
    ],
)
def test_segments_that_do_not_add_up_are_refused(runner: Runner, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    call = {"input": torch.zeros(5, 5), "output": torch.ones(8, 5), "input_row_list": [3, 2], "padded_input_row_list": [4, 4], **changes}
    with pytest.raises(error, match=message):
        runner("fused_multi_row_padding", **call)
    assert (call["output"] == 1).all()
    names = {"input": "output", "output": "input", "input_row_list": "unpadded_input_row_list", "padded_input_row_list": "input_row_list"}
    with pytest.raises(error):
        runner("fused_multi_row_unpadding", **{names[name]: value for name, value in call.items()})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4), (2, 5, 3), (4, 1, 2, 3), (0, 3)])
def test_swapped_dimensions(runner: Runner, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = numbers(shape, dtype)
    y = runner("swap_first_dims", tensor=x, out=None)
    assert y.is_contiguous() and same(y, x.transpose(0, 1))
    out = torch.empty_like(y)
    assert runner("swap_first_dims", tensor=x, out=out) is out and same(out, y)
    with pytest.raises(ShapeError, match="out.*: expected"):
        runner("swap_first_dims", tensor=x, out=out[:, :, None])
    with pytest.raises(DTypeError, match="out.*: expected"):
        runner("swap_first_dims", tensor=x, out=out.to(torch.int32))
    with pytest.raises(ShapeError, match="two dimensions"):
        runner("swap_first_dims", tensor=x.reshape(-1), out=None)


def unpacked(data: Tensor) -> list[list[int]]:
    """Code by code: the low nibble is the even column's."""
    return [[int(data[i, j // 2]) >> 4 * (j % 2) & 15 for j in range(2 * data.shape[1])] for i in range(data.shape[0])]


@pytest.mark.parametrize("shape", [(4, 3), (2, 1), (16, 8), (0, 4)])
def test_packed_codes_are_transposed_one_by_one(runner: Runner, shape: tuple[int, int]) -> None:
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    result = runner("nvfp4_data_transpose", input=data, out=None)
    assert result.dtype is torch.uint8 and result.shape == (2 * shape[1], shape[0] // 2) and result.is_contiguous()
    assert unpacked(result) == [list(column) for column in zip(*unpacked(data), strict=True)] or not data.numel()
    out = torch.zeros_like(result)
    assert runner("nvfp4_data_transpose", input=data, out=out) is out and torch.equal(out, result)
    if data.numel():
        deeper = data.view(2, -1, shape[1])
        assert torch.equal(runner("nvfp4_data_transpose", input=deeper, out=None), result)
        assert torch.equal(runner("nvfp4_data_transpose", input=result, out=None), data)
        with pytest.raises(ShapeError, match="an even number of rows"):
            runner("nvfp4_data_transpose", input=data[:1], out=None)
        with pytest.raises(ShapeError, match="out of.*: expected"):
            runner("nvfp4_data_transpose", input=data, out=out.t())
    with pytest.raises(DTypeError, match="uint8"):
        runner("nvfp4_data_transpose", input=data.int(), out=None)


@pytest.mark.parametrize(("down", "across"), [(2, 3), (1, 1), (9, 2)])
def test_scales_of_tiles_are_transposed(runner: Runner, down: int, across: int) -> None:
    tiles = numbers((down, across))
    row = torch.full((-(-down // 8) * 128, -(-across // 4) * 4), 200, dtype=torch.uint8)
    row[: 16 * down, :across] = tiles.repeat_interleave(16, 0)
    column = torch.full((-(-across // 8) * 128, -(-down // 4) * 4), 201, dtype=torch.uint8)
    assert runner("nvfp4_2d_scale_transpose", input=row, output=column, M_tiles=down, K_tiles=across) is None
    assert torch.equal(column[: 16 * across, :down], tiles.t().repeat_interleave(16, 0))
    assert not column[16 * across :].any() and not column[:, down:].any()
    for changes in ({"M_tiles": column.shape[1] + 1}, {"K_tiles": row.shape[1] + 1}, {"output": column[: 16 * across - 16]}):
        with pytest.raises(ShapeError, match="at least"):
            runner("nvfp4_2d_scale_transpose", **{"input": row, "output": column, "M_tiles": down, "K_tiles": across, **changes})


def test_weights_are_transposed_together_as_one_by_one(runner: Runner) -> None:
    sizes = [(32, 48), (18, 16), (16, 34)]
    data = [numbers((m, k // 2)) for m, k in sizes]
    scales = [numbers((128, 4)) for _ in sizes]
    outs = [torch.zeros(k, m // 2, dtype=torch.uint8) for m, k in sizes], [torch.zeros(128, 4, dtype=torch.uint8) for _ in sizes]
    lists = {"rowwise_data_list": data, "columnwise_data_list": outs[0], "rowwise_scale_inv_list": scales, "columnwise_scale_inv_list": outs[1]}
    ms, ks = ([size[i] for size in sizes] for i in range(2))
    with pytest.raises(ShapeError, match=r"rowwise_data_list .*: expected \[16, 32 / 2\]"):
        runner("nvfp4_2d_multi_tensor_transpose", **lists, M_list=ms, K_list=[*ks[:2], 32])
    assert not any(x.any() for out in outs for x in out)
    assert runner("nvfp4_2d_multi_tensor_transpose", **lists, M_list=ms, K_list=ks) is None
    for (m, k), x, scale, y, transposed in zip(sizes, data, scales, *outs, strict=True):
        assert torch.equal(y, runner("nvfp4_data_transpose", input=x, out=None))
        expected = torch.zeros_like(transposed)
        runner("nvfp4_2d_scale_transpose", input=scale, output=expected, M_tiles=-(-m // 16), K_tiles=-(-k // 16))
        assert torch.equal(transposed, expected) and expected.any()


SHAPES = st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES), st.sampled_from([8, 16, 64, 256, 1024])), max_size=5)


@given(wanted=SHAPES, aligned=st.booleans())
def test_allocated_together(runner: Runner, wanted: list[tuple[list[int], torch.dtype, int]], aligned: bool) -> None:
    shapes, dtypes, alignments = ([entry[i] for entry in wanted] for i in range(3))
    tensors = runner("bulk_allocate", shapes=shapes, dtypes=dtypes, device=CPU, **({"alignments": alignments} if aligned else {}))
    assert [(list(x.shape), x.dtype) for x in tensors] == list(zip(shapes, dtypes, strict=True))
    assert len({x.untyped_storage().data_ptr() for x in tensors}) <= 1
    for x, alignment in zip(tensors, alignments if aligned else [16] * len(wanted), strict=True):
        assert x.is_contiguous() and not (x.numel() and x.data_ptr() % alignment)
    versions = [x._version for x in tensors]
    for i, x in enumerate(tensors):
        x.copy_(torch.full(x.shape, i + 1).to(x.dtype))
    for i, (x, version) in enumerate(zip(tensors, versions, strict=True)):
        assert (x.float() == i + 1).all() and x._version == version + 1  # a write to one is none to another


def test_allocation_is_refused_where_it_has_no_answer(runner: Runner) -> None:
    for alignments, message in (([24], "a power of two"), ([2], "from 4 to"), ([8, 8], "lists of equal length")):
        with pytest.raises(ArgumentError, match=message):
            runner("bulk_allocate", shapes=[[3]], dtypes=[torch.float32], device=CPU, alignments=alignments)
    (x,) = runner("bulk_allocate", shapes=[[3]], dtypes=[torch.float32])
    assert x.device == torch.get_default_device()


def test_addresses(runner: Runner) -> None:
    x = torch.zeros(4)
    pointers = runner("copy_data_ptrs_to_device", tensors=[x, x[1:]], device=CPU)
    assert pointers.dtype is torch.int64 and pointers.tolist() == [x.data_ptr(), x.data_ptr() + 4]
    assert runner("copy_data_ptrs_to_device", tensors=[], device=CPU).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_offsets(runner: Runner, dtype: torch.dtype) -> None:
    offsets = runner("splits_to_offsets", first_dims=torch.tensor([3, 0, 2**20], dtype=dtype), logical_last_dim=2**12)
    assert offsets.dtype is torch.int64 and offsets.tolist() == [0, 3 * 2**12, 3 * 2**12, (3 + 2**20) * 2**12]
    assert runner("splits_to_offsets", first_dims=torch.zeros(0, dtype=dtype), logical_last_dim=7).tolist() == [0]
    with pytest.raises(ShapeError, match="one dimension"):
        runner("splits_to_offsets", first_dims=torch.ones(1, 2, dtype=dtype), logical_last_dim=7)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_offsets_of_several_strides(runner: Runner, together: bool, dtype: torch.dtype) -> None:
    splits = torch.tensor([3, 0, 5], dtype=dtype)
    options = {"strides": [1, 1, 2**31], "include_leading_zero": [False, True, True], "dtypes": [torch.int32, torch.int64, torch.int64]}
    sizes, offsets = runner("splits_to_offsets_multi", split_sizes=splits, device=CPU, **options, bulk_allocate=together)
    assert sizes.dtype is torch.int64 and sizes.tolist() == [3, 0, 5]
    assert [x.dtype for x in offsets] == options["dtypes"]
    assert [x.tolist() for x in offsets] == [[3, 3, 8], [0, 3, 3, 8], [0, 3 * 2**31, 3 * 2**31, 8 * 2**31]]
    assert (len({x.untyped_storage().data_ptr() for x in offsets}) == 1) is together
    with pytest.raises(ArgumentError, match="lists of equal length"):
        runner("splits_to_offsets_multi", split_sizes=splits, device=CPU, **{**options, "strides": [1]})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_heads_first(runner: Runner, dtype: torch.dtype, layout: str) -> None:
    b, h, s, d = 2, 3, 5, 4
    sizes = {"b": b, "h": h, "s": s, "d": d}
    x = numbers(tuple(sizes[name] for name in layout), dtype)
    expected = x.permute([layout.index(name) for name in "bhsd"])
    y, nothing = runner("multi_tensor_transpose_to_bhsd", inputs=[x, None], original_format=layout)
    assert nothing is None and y.is_contiguous() and same(y, expected)
    outs = [numbers((b, h, s, width), dtype) for width in (d, 2 * d)]
    results = runner("multi_tensor_transpose_to_bhsd", inputs=[x, None, x], original_format=layout, outputs=[outs[0], None, outs[1]])
    assert results[0] is outs[0] and results[1] is None and results[2] is outs[1]
    assert same(outs[0], expected) and same(outs[1][..., :d], expected) and not outs[1][..., d:].float().any()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"original_format": "thd"}, ArgumentError, "'sbhd' or 'bshd'"),
        ({"inputs": [torch.zeros(3, 4)]}, ShapeError, "4 dimensions"),
        ({"outputs": [torch.ones(5, 3, 2, 4)]}, ShapeError, r"\[2, 3, 5, 4\] or wider"),
        ({"outputs": [torch.ones(2, 3, 5, 3)]}, ShapeError, "or wider"),
        ({"outputs": [torch.ones(2, 3, 5, 4).half()]}, DTypeError, "outputs .*: expected torch.float32"),
        ({"outputs": [None, None]}, ArgumentError, "lists of equal length"),
    ],
)
def test_heads_first_refuses(runner: Runner, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        runner("multi_tensor_transpose_to_bhsd", **{"inputs": [torch.zeros(5, 2, 3, 4)], "original_format": "sbhd", **changes})


@pytest.mark.parametrize("dtype", DTYPES)
def test_last_dimension_padded(runner: Runner, dtype: torch.dtype) -> None:
    inputs = [numbers((3, 5), dtype), numbers((2, 2, 8), dtype), numbers((4, 1), dtype)]
    outputs = runner("multi_tensor_pad_last_dim", inputs=inputs, alignment=4)
    assert [tuple(y.shape) for y in outputs] == [(3, 8), (2, 2, 8), (4, 4)] and outputs[1] is inputs[1]
    for x, y in zip(inputs, outputs, strict=True):
        assert same(y[..., : x.shape[-1]], x) and not y[..., x.shape[-1] :].float().any()
    with pytest.raises(ArgumentError, match="alignment .*: expected .*at least 1"):
        runner("multi_tensor_pad_last_dim", inputs=inputs, alignment=0)
