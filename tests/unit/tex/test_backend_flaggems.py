"""The flaggems backend over a stand-in for the package: the same functions, by torch on the CPU, and a note of what was called."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusible import tex
from fusible.conformance import Verdict, check_backend
from fusible.tex import NVTE_Mask_Type, NVTE_QKV_Layout
from fusible.tex.backends import flaggems
from fusible.tex.backends.flaggems import activation
from fusible.tex.interface.declare import DECLARATIONS, Request
from fusible.tex.selection.registry import registry

CALLED: list[str] = []


def rms_norm_forward(x: Tensor, shape: list[int], weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    CALLED.append("rms_norm_forward")
    rs = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x.float() * rs * weight).to(x.dtype), rs.flatten()


def rms_norm_backward(dy: Tensor, x: Tensor, inv_rms: Tensor, shape: list[int], weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    CALLED.append("rms_norm_backward")
    rs = inv_rms.view(*x.shape[:-1], 1)
    xh, g = x.float() * rs, dy.float() * weight
    dx = rs * (g - xh * (g * xh).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy.float() * xh).sum_to_size(weight.shape).to(x.dtype)


def mm(a: Tensor, b: Tensor) -> Tensor:
    CALLED.append("mm")
    return (a.double() @ b.double()).to(a.dtype)


def scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    s = scale * q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf) if causal else s


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: None, dropout_p: float, is_causal: bool, scale: float, enable_gqa: bool
) -> tuple[Tensor, Tensor]:
    CALLED.append("attention_forward")
    assert attn_mask is None and dropout_p == 0.0 and enable_gqa == (q.shape[1] != k.shape[1])
    s = scores(q, k, is_causal, scale)
    values = v.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (s.softmax(-1) @ values).to(q.dtype), (torch.logsumexp(s, -1) / math.log(2)).float()


def attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, M: Tensor, attn_mask: None, dropout_p: float, is_causal: bool, scale: float,
    enable_gqa: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    CALLED.append("attention_backward")
    share = q.shape[1] // k.shape[1]
    p = torch.exp2(scores(q, k, is_causal, scale) / math.log(2) - M.double()[..., None])
    ds = p * (do.double() @ v.double().repeat_interleave(share, 1).transpose(-1, -2) - (do.double() * o.double()).sum(-1, keepdim=True))

    def group(x: Tensor) -> Tensor:
        return x.unflatten(1, (k.shape[1], share)).sum(2).to(q.dtype)

    dq = scale * ds @ k.double().repeat_interleave(share, 1)
    return dq.to(q.dtype), group(scale * ds.transpose(-1, -2) @ q.double()), group(p.transpose(-1, -2) @ do.double())


def of_values(function: Any, x: Tensor, grad: Tensor | None = None) -> Tensor:
    """``function`` of the values in float64, or its gradient; in the dtype that FlagGems gives: its operands'."""
    point = x.double().requires_grad_(grad is not None)
    with torch.enable_grad():
        y = function(point)
    return (y if grad is None else torch.autograd.grad(y, point, grad.double())[0]).to(x.dtype)


def gelu_of(approximate: str) -> Any:
    assert approximate == "tanh"
    return partial(torch.nn.functional.gelu, approximate=approximate)


def gelu(self: Tensor, *, approximate: str = "none") -> Tensor:
    CALLED.append("gelu")
    return of_values(gelu_of(approximate), self)


def gelu_backward(grad_output: Tensor, self: Tensor, *, approximate: str = "none") -> Tensor:
    CALLED.append("gelu_backward")
    return of_values(gelu_of(approximate), self, grad_output)


def silu(self: Tensor) -> Tensor:
    CALLED.append("silu")
    return of_values(torch.nn.functional.silu, self)


def silu_backward(grad_output: Tensor, self: Tensor) -> Tensor:
    CALLED.append("silu_backward")
    return of_values(torch.nn.functional.silu, self, grad_output)


def gate(name: str, x: Tensor, grad: Tensor | None = None) -> Tensor:
    """As FlagGems': of no elements a division by zero, for which it counts rows."""
    assert x.numel() // x.shape[-1]
    activation = gelu_of("tanh") if "gelu" in name or "geglu" in name else torch.nn.functional.silu
    return of_values(lambda x: activation(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], x, grad)


def geglu(input_tensor: Tensor, quantizer: None = None) -> Tensor:
    CALLED.append("geglu")
    return gate("geglu", input_tensor)


def dgeglu(grad_output: Tensor, input_tensor: Tensor, quantizer: None = None) -> Tensor:
    CALLED.append("dgeglu")
    return gate("geglu", input_tensor, grad_output)


