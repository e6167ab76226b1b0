"""The one place where the tests of ops, fusions and modules get their bounds from."""

from __future__ import annotations

import torch
from torch import Tensor as TorchTensor

from fusible import nvte
from fusible.nvte import DType, Tensor, element, is_quantized_type

FP32 = torch.finfo(torch.float32)
MANTISSA = {DType.Float8E4M3: 3, DType.Float8E5M2: 2}
SMALLEST = {DType.Float8E4M3: 2.0**-9, DType.Float8E5M2: 2.0**-16}


def fp8_eps(dtype: DType) -> float:
    """The distance from 1 to the next number."""
    return 2.0 ** -MANTISSA[dtype]


def tightness(got: TorchTensor, reference: TorchTensor, dtype: torch.dtype, length: int = 1, roundings: int = 1) -> float:
    """The largest error of an element as a share of its bound; at most 1 for a correct result.

    A result is computed in fp32 from inputs that are exact, and stored with one rounding, which costs at most ``eps/2`` of the element itself. What
    comes before is ``length`` additions (the longest sum) and some sixteen elementary steps, each of which costs at most ``eps(fp32)`` of the
    largest intermediate value; the largest element of the result stands for that. ``roundings`` counts values of ``dtype`` that the
    computation passes through, the result included: each inner one moves the result by up to ``eps/2`` of its largest element.
    """
    assert got.shape == reference.shape, f"shape {list(got.shape)} instead of {list(reference.shape)}"
    if not reference.numel():
        return 0.0
    assert got.isfinite().all()
    info = torch.finfo(dtype)
    largest = max(1.0, reference.abs().max().item())
    inner = (length + 16) * FP32.eps * largest + (roundings - 1) * 0.5 * info.eps * largest
    bound = 0.5001 * info.eps * reference.abs() + info.smallest_normal * info.eps + inner
    return ((got.double() - reference).abs() / bound).max().item()


def assert_close(what: str, got: TorchTensor, reference: TorchTensor, dtype: torch.dtype, length: int = 1, roundings: int = 1) -> None:
    """``got`` is of ``dtype`` and within the bound of ``tightness``."""
    assert got.dtype is dtype, f"{what}: {got.dtype} instead of {dtype}"
    share = tightness(got, reference, dtype, length, roundings)
    assert share <= 1, f"{what}: {share:.2f} of its bound"


def values(tensor: Tensor) -> TorchTensor:
    """What a tensor stands for, in float64."""
    if not is_quantized_type(tensor.type):
        return tensor.data.double()
    return nvte.dequantize(tensor, DType.Float32).data.double()


def assert_interchangeable(
    what: str, fused: Tensor, unfused: Tensor, activation: torch.dtype, length: int, roundings: int, after_fp8: DType | None
) -> None:
    """Two ways to compute one result differ by what the intermediate roundings that only one of them makes can do.

    ``roundings`` of the activations' type and sums of ``length`` terms move a value by ``t = roundings * eps + (length + 16) * eps(fp32)`` of the
    largest. An 8-bit result then differs by at most one step where a value near a tie falls to the other side. A result computed *from* such an
    8-bit value (``after_fp8``) inherits its flips: a share of about ``t / eps(fp8)`` of the elements, a step each, so that the relative norm of
    the difference is about ``sqrt(t * eps(fp8))``; a single flip among the ``n`` elements of a small tensor makes ``eps(fp8) / sqrt(n)``.
    """
    moved = roundings * torch.finfo(activation).eps + (length + 16) * FP32.eps
    a, b = values(fused), values(unfused)
    assert a.shape == b.shape, f"{what}: shape {list(a.shape)} instead of {list(b.shape)}"
    if not b.numel():
        return
    difference, largest = (a - b).abs(), b.abs().max()
    if after_fp8 is not None:
        step = fp8_eps(after_fp8)
        bound = moved + 2 * (moved * step) ** 0.5 + 2 * step / b.numel() ** 0.5
        share = (difference.norm() / (bound * b.norm())).item() if b.norm() else float(difference.norm() > 0) * 2
        assert share <= 1, f"{what}: relative norm of the difference is {share:.2f} of its bound"
    elif is_quantized_type(fused.type):
        dtype = element(fused.type)
        step = fp8_eps(dtype) * torch.maximum(a.abs(), b.abs()) + SMALLEST[dtype] * fused.scale_inv.double()
        assert (difference <= 1.001 * step + moved * largest).all(), f"{what}: differs by more than one step of {dtype}"
        flipped = (difference > 2 * moved * largest).double().mean().item()
        allowed = 8 * moved / fp8_eps(dtype) + 2 / b.numel()
        assert flipped <= allowed, f"{what}: {flipped:.0%} of the elements differ, at most {allowed:.0%} can"
    else:
        share = (difference.max() / (moved * max(1.0, largest.item()))).item()
        assert share <= 1, f"{what}: {share:.2f} of its bound"


def assert_honest(what: str, tensor: Tensor) -> None:
    """The data are what the type says they are."""
    data = tensor.data
    if not is_quantized_type(tensor.type):
        found = nvte.nvte_dtype(data.dtype)
        assert found is tensor.type, f"{what}: says {tensor.type}, holds {found}"
        return
    assert int(data._fp8_dtype) == int(tensor.dtype), f"{what}: says {tensor.type}, holds {data._fp8_dtype}"
    assert data._data.dtype is torch.uint8 and data._scale_inv.dtype is torch.float32 and data._scale_inv.shape == (1,), what
