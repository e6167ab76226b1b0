"""Modules, operations, quantizers: a constructor refuses what its annotations do not allow, in one sentence that names it and the argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from wrong_values import words

import fusible
from fusible import nvte, ops, quantized
from fusible.errors import FusibleError
from fusible.pytorch import ops as operations


class _Strange:
    """Of no class that anything knows."""


WRONG: dict[str, Any] = {
    "None": None, "a text": "a", "0": 0, "-1": -1, "2.5": 2.5, "a list": [4], "a tensor": torch.ones(2), "an object": _Strange(),
    "a class": _Strange, "infinity": float("inf"),
}  # fmt: skip


def tensor(*shape: int) -> nvte.Tensor:
    return nvte.make_nvte_tensor(torch.ones(shape))


GOOD: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (fusible.Linear, {"in_features": 4, "out_features": 6, "bias": True, "param_dtype": None, "device": None}),
    (fusible.LayerNorm, {"features": 8, "eps": 1e-5, "zero_centered_gamma": False, "param_dtype": None, "device": None}),
    (fusible.RMSNorm, {"features": 8, "eps": 1e-5, "zero_centered_gamma": False, "param_dtype": None, "device": None}),
    (fusible.QKNorm, {"heads": 2, "head_width": 4, "groups": None, "eps": 1e-6, "zero_centered_gamma": False, "param_dtype": None, "device": None}),
    (fusible.MixtureOfExperts, {"features": 4, "inner_features": 4, "experts": 8, "top_k": 4, "normalized": True, "router_dtype": None}),
    (fusible.Dropout, {"p": 0.5}),
    (fusible.MultiHeadedSelfAttention, {"features": 8, "heads": 2, "causal": True, "rope_base": None}),
    (fusible.GroupedQuerySelfAttention, {"features": 8, "heads": 4, "groups": 2, "causal": True}),
    (fusible.MultiQuerySelfAttention, {"features": 8, "heads": 2, "causal": True}),
    (fusible.DotProductAttention, {"heads": 2, "head_width": 4, "groups": None, "causal": True, "rope_base": None, "scale": None}),
    (fusible.DotProductAttention, {"heads": 2, "head_width": 4, "window_size": (2, 0)}),
    (fusible.DotProductAttention, {"heads": 2, "head_width": 4, "soft_cap": 30.0, "alibi": (0.5, 0.25), "mask": True, "dropout": 0.1}),
    (fusible.LatentAttention, {"heads": 2, "key_width": 4, "rope_width": 2, "value_width": 4, "groups": 1, "causal": True, "scale": None}),
    (fusible.LatentAttention, {"heads": 2, "key_width": 4, "rope_width": 2, "rope_base": 100.0, "rope_interleaved": True, "rope_scale": 1.5}),
    (fusible.CrossAttention, {"heads": 2, "head_width": 4, "groups": None, "scale": None, "soft_cap": 30.0, "mask": True, "dropout": 0.1}),
    (operations.Linear, {"in_features": 4, "out_features": 6, "bias": True, "device": None, "dtype": None, "tensor_parallel_mode": None}),
    (operations.BasicLinear, {"in_features": 4, "out_features": 6, "device": None, "dtype": None}),
    (operations.GroupedLinear, {"num_groups": 2, "in_features": 4, "out_features": 4, "bias": True}),
    (operations.Bias, {"size": 4, "device": None, "dtype": None}),
    (operations.LayerNorm, {"normalized_shape": 8, "eps": 1e-5, "zero_centered_gamma": False}),
    (operations.RMSNorm, {"normalized_shape": 8, "eps": 1e-5, "zero_centered_gamma": False}),
    (operations.Dropout, {"p": 0.5}),
    (operations.ConstantScale, {"scale": 2.0}),
    (operations.Quantize, {"forward": True, "backward": False}),
    (operations.GELU, {"cache_quantized_input": False}),
    (operations.SwiGLU, {"cache_quantized_input": False, "glu_interleave_size": None}),
    (operations.ClampedSwiGLU, {"limit": 7.0, "alpha": 1.702}),
    (operations.L2Normalization, {"eps": 1e-6}),
    (ops.LayerNorm, {"weight": tensor(8), "bias": tensor(8), "eps": 1e-5, "zero_centered_gamma": False}),
    (ops.RMSNorm, {"weight": tensor(8), "eps": 1e-5}),
    (ops.MMT, {"weight": tensor(8, 8)}),
    (ops.Add, {"bias": tensor(8)}),
    (ops.Dropout, {"p": 0.5}),
    (ops.ConstantScale, {"scale": 2.0}),
    (
        ops.RouteTokens,
        {"weight": tensor(8, 4), "top_k": 4, "normalized": True, "score_function": "sigmoid", "expert_bias": tensor(8)}
        | {"groups": 4, "top_groups": 2, "scaling_factor": 2.5},
    ),
    (ops.DotProductAttention, {"heads": 2, "head_width": 4, "causal": True}),
    (ops.CrossAttention, {"heads": 2, "head_width": 4, "mask": True}),
    (ops.L2Normalization, {"eps": 1e-6}),
    (quantized.Float8Quantizer, {"scale": torch.ones(1), "amax": torch.zeros(1), "fp8_dtype": 7, "rowwise": True, "columnwise": True}),
    (quantized.Float8CurrentScalingQuantizer, {"fp8_dtype": 7, "device": "cpu", "rowwise": True}),
    (quantized.MXFP8Quantizer, {"fp8_dtype": 7, "rowwise": True}),
    (quantized.Float8BlockQuantizer, {"fp8_dtype": 7, "rowwise": True, "columnwise": True}),
]
LEGAL = {"None", "0", "-1", "2.5", "infinity", "a list"}
"""What may be taken where the annotation allows it: a number for a number, None for what is optional, a list for a shape."""
KNOWN = {
    (fusible.DotProductAttention, "alibi"): "a tensor of a slope for each head is one",
    (operations.LayerNorm, "normalized_shape"): "-1 is refused by torch, which makes the parameter",
    (operations.RMSNorm, "normalized_shape"): "-1 is refused by torch, which makes the parameter",
    (quantized.Float8Quantizer, "scale"): "NVIDIA's constructor takes anything, and so do the classes that stand for it",
    (quantized.Float8Quantizer, "amax"): "NVIDIA's constructor takes anything, and so do the classes that stand for it",
}
"""Arguments whose bad values are not refused clearly, and why: a closed list."""


def test_constructors_refuse_what_their_annotations_do_not_allow() -> None:
    counts: Counter[str] = Counter()
    unclear = []
    for made, good in GOOD:
        made(**good)
        for name, value in good.items():
            for what, bad in WRONG.items():
                if bad is value or (made, name) in KNOWN or (name, what) == ("device", "0"):  # it depends on the machine whether there is one
                    continue
                try:
                    made(**{**good, name: bad})
                except Exception as error:
                    text = str(error)
                    clear = isinstance(error, FusibleError) and "\n" not in text and {name, made.__name__} <= words(text)  # type: ignore[attr-defined]
                    counts["clear"] += clear
                    unclear += [] if clear else [f"{made}: {name} {what}: {type(error).__name__}: {text}"]
                else:
                    counts["accepted"] += 1
                    unclear += [] if what in LEGAL else [f"{made}: {name} {what}: accepted"]
    print(dict(counts))
    assert not unclear, "\n".join(unclear)
    assert counts["clear"] > 700


def test_a_users_own_class_is_left_alone() -> None:
    class Own(ops.ConstantScale):
        def __init__(self, scale: int) -> None:
            super().__init__(float(scale))

    assert Own("3").scale == 3.0  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [(), (4,), (4, 4, True, None, None, None, None, False, False, 3)])
def test_what_does_not_fit_the_signature_is_pythons_own_error(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"__init__\(\)"):
        fusible.Linear(*arguments)
