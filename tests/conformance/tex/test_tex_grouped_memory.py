"""What functions on grouped tensors hold at once: at most three times their arguments and results, counted in fp32. And that no function of the
reference backend is left out of such tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_tex_casts_memory
import test_tex_memory
import test_tex_scores_memory
import torch
from tex_backends import REFERENCE
from tex_peak_bytes import check_peak
from torch import Tensor

from fusible import tex
from fusible.quantized import GroupedTensorStorage
from fusible.tex.interface.prim import COLLECTIVES

Make = Callable[[], dict[str, Any]]
Call = tuple[str, Make]
FP32, BF16 = torch.float32, torch.bfloat16
ROWS, WIDTH, OUT = 384, 512, 128
EVEN, ALONE = (128, 128, 128), (0, ROWS, 0)
"""Rows of members. What is held for a member at a time counts most where there is one alone."""


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def quantizer(name: str, *, rowwise: bool = True, columnwise: bool = True) -> Any:
    if name == "none":
        return None
    made = test_tex_memory.QUANTIZERS[name]()
    made.set_usage(rowwise=rowwise, columnwise=columnwise)
    return made


def grouped(made: Any, rows: tuple[int, ...], dtype: torch.dtype, width: int = WIDTH) -> Any:
    """Members of ``rows`` each, quantized by ``made``, or plain where it is None."""
    return REFERENCE("group_quantize", tensor=normal(sum(rows), width, dtype=dtype), quantizer=made, **members(rows))


def members(rows: tuple[int, ...]) -> dict[str, Any]:
    return {"num_tensors": len(rows), "first_dims": torch.tensor(rows)}


def quantizing(name: str, rows: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[str, Make]]:
    """Calls that make copies of members in a format, or read them."""
    group = members(rows)

    def given(columns: int = WIDTH) -> dict[str, Any]:
        return {"tensor": normal(ROWS, columns, dtype=dtype), "quantizer": quantizer(name), **group}

    def activated() -> dict[str, Any]:
        call = given(2 * WIDTH)
        return {"input_2h": call.pop("tensor"), "prob": torch.rand(ROWS), **call}

    def by_rows() -> Any:
        return grouped(quantizer(name, columnwise=False), rows, dtype)

    yield "group_quantize", given
    yield "group_quantize over another", lambda: {**given(), "output": grouped(quantizer(name), rows, dtype), "noop_flag": torch.zeros(1)}
    yield "bgrad_group_quantize", given
    yield "group_dequantize", lambda: {"input": by_rows(), "otype": dtype}
    yield "group_scaled_swiglu", activated
    yield "group_scaled_clamped_swiglu", lambda: {**activated(), "limit": 7.0}
    for returned in (False, True):
        yield (
            f"group_requantize_inplace returning {returned}",
            lambda returned=returned: {
                "grouped_x": by_rows(), "quantizer": quantizer(name), "otype": dtype, "return_dequantized": returned, **group,
            },
        )  # fmt: skip
    if name.startswith("nvfp4") and name != "nvfp4-rows":
        yield "nvfp4_group_quantize_with_amax", lambda: {**given(), "rowwise_amax": torch.full((3,), 5.0), "columnwise_amax": torch.full((3,), 5.0)}


FORMS = ("grouped_tensor", "discrete_in", "discrete_out")


def product(form: str, name: str, rows: tuple[int, ...], dtype: torch.dtype, biased: bool = False) -> dict[str, Any]:
    """Of copies along the rows alone. With ``biased`` the results are what is large; a bias is scaled and the former D added."""
    width, out = (16, WIDTH) if biased else (WIDTH, OUT)
    weights = (out,) * len(rows)
    A: Any = grouped(quantizer(name, columnwise=False), weights, dtype, width)
    if form == "discrete_in":
        each = [normal(out, width, dtype=dtype) for _ in rows]
        A = each if name == "none" else [REFERENCE("quantize", tensor=x, quantizer=quantizer(name, columnwise=False)) for x in each]
    D: Any = [normal(n, out, dtype=dtype) for n in rows] if form == "discrete_out" else grouped(None, rows, dtype, out)
    bias = GroupedTensorStorage((len(rows), out), dtype, num_tensors=len(rows), data=normal(len(rows) * out, dtype=dtype)) if biased else None
    return {
        "A": A, "transa": True, "B": grouped(quantizer(name, columnwise=False), rows, dtype, width), "transb": False, "D": D, "bias": bias,
        "bias_scale": torch.rand(sum(rows)) if biased else None, "alpha": torch.full((1,), 2.0), "beta": torch.full((1,), float(biased)),
        "workspace_setup": torch.empty(0), "workspace_cublas": torch.empty(0), "use_split_accumulator": True, "math_sm_count": 0,
    }  # fmt: skip


def scales(name: str, by_columns: bool) -> dict[str, Any]:
    """A grouped tensor of scales without their data, which would be in the budget; its members are some of the columns, or of the rows."""
    n, sizes = 2048, torch.tensor([512, 1024, 512])
    blocks = n * n // (16 if name == "nvfp4" else 32)
    fields: dict[str, Any] = {way: torch.zeros(blocks, dtype=torch.uint8) for way in ("scale_inv", "columnwise_scale_inv")}
    fields |= {"data": torch.zeros(1, dtype=torch.uint8), "last_dims" if by_columns else "first_dims": sizes}
    tensor = GroupedTensorStorage((n, n), BF16, num_tensors=3, quantizer=quantizer(name), **fields)
    return {"tensor": tensor, "rowwise": True, "columnwise": True}


def calls() -> Iterator[tuple[str, Call]]:
    common = ("current", "blocks-1d", "mxfp8", "nvfp4")
    special = ("delayed", "blocks-2d", "mxfp8-2d", "nvfp4-2d", "nvfp4-rows", "nvfp4-stochastic", "nvfp4-4over6")
    places = [(name, ALONE, FP32) for name in common + special]
    places += [(name, ALONE, BF16) for name in (*common, "nvfp4-rht")]
    places += [(name, EVEN, BF16) for name in common]
    for name, rows, dtype in places:
        of = f"{name} {'alone' if rows is ALONE else 'even'} {dtype}"
        for label, make in quantizing(name, rows, dtype):
            yield f"{label} {of}", (label.split()[0], make)
    functions = {form: f"te_general_grouped_gemm_for_{form}" for form in FORMS}
    for form, function in functions.items():
        for name, rows, dtype in places:
            if rows is ALONE and name in common:
                yield f"{function} {name} {dtype}", (function, lambda f=form, n=name, t=dtype: product(f, n, ALONE, t))
        for dtype in (FP32, BF16):
            yield f"{function} biased {dtype}", (function, lambda f=form, t=dtype: product(f, "none", ALONE, t, biased=True))
            yield f"{function} plain {dtype}", (function, lambda f=form, t=dtype: product(f, "none", EVEN, t))
    for name in ("mxfp8", "nvfp4"):
        for by_columns in (False, True):
            yield f"grouped_swizzle_for_gemm {name} columns {by_columns}", ("grouped_swizzle_for_gemm", lambda n=name, b=by_columns: scales(n, b))

    padding = {"x": normal(ROWS, WIDTH, dtype=FP32), "sizes": torch.tensor([ROWS // 2, ROWS // 4]), "multiple": 32}
    yield "prim_pad_groups", ("prim_pad_groups", lambda: padding)
    yield "prim_unpad_groups", ("prim_unpad_groups", lambda: {**padding, "rows": ROWS})


CALLS = dict(calls())


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_groups_holds_at_most_three_times_its_arguments_and_results(name: str) -> None:
    function, make = CALLS[name]
    check_peak(function, make())


QUERIES = {
    "device_supports_multicast",
    "get_cublasLt_version",
    "get_cudnn_version",
    "get_fused_attn_backend",
    "get_grouped_gemm_setup_workspace_size",
    "get_num_cublas_streams",
    "get_stream_priority_range",
    "nvte_built_with_cublasmp",
    "ubuf_built_with_mpi",
}
"""Neither take nor give a tensor."""


def test_every_function_of_the_reference_is_measured() -> None:
    served = {function for function, reasons in tex.coverage().items() if reasons["torch"] is None}
    measured = {function for table in (CALLS, test_tex_memory.CALLS, test_tex_scores_memory.CALLS) for function, _ in table.values()}
    measured |= {label.split()[0] for label in test_tex_casts_memory.CALLS}
    # Memory of collectives is torch.distributed's; what several processes give is in tests/integration/test_parallel_linear.py and test_layouts.py.
    assert served - measured == QUERIES | set(COLLECTIVES)
    assert measured <= served
