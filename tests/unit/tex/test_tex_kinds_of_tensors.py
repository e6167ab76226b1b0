"""Kinds of tensors in place of each argument of tex, in both backends of real tensors: right, or refused in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusible import cpp_extensions, tex
from fusible.errors import FusibleError

BACKENDS = ["torch", *(["cpu"] if cpp_extensions.available else [])]


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + len(shape)))


def _gemm(A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor) -> Any:
    return tex.generic_gemm(A, True, B, False, None, None, torch.float32, bias, torch.float32, False, None, False, None, 0, False, True)


def _adam(gradient: torch.Tensor) -> Any:
    weight, first, second = _x(4, 6), _x(4, 6), _x(4, 6).abs()
    lists = [[gradient], [weight], [first], [second]]
    tex.multi_tensor_adam(2048, torch.zeros(1, dtype=torch.int32), lists, 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.1)
    return [weight, first, second]


CALLS: dict[str, tuple[Callable[..., Any], dict[str, torch.Tensor]]] = {
    "gelu": (lambda x: tex.gelu(x, None), {"x": _x(4, 6)}),
    "dgelu": (lambda g, x: tex.dgelu(g, x, None), {"g": _x(4, 6), "x": _x(4, 6)}),
    "swiglu": (lambda x: tex.swiglu(x, None), {"x": _x(4, 6)}),
    "dbias_dsilu": (lambda g, x: tex.dbias_dsilu(g, x, None), {"g": _x(4, 6), "x": _x(4, 6)}),
    "layernorm_fwd": (
        lambda x, gamma, beta: tex.layernorm_fwd(x, gamma, beta, 1e-5, None, None, torch.float32, 0, False),
        {"x": _x(4, 6), "gamma": _x(6), "beta": _x(6)},
    ),
    "rmsnorm_bwd": (
        lambda dz, x, rsigma, gamma: tex.rmsnorm_bwd(dz, x, rsigma, gamma, 0, False),
        {"dz": _x(4, 6), "x": _x(4, 6), "rsigma": _x(4).abs(), "gamma": _x(6)},
    ),
    "generic_gemm": (_gemm, {"A": _x(8, 6), "B": _x(4, 6), "bias": _x(8)}),
    "softmax": (lambda x: tex.scaled_softmax_forward(x, 0.5), {"x": _x(1, 2, 4, 6)}),
    "rope": (
        lambda x, freqs: tex.fused_rope_forward(x, freqs, None, tex.NVTE_QKV_Format.NVTE_SBHD, False, None, 1, 0),
        {"x": _x(3, 2, 2, 6), "freqs": _x(4, 1, 1, 6)},
    ),
    "compute_amax": (lambda x: _amax(x), {"x": _x(4, 6)}),
    "multi_tensor_l2norm": (lambda x: tex.multi_tensor_l2norm(2048, torch.zeros(1, dtype=torch.int32), [[x]], True), {"x": _x(4, 6)}),
    "multi_tensor_adam": (_adam, {"gradient": _x(4, 6)}),
}


def _amax(x: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(1)
    tex.compute_amax(x, found)
    return found


def _freed(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.untyped_storage().resize_(0)
    return y


READ: dict[str, Callable[[torch.Tensor], Any]] = {
    "negated": lambda x: torch._neg_view(x.neg()),
    "negated_imaginary": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    "parameter": lambda x: torch.nn.Parameter(x.clone(), requires_grad=False),
    "with_gaps": lambda x: torch.stack((x, x), -1)[..., 0],
    "turned": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "at_an_offset": lambda x: torch.stack((x, x))[1],
    "copied_on_write": torch._lazy_clone,
}
"""What is read like a plain tensor."""


def _tensors(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found]
    return [x for part in found if part is not None for x in _tensors(part)] if isinstance(found, (list, tuple)) else []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", READ)
def test_a_tensor_of_another_kind_is_read_for_its_value(backend: str, call: str, kind: str) -> None:
    function, arguments = CALLS[call]
    with tex.set_backend(backend):
        wanted = _tensors(function(**arguments))
        for name, x in arguments.items():
            found = _tensors(function(**{**arguments, name: READ[kind](x)}))
            # The reference hands strides on to torch, whose sums then have another order.
            assert len(found) == len(wanted)
            for got, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=16 * torch.finfo(torch.float32).eps, atol=16 * torch.finfo(torch.float32).eps)


@pytest.mark.skipif(not cpp_extensions.available, reason="no compiled extension")
@pytest.mark.parametrize("call", CALLS)
def test_freed_memory_is_refused_by_the_native_backend(call: str) -> None:
    function, arguments = CALLS[call]
    for name, x in arguments.items():
        if tex.explain("gelu", x, None).backend != "cpu":
            continue
        with pytest.raises((FusibleError, RuntimeError)) as caught:
            function(**{**arguments, name: _freed(x)})
        if isinstance(caught.value, FusibleError):
            assert re.fullmatch(r".+: expected .+, got .+; .+\.", str(caught.value))
