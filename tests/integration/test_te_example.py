"""The example written for a GPU: it trains under each recipe that tex serves, and in bf16 as the same model in plain torch does."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from doc_pages import ROOT
from te_client import package, recipe_for
from torch.nn import functional as F

EXAMPLE = ROOT / "examples" / "te_transformer_layer.py"
RECIPES = ("bf16", "delayed", "current", "block", "mxfp8", "nvfp4")


@pytest.fixture
def te() -> Iterator[Any]:
    with package() as te:
        yield te


@pytest.mark.usefixtures("te")
def test_it_is_run_from_a_shell() -> None:
    command = [sys.executable, "-W", "error", "-m", "fusible", "run", "--device", "cpu", str(EXAMPLE), "--recipe", "current"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == "", done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert [int(re.fullmatch(r"step +(\d+)  loss \d\.\d{4}", line)[1]) for line in lines] == list(range(1, 11))  # pyright: ignore[reportOptionalSubscript]
    losses = [float(line.split()[-1]) for line in lines]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("recipe_name", RECIPES)
def test_the_loss_falls(te: Any, recipe_name: str) -> None:
    recipe_for(te, recipe_name)
    example = runpy.run_path(str(EXAMPLE))
    losses = example["train"](example["make_layer"](), recipe_name, 10)
    assert len(losses) == 10 and losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.93 * losses[0]


class _Plain(torch.nn.Module):
    """The layer in plain torch: norm, causal attention, norm, MLP of a GELU, each pair beside the identity."""

    def __init__(self, layer: torch.nn.Module, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.p = torch.nn.ParameterDict({name.replace(".", "_"): value.detach().clone() for name, value in layer.named_parameters()})

    def linear(self, x: torch.Tensor, name: str, part: str = "") -> torch.Tensor:
        return F.linear(x, self.p[f"{name}_{part}weight"], self.p[f"{name}_{part}bias"])

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.p[f"{name}_layer_norm_weight"], self.p[f"{name}_layer_norm_bias"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequence, batch, hidden = x.shape
        h = self.norm(x, "self_attention_layernorm_qkv")
        q, k, v = (
            self.linear(h, "self_attention_layernorm_qkv", part).view(sequence, batch, self.heads, -1).permute(1, 2, 0, 3)
            for part in ("query_", "key_", "value_")
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).reshape(sequence, batch, hidden)
        x = x + self.linear(attended, "self_attention_proj")
        h = self.norm(x, "layernorm_mlp")
        h = F.gelu(F.linear(h, self.p["layernorm_mlp_fc1_weight"], self.p["layernorm_mlp_fc1_bias"]), approximate="tanh")
        return x + F.linear(h, self.p["layernorm_mlp_fc2_weight"], self.p["layernorm_mlp_fc2_bias"])


@pytest.mark.usefixtures("te")
def test_in_bf16_it_trains_as_plain_torch_does() -> None:
    example = runpy.run_path(str(EXAMPLE))
    layer = example["make_layer"]()
    plain = _Plain(layer, example["HEADS"])
    x, target = example["make_batch"]()

    # One forward and backward: no further from fp32 than twice what plain torch in bf16 is, and one rounding.
    exact = _Plain(layer, example["HEADS"]).float()
    ys = {model: model(x.float() if model is exact else x) for model in (layer, plain, exact)}
    for y in ys.values():
        F.mse_loss(y.float(), target.float()).backward()
    assert _error(ys[layer], ys[exact]) <= 2 * _error(ys[plain], ys[exact]) + 2.0**-8
    for name, parameter in layer.named_parameters():
        if not name.endswith("key_bias"):  # shifts every score of a query alike: its gradient is rounding error alone
            theirs, wanted = (model.p[name.replace(".", "_")].grad for model in (plain, exact))
            assert _error(parameter.grad, wanted) <= 2 * _error(theirs, wanted) + 2.0**-8, name

    # Ten steps by a master copy in fp32, as the example takes them.
    losses, masters = [], [parameter.detach().float() for parameter in plain.parameters()]
    optimizer = torch.optim.Adam(masters, lr=1e-3)
    for _ in range(10):
        plain.zero_grad()
        loss = F.mse_loss(plain(x).float(), target.float())
        loss.backward()
        for parameter, master in zip(plain.parameters(), masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        optimizer.step()
        for parameter, master in zip(plain.parameters(), masters, strict=True):
            parameter.data.copy_(master)
        losses.append(loss.item())
    layer.zero_grad()
    assert example["train"](layer, "bf16", 10) == pytest.approx(losses, rel=2.0**-8)


def _error(found: Any, expected: Any) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()