def swiglu(input_tensor: Tensor, quantizer: None = None) -> Tensor:
    CALLED.append("swiglu")
    return gate("swiglu", input_tensor)


def dswiglu(grad_output: Tensor, input_tensor: Tensor, quantizer: None = None) -> Tensor:
    CALLED.append("dswiglu")
    return gate("swiglu", input_tensor, grad_output)


def layer_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-05
) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics are of the input's dtype."""
    CALLED.append("layer_norm")
    x = input.double().reshape(-1, *normalized_shape)
    mean, rstd = x.mean(-1), torch.rsqrt(x.var(-1, correction=0) + eps)
    y = (x - mean[:, None]) * rstd[:, None] * weight + (0 if bias is None else bias)
    return y.view(input.shape).to(input.dtype), mean.to(input.dtype), rstd.to(input.dtype)


def layer_norm_backward(
    grad_out: Tensor, input: Tensor, normalized_shape: list[int], mean: Tensor, rstd: Tensor, weight: Tensor | None = None,
    bias: Tensor | None = None, output_mask: list[bool] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of rows; the gradients of the parameters are of their dtypes."""
    CALLED.append("layer_norm_backward")
    assert input.ndim == 2 and output_mask == [True] * 3 and weight is not None and bias is not None
    xh = (input.double() - mean[:, None]) * rstd[:, None].double()
    g = grad_out.double() * weight
    dx = rstd[:, None] * (g - (g.sum(-1, keepdim=True) + xh * (g * xh).sum(-1, keepdim=True)) / input.shape[-1])
    return dx.to(input.dtype), (grad_out.double() * xh).sum(0).to(weight.dtype), grad_out.double().sum(0).to(bias.dtype)


def scaled_softmax_forward(input_t: Tensor, scale_factor: float) -> Tensor:
    CALLED.append("scaled_softmax_forward")
    assert input_t.dtype in (torch.float16, torch.bfloat16) and input_t.is_contiguous()
    assert input_t.dim() == 4 and input_t.shape[3] <= 16384 and not input_t.shape[3] % 8 and input_t.shape[2] > 1
    return (input_t.float() * scale_factor).softmax(-1).to(input_t.dtype)


FUNCTIONS = (
    rms_norm_forward, rms_norm_backward, mm, gelu, gelu_backward, silu, silu_backward, geglu, dgeglu, swiglu, dswiglu,
    layer_norm, layer_norm_backward, scaled_softmax_forward,
)  # fmt: skip


@pytest.fixture
def gems(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    stand_in = SimpleNamespace(
        device="cpu", scaled_dot_product_attention_forward=attention_forward, scaled_dot_product_attention_backward=attention_backward,
        **{function.__name__: function for function in FUNCTIONS},
    )  # fmt: skip
    monkeypatch.setattr(activation, "SWIGLU_DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(flaggems, "load", lambda: stand_in)
    registry.changed()
    CALLED.clear()
    yield stand_in
    monkeypatch.undo()
    registry.changed()


def test_it_agrees_with_the_suite(gems: Any) -> None:
    rows = list(check_backend("flaggems", dtypes=[torch.float32, torch.bfloat16]))
    assert {row.function for row in rows} == flaggems._KERNELS.keys()
    assert not any(row.wrong for row in rows), [row for row in rows if row.wrong]
    assert all(row.samples for row in rows if row.dtype == "bfloat16" and row.verdict == Verdict.AGREES)
    assert set(CALLED) == {"attention_backward", "attention_forward", *(function.__name__ for function in FUNCTIONS)}


def test_it_comes_first_and_leaves_the_rest_to_others(gems: Any) -> None:
    x, w = torch.randn(4, 8), torch.ones(8)
    call = (x, w, 1e-5, None, None)
    assert tex.explain("rmsnorm_fwd", *call, torch.float32, 0, False).backend == "flaggems"
    others = dict(tex.explain("rmsnorm_fwd", *call, torch.bfloat16, 0, False).others)
    assert "gives the dtype of its input" in others["flaggems"]
    assert tex.explain("relu", x, None).backend != "flaggems"  # its kernel drops NaN
    assert "serves tensors on cpu" in dict(tex.explain("rmsnorm_fwd", x.to("meta"), *call[1:], torch.float32, 0, False).others)["flaggems"]


def test_what_was_seen_to_differ_on_nvidias_gpus_is_refused_there(gems: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = registry.find("flaggems")
    for device, refused in (("cpu", False), ("cuda", True)):
        monkeypatch.setattr(gems, "device", device)
        plain = (device, torch.float32)
        norm = Request("rmsnorm_fwd", (("input", plain), ("weight", plain), ("quantizer", None), ("otype", torch.float32)))
        assert ("on an NVIDIA GPU" in (backend.supports(norm) or "")) == refused
        assert backend.supports(Request("gelu", (("input", plain), ("quantizer", None)))) is None


def refusal(function: str, *arguments: Any) -> str:
    return dict(tex.explain(function, *arguments).others).get("flaggems", "")


def test_what_its_kernels_round_too_early_or_cannot_read_it_refuses(gems: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(4, 8).bfloat16(), torch.ones(8)
    assert "mean and rsigma in the dtype of its input" in refusal("layernorm_fwd", x, w, w, 1e-5, None, None, torch.bfloat16, 0, False)
    assert "grad and fwd_input of one dtype" in refusal("dgelu", x.float(), x, None)
    assert "reads bfloat16, float16, and input is torch.float32" in refusal("scaled_softmax_forward", torch.zeros(1, 1, 2, 8), 1.0)
    monkeypatch.setattr(activation, "SWIGLU_DEVICES", frozenset({"cuda"}))
    assert "takes tensors on cuda alone, and these are on cpu" in refusal("swiglu", x, None)


@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (1, 1, 2, 12), (0, 1, 2, 8)], ids=str)
def test_scores_that_its_softmax_has_no_blocks_for_are_handed_over(gems: Any, shape: tuple[int, ...]) -> None:
    scores = torch.randn(shape).bfloat16()
    y = tex.scaled_softmax_forward(scores, 0.5)
    assert not CALLED
    torch.testing.assert_close(y.float(), (scores.float() * 0.5).softmax(-1), atol=2.0**-8, rtol=2.0**-8)


def test_an_older_version_lacks_what_it_has_not(gems: Any) -> None:
    assert registry.find("flaggems").lacks("dswiglu") is None
    del gems.dswiglu
    assert registry.find("flaggems").lacks("dswiglu") == "the installed flag_gems has no dswiglu"
    assert tex.coverage()["dswiglu"]["flaggems"] == "the installed flag_gems has no dswiglu"


def test_a_no_where_the_package_is_missing_says_so() -> None:
    asked = tex.explain("gelu", torch.ones(2), None).request
    reason = registry.find("flaggems").supports(asked)
    assert reason is not None and (reason == registry.reason_unavailable(registry.find("flaggems")) or "serves tensors on" in reason)


def attend(**changes: Any) -> list[Any]:
    q, k, v = (torch.randn(2, 8, 4, 16, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    declared = DECLARATIONS["fused_attn_fwd"].signature.parameters
    call: dict[str, Any] = {
        **dict.fromkeys(declared), "max_seqlen_q": 8, "max_seqlen_kv": 8, "is_training": True, "attn_scale": 0.25, "p_dropout": 0.0,
        "set_zero": True, "qkv_layout": NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, "o_format": 8, "qkv_scale_inv_format": 8, "bias_type": 0,
        "attn_mask_type": NVTE_Mask_Type.NVTE_NO_MASK, "softmax_type": 0, "window_size": [-1, -1], "bottom_right_diagonal": False, "Q": q, "K": k,
        "V": v, "fake_dtype": torch.bfloat16, "rng_elts_per_thread": 0, "return_max_logit": False, "cuda_graph": False,
    }  # fmt: skip
    return tex.fused_attn_fwd(**{**call, **changes})


@pytest.mark.parametrize("changes", [{"window_size": [2, 0]}, {"p_dropout": 0.5}, {"return_max_logit": True}], ids=str)
def test_what_no_kind_shows_is_handed_over(gems: Any, changes: dict[str, Any]) -> None:
    attend()
    assert CALLED == ["attention_forward"]
    torch.manual_seed(3)
    handed = attend(**changes)
    assert CALLED == ["attention_forward"]
    with tex.set_backend("cpu" if handed and tex.coverage()["fused_attn_fwd"].get("cpu") is None else "torch"):
        torch.manual_seed(3)
        assert all(torch.equal(a, b) for a, b in zip(handed, attend(**changes), strict=True))
    with tex.set_backend("flaggems", strict=True), pytest.raises(NotImplementedError, match="flaggems: refuses this call"):
        attend(**changes)


def test_the_package_is_asked_for_once_and_whatever_it_raises_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    imports = []

    def refuse(name: str) -> Any:
        imports.append(name)
        raise RuntimeError("no device here\nand more")

    flaggems.load.cache_clear()
    monkeypatch.setattr(flaggems.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(flaggems.importlib, "import_module", refuse)
    try:
        assert flaggems.load() == flaggems.load() == "flag_gems cannot be loaded: RuntimeError: no device here"
        assert imports == ["flag_gems"]
    finally:
        flaggems.load.cache_clear()


def test_importing_tex_does_not_import_it() -> None:
    assert "flag_gems" not in sys.modules
