"""Options of modules, operations, optimizers, recipes and quantizers that have a domain: outside of it, and not finite where that means nothing,
each is refused when it is given."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusible.pytorch as fp
from fusible.errors import FusibleError
from fusible.pytorch import ops
from fusible.quantized import Float8BlockQuantizer, Float8CurrentScalingQuantizer
from fusible.quantized.options import QParams
from fusible.quantized.recipe import DelayedScaling
from fusible.tex import DType

NOT_FINITE = [math.nan, math.inf, -math.inf]
E4M3 = DType.kFloat8E4M3


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2))]


OPTIONS: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "LayerNorm eps": (lambda value: fp.LayerNorm(8, eps=value), [-1, *NOT_FINITE]),
    "RMSNorm eps": (lambda value: fp.RMSNorm(8, eps=value), [-1e-9, *NOT_FINITE]),
    "ops.LayerNorm eps": (lambda value: ops.LayerNorm(8, eps=value), [-1, *NOT_FINITE]),
    "ops.RMSNorm eps": (lambda value: ops.RMSNorm(8, eps=value), [-1, "1", None, *NOT_FINITE]),
    "Dropout p": (lambda value: fp.Dropout(value), [-0.1, 1.0, 2, *NOT_FINITE]),
    "ops.Dropout p": (lambda value: ops.Dropout(value), [-0.1, 1.0, *NOT_FINITE]),
    "FusedAdam lr": (lambda value: fp.FusedAdam(parameters(), lr=value), [-1, *NOT_FINITE]),
    "FusedAdam eps": (lambda value: fp.FusedAdam(parameters(), eps=value), [-1, *NOT_FINITE]),
    "FusedAdam weight_decay": (lambda value: fp.FusedAdam(parameters(), weight_decay=value), [-1, *NOT_FINITE]),
    "FusedAdam betas": (lambda value: fp.FusedAdam(parameters(), betas=(0.9, value)), [-0.1, 1.0, *NOT_FINITE]),
    "FusedSGD lr": (lambda value: fp.FusedSGD(parameters(), lr=value), [-1, *NOT_FINITE]),
    "FusedSGD momentum": (lambda value: fp.FusedSGD(parameters(), lr=0.1, momentum=value), [-1, *NOT_FINITE]),
    "FusedSGD dampening": (lambda value: fp.FusedSGD(parameters(), lr=0.1, momentum=0.9, dampening=value), NOT_FINITE),
    "DelayedScaling margin": (lambda value: DelayedScaling(margin=value), NOT_FINITE),
    "DelayedScaling amax_history_len": (lambda value: DelayedScaling(amax_history_len=value), [0, -1]),
    "QParams amax_epsilon": (lambda value: QParams(amax_epsilon=value), [-1.0, *NOT_FINITE]),
    "current amax_epsilon": (lambda value: Float8CurrentScalingQuantizer(E4M3, torch.device("cpu"), amax_epsilon=value), [-1, *NOT_FINITE]),
    "block amax_epsilon": (
        lambda value: Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, amax_epsilon=value),
        [-1, *NOT_FINITE],
    ),
    "ConstantScale": (lambda value: ops.ConstantScale(value), NOT_FINITE),
    "ClampedSwiGLU limit": (lambda value: ops.ClampedSwiGLU(limit=value), [-1, math.nan]),
    "ClampedSwiGLU alpha": (lambda value: ops.ClampedSwiGLU(alpha=value), NOT_FINITE),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_value_outside_the_domain_is_refused_when_it_is_given(option: str) -> None:
    make, wrong = OPTIONS[option]
    for value in wrong:
        with pytest.raises(FusibleError, match=": expected "):
            make(value)
