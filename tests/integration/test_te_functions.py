"""The rest of what users call in NVIDIA's Python package, through ``fusible.tex``: optimizers, MoE, router, losses, RoPE, caches, FP8 parameters."""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from te_client import package, recipe_for, relative_error

from fusible import compat, tex

BF16 = torch.bfloat16
HIDDEN = 64
EPS32 = 2.0**-23


@pytest.fixture
def te() -> Iterator[Any]:
    with package() as te:
        torch.manual_seed(0)
        yield te


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=grad)


OPTIMIZERS = {
    "Adam": ("FusedAdam", {"lr": 0.01, "weight_decay": 0.1}, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "capturable Adam": (
        "FusedAdam",
        {"lr": 0.01, "weight_decay": 0.1, "capturable": True},
        torch.optim.AdamW,
        {"lr": 0.01, "weight_decay": 0.1},
    ),
    "SGD": ("FusedSGD", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_that_of_torch(te: Any, name: str) -> None:
    fused, options, plain, plain_options = OPTIMIZERS[name]
    found, expected = (torch.nn.Parameter(torch.linspace(-1, 1, 12, device="cuda").view(3, 4)) for _ in range(2))
    optimizers = getattr(te.optimizers, fused)([found], **options), plain([expected], **plain_options)
    for _ in range(3):
        found.grad, expected.grad = found.detach() ** 2 + 0.1, expected.detach() ** 2 + 0.1
        for optimizer in optimizers:
            optimizer.step()
    assert not torch.equal(found.detach(), torch.linspace(-1, 1, 12).view(3, 4))
    torch.testing.assert_close(found, expected, rtol=64 * EPS32, atol=64 * EPS32)  # some twenty roundings a step
    state = optimizers[0].state_dict()
    optimizers[0].load_state_dict(state)


def test_master_weights_keep_what_bf16_loses(te: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4, device="cuda", dtype=BF16))
    optimizer = te.optimizers.FusedAdam([p], lr=2.0**-10, master_weights=True)  # a step is a quarter of bf16's unit at 1
    for _ in range(8):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert torch.equal(p.detach().float(), torch.full((4,), 1 - 2.0**-7))


def test_the_norm_of_gradients(te: Any) -> None:
    tensors = [torch.full((4,), 3.0, device="cuda"), torch.full((4,), 4.0, device="cuda")]
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    norm, per_tensor = te.optimizers.multi_tensor_applier(te.optimizers.multi_tensor_l2norm, flag, [tensors], True)
    assert norm.tolist() == [10.0] and per_tensor.tolist() == [6.0, 8.0]


def test_permutation_by_a_mask(te: Any) -> None:
    x, probs = randn(8, HIDDEN, grad=True), randn(8, 4, grad=True)
    routing = torch.zeros(8, 4, dtype=torch.int32, device="cuda")
    routing[:, 1] = 1
    routing[::2, 3] = 1
    permuted, rows = te.moe_permute(x, routing, num_out_tokens=12, map_type="mask")
    assert torch.equal(permuted, torch.cat([x, x[::2]]))
    merged = te.moe_unpermute(permuted, rows, merging_probs=probs, restore_shape=x.shape, map_type="mask")
    weight = (probs * routing).sum(1, keepdim=True)
    torch.testing.assert_close(merged, x * weight, rtol=4 * EPS32, atol=4 * EPS32 * 8)
    merged.sum().backward()
    assert x.grad is not None and probs.grad is not None
    torch.testing.assert_close(x.grad, weight.detach().expand_as(x), rtol=4 * EPS32, atol=4 * EPS32 * 8)
    torch.testing.assert_close(probs.grad, x.detach().sum(1, keepdim=True) * routing, rtol=0, atol=HIDDEN * EPS32 * 4)


def test_permutation_by_indices(te: Any) -> None:
    x, probs = randn(6, HIDDEN, dtype=BF16, grad=True), torch.rand(6, 2, device="cuda", requires_grad=True)
    experts = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0], [2, 1]], dtype=torch.int32, device="cuda")
    permuted, rows = te.moe_permute(x, experts, num_out_tokens=12, map_type="index")
    order = experts.flatten().argsort(stable=True)
    assert torch.equal(permuted, x[order // 2])
    merged = te.moe_unpermute(permuted, rows, probs, map_type="index")
    assert relative_error(merged, x * probs.sum(1, keepdim=True)) <= 4 * 2.0**-9  # two products and their sum in bf16
    merged.float().sum().backward()
    assert x.grad is not None and probs.grad is not None
    assert relative_error(probs.grad, x.detach().double().sum(1, keepdim=True).expand(6, 2)) <= 2.0**-8


def test_the_router_chooses_and_is_differentiated(te: Any) -> None:
    router = importlib.import_module("transformer_engine.pytorch.router")
    logits, plain = (randn(8, 4, grad=True) for _ in range(2))
    plain.data.copy_(logits.data)
    probs, chosen = router.fused_topk_with_score_function(logits, 2, False, None, None, None, "softmax", None)
    top = plain.topk(2, dim=1)
    expected = torch.zeros(8, 4, device="cuda").scatter(1, top.indices, top.values.softmax(1))
    assert torch.equal(chosen.bool(), expected > 0)
    torch.testing.assert_close(probs, expected, rtol=16 * EPS32, atol=EPS32)
    weights = randn(8, 4)
    (probs * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(logits.grad, plain.grad, rtol=64 * EPS32, atol=16 * EPS32)


def test_the_auxiliary_loss_of_the_router(te: Any) -> None:
    router = importlib.import_module("transformer_engine.pytorch.router")
    logits = randn(8, 4, grad=True)
    _, scores = router.fused_compute_score_for_moe_aux_loss(logits, 2, "softmax")
    tokens = torch.tensor([4, 4, 4, 4], dtype=torch.int32, device="cuda")
    loss = router.fused_moe_aux_loss(scores, tokens, 8, 4, 2, 0.1)
    torch.testing.assert_close(loss, torch.tensor(4 * 0.1 / 2 / 64 * 8 * 4.0), rtol=32 * EPS32, atol=0.0)  # each row of scores sums to one
    loss.backward()
    assert logits.grad is not None and logits.grad.abs().max() < 1e-6  # balanced: no logit lowers it


def test_cross_entropy(te: Any) -> None:
    logits, plain = (randn(4, 2, 50, grad=True) for _ in range(2))
    plain.data.copy_(logits.data)
    target = torch.randint(0, 50, (4, 2), device="cuda")
    loss = te.parallel_cross_entropy(logits, target)
    expected = torch.nn.functional.cross_entropy(plain.view(-1, 50), target.view(-1), reduction="none")
    torch.testing.assert_close(loss.flatten(), expected, rtol=50 * EPS32, atol=50 * EPS32)
    loss.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(logits.grad, plain.grad, rtol=50 * EPS32, atol=50 * EPS32)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_rotary_embeddings(te: Any, layout: str) -> None:
    rope = importlib.import_module("transformer_engine.pytorch.attention.rope")
    angles = te.RotaryPositionEmbedding(16)(8)
    fused, plain = (randn(8, 8, 4, 16, grad=True) for _ in range(2))
    plain.data.copy_(fused.data)
    ys = [rope.apply_rotary_pos_emb(x, angles, tensor_format=layout, fused=x is fused) for x in (fused, plain)]
    torch.testing.assert_close(*ys, rtol=8 * EPS32, atol=16 * EPS32)
    weights = randn(8, 8, 4, 16)
    for y in ys:
        (y * weights).sum().backward()
    torch.testing.assert_close(fused.grad, plain.grad, rtol=8 * EPS32, atol=16 * EPS32)


@pytest.mark.parametrize("recipe_name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_parameters_held_in_the_format_are_trained(te: Any, recipe_name: str) -> None:
    recipe = recipe_for(te, recipe_name)
    with te.quantized_model_init(enabled=True, recipe=recipe):
        layer = te.Linear(128, 128, params_dtype=BF16)
    assert isinstance(layer.weight, te.QuantizedTensor)
    optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=0.05, master_weights=True)
    x, target = randn(128, 128, dtype=BF16), randn(128, 128, dtype=BF16)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with te.autocast(recipe=recipe):
            y = layer(x)
        loss = torch.nn.functional.mse_loss(y.float(), target.float())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0] and isinstance(layer.weight, te.QuantizedTensor)
    state = layer.state_dict()
    assert relative_error(state["weight"].dequantize(), layer.weight.dequantize()) == 0


QUANTIZERS = {
    "current": ("Float8CurrentScalingQuantizer", "Float8Tensor", {"device": "cuda"}),
    "block": ("Float8BlockQuantizer", "Float8BlockwiseQTensor", {}),
    "mxfp8": ("MXFP8Quantizer", "MXFP8Tensor", {}),
    "nvfp4": ("NVFP4Quantizer", "NVFP4Tensor", {}),
}


@pytest.mark.parametrize("recipe_name", QUANTIZERS)
def test_a_quantizer_makes_the_packages_own_tensors(te: Any, recipe_name: str) -> None:
    recipe_for(te, recipe_name)
    name, tensor, options = QUANTIZERS[recipe_name]
    quantizer = getattr(te, name)(te.DType.kFloat4E2M1 if recipe_name == "nvfp4" else te.DType.kFloat8E4M3, rowwise=True, columnwise=True, **options)
    x = randn(128, 128, dtype=BF16)
    made, empty = quantizer(x), quantizer.make_empty((128, 128), dtype=BF16, device="cuda")
    quantizer.internal = True
    bare = quantizer(x)
    for found in (made, empty):
        assert type(found) is getattr(te, tensor) and found.dtype is BF16 and found.shape == (128, 128) and found.device == x.device
    assert type(bare) is getattr(te, f"{tensor}Storage")
    assert 0 < relative_error(made.dequantize(), x) <= (2.0**-4 + 2.0**-2 if recipe_name == "nvfp4" else 2.0**-4)  # E4M3, and E2M1 beside it
    assert torch.equal(bare.dequantize(dtype=BF16), made.dequantize())
    empty.copy_(x)
    assert torch.equal(empty.dequantize(), made.dequantize())


CUSTOM = {
    "one quantizer for all": lambda te: lambda role: te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cuda"),
    "no quantization": lambda te: lambda role: te.IdentityQuantizer(),
    "another way for columns": lambda te: (
        lambda role: te.HybridQuantizer(
            rowwise_quantizer=te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cuda"),
            columnwise_quantizer=te.Float8CurrentScalingQuantizer(te.DType.kFloat8E5M2, device="cuda"),
        )
    ),
}


@pytest.mark.parametrize("name", CUSTOM)
def test_a_custom_recipe(te: Any, name: str) -> None:
    recipes = importlib.import_module("transformer_engine.common.recipe")
    layer, x = te.Linear(128, 128, params_dtype=BF16), randn(128, 128, dtype=BF16, grad=True)
    with te.autocast(recipe=recipes.CustomRecipe(qfactory=CUSTOM[name](te))):
        y = layer(x)
    y.sum().backward()
    error = relative_error(y, layer(x))
    assert x.grad is not None and layer.weight.grad is not None
    assert error == 0 if name == "no quantization" else 0 < error <= 2.0**-4 * 2**0.5  # two operands in E4M3


@pytest.mark.parametrize("recipe_name", ["bf16", "delayed", "current", "mxfp8"])
def test_weights_are_quantized_once_for_several_batches(te: Any, recipe_name: str) -> None:
    recipe = recipe_for(te, recipe_name)
    layer, x = te.Linear(128, 128, params_dtype=BF16), randn(128, 128, dtype=BF16)
    ys = []
    for first in (True, False):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            ys.append(layer(x, is_first_microbatch=first))
        ys[-1].sum().backward()
    if recipe_name != "delayed":  # whose activations are scaled anew
        assert torch.equal(*ys)


def test_gradients_are_accumulated_into_main_grad(te: Any) -> None:
    layer, x = te.Linear(128, 64, params_dtype=BF16, fuse_wgrad_accumulation=True), randn(32, 128, dtype=BF16)
    layer.weight.main_grad = torch.ones(64, 128, device="cuda")
    layer(x).sum().backward()
    expected = 1 + x.float().sum(0).expand(64, 128)  # a gradient of ones: sums of bf16 numbers in fp32
    torch.testing.assert_close(layer.weight.main_grad, expected, rtol=0, atol=32 * 8 * EPS32)


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_attention_is_that_of_torch(te: Any, layout: str) -> None:
    lengths = [10, 14] if layout == "thd" else [12, 12]
    shape = {"sbhd": (12, 2, 4, 32), "bshd": (2, 12, 4, 32), "thd": (24, 4, 32)}[layout]
    attention = te.DotProductAttention(4, 32, qkv_format=layout, attn_mask_type="padding_causal" if layout == "thd" else "causal")
    q, k, v = (randn(*shape, dtype=BF16) for _ in range(3))
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    ends = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 14, "max_seqlen_kv": 14} if layout == "thd" else {}
    y = attention(q, k, v, **ends).view(shape)
    sequences = [t.transpose(0, 1).flatten(0, 1) if layout == "sbhd" else t.view(24, 4, 32) for t in (q, k, v, y)]
    for q1, k1, v1, y1 in zip(*(t.split(lengths) for t in sequences), strict=True):
        q1, k1, v1 = (t.transpose(0, 1).double() for t in (q1, k1, v1))
        expected = torch.nn.functional.scaled_dot_product_attention(q1, k1, v1, is_causal=True).transpose(0, 1)
        assert relative_error(y1, expected) <= 3 * 2.0**-9  # bf16: the probabilities, the values' product, the result


OPS = (
    "GEGLU GELU GLU Identity L2Normalization LayerNorm Quantize QGEGLU QGELU RMSNorm ReGLU ReLU SReGLU SReLU SiLU SwiGLU ClampedSwiGLU Dropout "
    "ConstantScale Bias Reshape"
).split()
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "LayerNorm": (HIDDEN,), "RMSNorm": (HIDDEN,), "Dropout": (0.5,), "ConstantScale": (2.0,), "Bias": (HIDDEN,), "Reshape": ((-1, 2, HIDDEN),)
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_an_operation_runs_forward_and_backward(te: Any, name: str) -> None:
    if not hasattr(te.ops, name):
        pytest.skip(f"the package exports no {name}")
    operation = getattr(te.ops, name)(*_ARGUMENTS.get(name, ()))
    for enabled in (False, True):
        x = randn(32, HIDDEN, grad=True)
        with te.autocast(enabled=enabled, recipe=recipe_for(te, "current")):
            y = operation(x)
        y.sum().backward()
        assert y.isfinite().all() and x.grad is not None and x.grad.shape == x.shape


def test_recomputed_activations_repeat_their_dropout(te: Any) -> None:
    torch.manual_seed(3)
    layer = te.TransformerLayer(HIDDEN, 2 * HIDDEN, 4, hidden_dropout=0.5, attention_dropout=0.0, params_dtype=BF16)
    grads = []
    for run in (lambda x: layer(x), lambda x: te.checkpoint(layer, x)):
        torch.cuda.manual_seed(7)
        x = torch.linspace(-1, 1, 8 * 2 * HIDDEN, device="cuda").to(BF16).view(8, 2, HIDDEN).requires_grad_()
        run(x).float().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
def test_generation_with_a_cache_is_the_whole_sequence(te: Any) -> None:
    layer = te.TransformerLayer(
        HIDDEN, 2 * HIDDEN, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16, layer_number=1,
        self_attn_mask_type="padding_causal", attn_input_format="bshd",
    ).eval()  # fmt: skip
    x = randn(2, 6, HIDDEN, dtype=BF16)
    cache = te.InferenceParams(max_batch_size=2, max_sequence_length=16, num_heads_kv=4, head_dim_k=HIDDEN // 4, dtype=BF16)
    with torch.no_grad():
        whole = layer(x, self_attn_mask_type="causal")
        cache.pre_step(OrderedDict({0: 5, 1: 5}))
        first = layer(x[:, :5].contiguous(), inference_params=cache)
        cache.pre_step(OrderedDict({0: 1, 1: 1}))
        last = layer(x[:, 5:].contiguous(), inference_params=cache)
    assert relative_error(first, whole[:, :5]) <= 2.0**-7 and relative_error(last, whole[:, 5:]) <= 2.0**-7  # bf16, in another order


def test_rows_are_padded_and_unpadded(te: Any) -> None:
    x = randn(20, HIDDEN, grad=True)
    padded, splits = te.Fp8Padding(2, 16)(x, [12, 8])
    assert splits == [16, 16] and torch.equal(padded[:12], x[:12]) and torch.equal(padded[16:24], x[12:]) and not padded[24:].any()
    back = te.Fp8Unpadding(2, 16)(padded, [12, 8])
    assert torch.equal(back, x)
    back.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones_like(x))


def test_the_names_may_be_installed_as_often_as_one_likes(te: Any) -> None:
    """What is done around a module that is there already is done once."""
    for _ in range(2 * sys.getrecursionlimit()):
        compat.uninstall()
        compat.install()
    assert type(te.get_default_recipe()).__name__ == "DelayedScaling"


def test_the_package_says_what_tex_serves(te: Any) -> None:
    assert te.get_device_compute_capability() == (9, 0)
    assert te.is_fp8_available() and te.is_bf16_available()
    for name in ("is_mxfp8_available", "is_nvfp4_available", "is_fp8_block_scaling_available"):
        available, reason = getattr(te, name)(return_reason=True)
        assert available or "not served" in reason


def test_autocast_of_torch_reaches_its_modules(te: Any) -> None:
    with torch.autocast("cuda", dtype=BF16):
        assert te.Linear(HIDDEN, HIDDEN)(randn(16, HIDDEN)).dtype is BF16


def test_the_types_of_both_are_equal(te: Any) -> None:
    module = importlib.import_module("transformer_engine.pytorch.constants")
    assert module.DType.kFloat8E4M3 == tex.DType.kFloat8E4M3 and te.DType.cast(tex.DType.kBFloat16) is te.DType.kBFloat16
