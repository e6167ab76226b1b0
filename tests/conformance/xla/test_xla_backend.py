"""The backend of lazy tensors as a backend: what it serves, how handles are written, precision, and the bits that dropout draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tex_backends import REFERENCE
from xla_runner import RUNNER

from fusible import lazy, tex
from fusible.errors import DTypeError, NotServedError, ShapeError
from fusible.quantized import Float8CurrentScalingQuantizer, Float8Quantizer
from fusible.tex import DType
from fusible.tex.backends.xla.fp8 import tensor_amax

pytest.importorskip("jaxlib")


def test_it_serves_lazy_tensors_and_nothing_else() -> None:
    assert tex.explain("gelu", lazy.zeros((2, 2)), None).backend == "xla"
    decision = tex.explain("gelu", torch.zeros(2, 2), None)
    assert decision.backend != "xla" and "serves tensors on lazy" in dict(decision.others)["xla"]
    quantizer = Float8Quantizer(torch.ones(1), None, DType.kFloat8E4M3)
    decision = tex.explain("create_empty_quantized_tensor", quantizer, [2], torch.float32, torch.device("cpu"), False)
    assert decision.backend != "xla" and "takes none" in dict(decision.others)["xla"]
    assert tex.explain("multi_tensor_scale", 0, torch.zeros(1), [[], []], 1.0).backend != "xla"


def test_what_it_refuses_it_refuses_with_a_reason() -> None:
    with pytest.raises(NotServedError, match="an argument of a function being compiled"):
        lazy.compile(lambda x: tex.dropout_fwd(x * 2, 0.5), args=[lazy.InputInfo((4, 4), lazy.float32)])
    with pytest.raises(NotServedError, match="xla: serves float32, bfloat16 and float16, and input is float64"):
        tex.gelu(lazy.zeros((2, 2), lazy.float64), None)


def test_dropout_draws_what_the_torch_backend_draws() -> None:
    x = torch.arange(64.0).view(4, 16)
    torch.manual_seed(5)
    y, mask = tex.dropout_fwd(x, 0.3)
    torch.manual_seed(5)
    lazy_y, lazy_mask = tex.dropout_fwd(lazy.Tensor(x), 0.3)
    assert torch.equal(torch.from_dlpack(lazy_mask), mask) and torch.equal(torch.from_dlpack(lazy_y), y)


def test_without_jaxlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'fusible[xla]'" in (tex.backends.xla.XlaBackend().unavailable() or "")


def test_assigning_changes_one_handle_and_no_value() -> None:
    x = lazy.Tensor([1.0, 2.0])
    copy, doubled = tex.prim.copy(x), x * 2.0
    assert x.assign_(lazy.Tensor([5.0, 6.0])) is x
    assert x.tolist() == [5.0, 6.0] and copy.tolist() == [1.0, 2.0] and doubled.tolist() == [2.0, 4.0]
    with pytest.raises(ShapeError, match=r"a value to assign: expected shape \(2,\)"):
        x.assign_(lazy.zeros((3,)))
    with pytest.raises(DTypeError, match="a value to assign: expected float32"):
        x.assign_(lazy.zeros((2,), lazy.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, "fp8"])
def test_products_accumulate_in_fp32(dtype: torch.dtype | str) -> None:
    """2048 exact products: the sum is off by sqrt(2048) * eps(fp32) of their norm, root mean square; a sum in bf16 by 2^-9 of itself."""
    depth = 2048
    a, b = (torch.randn(8, depth, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    if isinstance(dtype, str):
        operands = [RUNNER("quantize", tensor=x, quantizer=Float8Quantizer(torch.tensor([4.0]), None, DType.kFloat8E4M3)) for x in (a, b)]
        a, b = (x.dequantize() for x in operands)
    else:
        a, b = operands = [x.to(dtype) for x in (a, b)]
    product = RUNNER(
        "generic_gemm", A=operands[0], transA=True, B=operands[1], transB=False, D=None, quantizer=None, output_dtype=torch.float32, bias=None,
        bias_type=None, gelu=False, gelu_in=None, grad=False, workspace=None, workspace_size=0, accumulate=False, use_split_accumulator=True,
    )[0]  # fmt: skip
    exact = b.double() @ a.double().T
    bound = math.sqrt(depth) * torch.finfo(torch.float32).eps * math.sqrt(depth) * 4
    assert (product.double() - exact).abs().max().item() <= bound


@pytest.mark.parametrize("offset", [0, 1, 7])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 - 1, -(2**63)])
def test_dropout_draws_the_bits_of_real_tensors(seed: int, offset: int) -> None:
    x, seeds = torch.randn(33, 65, generator=torch.Generator().manual_seed(5)), torch.tensor([seed])
    y, mask = tex.prim.dropout(x, 0.3, seeds, offset)
    lazy_y, lazy_mask = RUNNER("prim_dropout", x=x, probability=0.3, seed=seeds, offset=offset)
    assert torch.equal(mask, lazy_mask) and torch.equal(y, lazy_y)


@pytest.mark.parametrize(("values", "amax"), [([-3], 3), ([math.nan, math.inf], math.nan), ([-math.inf, 1], math.inf), ([-1e30, 1e25], 1e30)])
def test_an_amax_keeps_what_is_not_finite(values: list[float], amax: float) -> None:
    """Of as many elements as XLA reduces by the kernel that loses a NaN."""
    array = np.random.default_rng(0).uniform(-1, 1, (1024, 2048)).astype(np.float32)
    array[17, 5 : 5 + len(values)] = values
    assert np.array_equal(tensor_amax(lazy.Tensor(array)).numpy(), np.array([amax], np.float32), equal_nan=True)


@pytest.mark.parametrize("first_dims", [None, torch.tensor([3, 0, 5])], ids=["equal members", "rows given"])
@pytest.mark.parametrize("pow_2", [False, True])
def test_a_group_has_its_members_amaxes_scales_and_offsets(first_dims: torch.Tensor | None, pow_2: bool) -> None:
    """Under current scaling, as the reference's groups: ``[num_tensors]``, and where members begin and the last one ends."""
    x = torch.randn(9 if first_dims is None else 8, 6, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, "cpu", force_pow_2_scales=pow_2)
    call = {"tensor": x, "quantizer": quantizer, "num_tensors": 3, "first_dims": first_dims}
    found, wanted = RUNNER("group_quantize", **call), REFERENCE("group_quantize", **call)
    for name in ("amax", "scale", "scale_inv", "columnwise_scale_inv"):
        assert getattr(found, name).dtype is torch.float32
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert (found.tensor_offsets is None) == (wanted.tensor_offsets is None) == (first_dims is None)
    assert first_dims is None or torch.equal(found.tensor_offsets, wanted.tensor_offsets)
