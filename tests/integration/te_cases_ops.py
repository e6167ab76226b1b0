"""What comes of operations of one's own, written against the base classes of NVIDIA's operations, and of fusions that are registered for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from te_public import Side, case

from fusible.pytorch.ops import unregister_fusion

Results = Iterator[tuple[str, Any]]


def _operations(te: Side) -> tuple[type, type]:
    class Times(te.ops.BasicOperation):
        """``y = factor * x``."""

        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def op_forward(self, ctx: Any, input_: torch.Tensor, **options: Any) -> torch.Tensor:
            return input_ * self.factor

        def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
            return grad_output * self.factor, ()

    class Both(te.ops.FusedOperation):
        """Two of them in one pass."""

        calls: list[str] = []

        def __init__(self, first: Any, second: Any) -> None:
            super().__init__((first, second))

        def fuser_forward(self, contexts: Any, input_: torch.Tensor, **options: Any) -> Any:
            self.calls.append("forward")
            return input_ * (self.basic_ops[0].factor * self.basic_ops[1].factor), [(), ()]

    return Times, Both


@case(
    "ops.BasicOperation",
    "ops.FusedOperation",
    "ops.FusibleOperation",
    "ops.Sequential",
    "ops.register_forward_fusion",
    "ops.register_backward_fusion",
    "ops.register_forward_backward_fusion",
    "ops.is_op_fuser_grouped_tensor_path_supported",
)
def own_operations(te: Side) -> Results:
    times, both = _operations(te)

    def fuse(operations: list[Any], **options: Any) -> list[Any]:
        if [type(op) for op in operations] != [times, times]:
            return operations
        return [both(*operations)]

    functions = (fuse, lambda operations, **options: operations, lambda operations, **options: operations)
    kinds = (te.ops.register_forward_fusion, te.ops.register_backward_fusion, te.ops.register_forward_backward_fusion)
    registered = [register(function) for register, function in zip(kinds, functions, strict=True)]
    model = te.ops.Sequential(times(2.0), times(3.0))
    yield "kinds", [isinstance(op, te.ops.FusibleOperation) for op in model]
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = model(x)
    y.sum().backward()
    yield "output", y.detach()
    yield "gradient", x.grad
    yield "fused", both.calls
    answer = te.ops.is_op_fuser_grouped_tensor_path_supported(None, torch.bfloat16)
    yield "groups", isinstance(answer, bool)  # which it is hangs on the kernels that each has
    for function, made in zip(functions, registered, strict=True):
        if made is not None:  # the package's cannot be taken back
            unregister_fusion(function)
