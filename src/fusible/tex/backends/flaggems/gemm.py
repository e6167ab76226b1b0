"""The matrix product by FlagGems' ``mm``, which accumulates in fp32 and gives the dtype of its operands; the epilogue is torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible.tex.backends.flaggems.operands import FLOATING, refused
from fusible.tex.calls.gemm import GemmTypes, check_bias, check_gelu_input
from fusible.tex.interface.declare import CallArguments, by_name, requires
from fusible.tex.interface.gemm import GEMM
from fusible.tex.protocol import check_same_device, to_torch
from fusible.tex.selection.dispatch import hand_over

__all__ = ["GemmKernels"]

_TYPES = GemmTypes(FLOATING, lambda x: x.dtype, to_torch)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class GemmKernels(GEMM):
    gems: Any

    @requires(refused)
    @by_name
    def generic_gemm(self, call: CallArguments) -> list[Any]:
        if call.comm_overlap is not None:
            return hand_over(self, "generic_gemm", **vars(call))  # type: ignore[arg-type]
        job = _TYPES.check(
            call.A, call.transA, call.B, call.transB, call.D, None, call.output_dtype, call.accumulate, call.alpha, call.beta
        )  # fmt: skip
        check_same_device(call.A, call.B, "A of generic_gemm")
        if job.shape.empty:
            return hand_over(self, "generic_gemm", **vars(call))  # type: ignore[arg-type]
        if call.bias is not None and not call.grad:
            check_bias(call.bias, job)
        if call.grad and call.gelu:
            check_gelu_input(call.gelu_in, job)
        adds = call.bias is not None and not call.grad
        plain = call.A.dtype is call.B.dtype is job.dtype and not (adds or call.gelu or job.beta or job.alpha != 1)
        a, b = _flat(call.A), _flat(call.B)
        if not plain:  # the epilogue works on an fp32 product: one rounding, at the end
            a, b = a.float(), b.float()
        result = self.gems.mm(b.t() if call.transB else b, a.t() if call.transA else a).view(job.shape.output)
        bias_grad = pre_gelu = None
        if not plain:
            result = result.mul_(job.alpha)
            result = result.add_(call.D, alpha=job.beta) if job.beta else result
        if call.grad:
            if call.gelu:
                result = torch.ops.aten.gelu_backward(result, call.gelu_in.float(), approximate="tanh")
            if call.bias is not None:
                summed = _flat(result if call.gelu else call.B)
                bias_grad = summed.sum(0, dtype=torch.float32).to(job.dtype)
        else:
            result = result.add_(call.bias) if call.bias is not None else result
            if call.gelu:
                pre_gelu, result = result.to(job.dtype), F.gelu(result, approximate="tanh")
        return [result.to(job.dtype) if call.D is None else call.D.copy_(result), bias_grad, pre_gelu, call.extra_output]
