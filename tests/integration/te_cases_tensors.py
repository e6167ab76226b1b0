"""What comes of NVIDIA's recipes, quantizers, quantized tensors and base classes: cases that run with either side's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from te_public import Side, case

Results = Iterator[tuple[str, Any]]
E4M3 = 2.0**-4
X = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))


def _quantizers(te: Side) -> dict[str, Any]:
    e4m3 = te.DType.kFloat8E4M3
    return {
        "Float8": te.Float8Quantizer(torch.full((1,), 16.0), torch.zeros(1), e4m3),
        "Float8CurrentScaling": te.Float8CurrentScalingQuantizer(e4m3, device=torch.device("cpu")),
        "Float8Block": te.Float8BlockQuantizer(e4m3, rowwise=True, columnwise=True, block_scaling_dim=1),
        "Float8Block 2D": te.Float8BlockQuantizer(e4m3, rowwise=True, columnwise=True, block_scaling_dim=2),
        "MXFP8": te.MXFP8Quantizer(e4m3),
        "NVFP4": te.NVFP4Quantizer(),
        "Identity": te.IdentityQuantizer(),
        "Hybrid": te.HybridQuantizer(rowwise_quantizer=te.MXFP8Quantizer(e4m3), columnwise_quantizer=te.NVFP4Quantizer()),
    }


_BYTES = ("_data", "_rowwise_data", "_columnwise_data", "_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv", "_transpose")


@case(
    "Float8Quantizer",
    "Float8CurrentScalingQuantizer",
    "Float8BlockQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "IdentityQuantizer",
    "HybridQuantizer",
    "Quantizer",
    "Float8Tensor",
    "Float8BlockwiseQTensor",
    "MXFP8Tensor",
    "NVFP4Tensor",
    "IdentityTensor",
    "HybridQuantizedTensor",
    "QuantizedTensor",
    "QuantizedTensorStorage",
)
def tensors(te: Side) -> Results:
    classes = {
        "Float8": te.Float8Tensor,
        "Float8CurrentScaling": te.Float8Tensor,
        "Float8Block": te.Float8BlockwiseQTensor,
        "Float8Block 2D": te.Float8BlockwiseQTensor,
        "MXFP8": te.MXFP8Tensor,
        "NVFP4": te.NVFP4Tensor,
        "Identity": te.IdentityTensor,
        "Hybrid": te.HybridQuantizedTensor,
    }
    for name, quantizer in _quantizers(te).items():
        q = quantizer(X.to(torch.bfloat16))
        bases = classes[name], te.QuantizedTensor, te.QuantizedTensorStorage
        yield f"{name} classes", [isinstance(q, base) for base in bases] + [isinstance(quantizer, te.Quantizer)]
        yield f"{name} shape", (tuple(q.shape), q.dtype, q.requires_grad, quantizer.rowwise_usage, quantizer.columnwise_usage)
        yield f"{name} values", q.dequantize(dtype=torch.float32)
        yield from ((f"{name}{part}", value) for part in _BYTES if isinstance(value := getattr(q, part, None), torch.Tensor))
        yield f"{name} doubled", (q * 2).to(torch.float32)
        yield f"{name} row", q[:32].to(torch.bfloat16) if name not in ("Hybrid", "NVFP4") else None
        yield f"{name} detached", isinstance(q.detach(), classes[name])
        yield f"{name} view", tuple(q.view(2, 64, 128).shape) if name not in ("Hybrid", "Float8Block 2D", "Float8Block") else None
        again = quantizer.make_empty((128, 128), dtype=torch.bfloat16, device=torch.device("cpu"))
        quantizer.update_quantized(X.to(torch.bfloat16), again)
        yield f"{name} written", again.dequantize(dtype=torch.float32)
        copied = quantizer.copy()
        copied.set_usage(rowwise=True, columnwise=False)
        yield f"{name} usage", (copied.columnwise_usage, quantizer.columnwise_usage)
        if name not in ("Identity", "Hybrid"):  # the package's have no gradient
            leaf = X.to(torch.bfloat16).requires_grad_()
            quantizer(leaf).dequantize().float().square().sum().backward()
            yield f"{name} gradient", leaf.grad


@case(
    "Float8TensorStorage",
    "Float8BlockwiseQTensorStorage",
    "MXFP8TensorStorage",
    "NVFP4TensorStorage",
    "IdentityTensorStorage",
    "HybridQuantizedTensorStorage",
    "prepare_for_saving",
    "restore_from_saved",
    "restore_from_func_ctx",
)
def storages(te: Side) -> Results:
    made = {
        "Float8": te.Float8TensorStorage,
        "Float8Block": te.Float8BlockwiseQTensorStorage,
        "MXFP8": te.MXFP8TensorStorage,
        "NVFP4": te.NVFP4TensorStorage,
        "Identity": te.IdentityTensorStorage,
        "Hybrid": te.HybridQuantizedTensorStorage,
    }
    for name, quantizer in _quantizers(te).items():
        quantizer.internal = True
        q = quantizer(X.to(torch.bfloat16))
        kind = name.partition(" ")[0].removesuffix("CurrentScaling")
        yield f"{name} class", isinstance(q, made[kind])
        values = q.dequantize(dtype=torch.float32)
        plain = torch.ones(3)
        saved, objects = te.prepare_for_saving(q, plain, None)
        yield f"{name} saved", sum(tensor is not None for tensor in saved)
        restored = te.restore_from_saved(objects, saved)
        yield f"{name} values", values
        yield f"{name} restored", restored[0].dequantize(dtype=torch.float32)
        yield f"{name} others", restored[1] is plain and restored[2] is None

        class Context:
            """What an autograd function leaves for its backward."""

        ctx: Any = Context()
        saved, ctx.tensor_objects = te.prepare_for_saving(restored[0], plain)
        ctx.saved_tensors = saved
        found = te.restore_from_func_ctx(ctx)
        yield f"{name} from a context", found[0].dequantize(dtype=torch.float32)


@case("tensor.GroupedTensor", "tensor.GroupedTensorStorage")
def groups(te: Side) -> Results:
    quantizer = te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    options = {"num_tensors": 2, "shapes": [(64, 64), (64, 64)], "quantizer": quantizer, "device": torch.device("cpu"), "dtype": torch.bfloat16}
    for kind in (te.tensor.GroupedTensor, te.tensor.GroupedTensorStorage):
        made = kind.make_grouped_tensor_with_shapes(**options)
        yield kind.__name__, isinstance(made, te.tensor.GroupedTensorStorage)
        yield f"{kind.__name__} parts", len(made.split_into_quantized_tensors())


@case(
    "recipe.CustomRecipe",
    "recipe.DelayedScaling",
    "recipe.Float8BlockScaling",
    "recipe.Float8CurrentScaling",
    "recipe.Format",
    "recipe.MMParams",
    "recipe.MXFP8BlockScaling",
    "recipe.NVFP4BlockScaling",
    "recipe.QParams",
    "recipe.Recipe",
    "get_default_recipe",
)
def recipes(te: Side) -> Results:
    asked = ("delayed", "float8_block_scaling", "float8_current_scaling", "mxfp8", "nvfp4", "custom")
    names = ("DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")
    for kind in [getattr(te.recipe, name) for name in names]:
        recipe = kind()
        yield kind.__name__, {name: getattr(recipe, name)() for name in asked}
        yield f"{kind.__name__} format", (recipe.fp8_format.name, isinstance(recipe, te.recipe.Recipe))
        yield f"{kind.__name__} attention", (recipe.fp8_dpa, recipe.fp8_mha)
        yield f"{kind.__name__} fields", sorted(field.name for field in dataclasses.fields(recipe) if field.name in ("margin", "amax_history_len"))
    yield "custom", te.recipe.CustomRecipe(qfactory=lambda role: None).custom()
    yield "options", te.recipe.DelayedScaling(margin=1, amax_history_len=8, amax_compute_algo="most_recent").amax_history_len
    yield "formats", {name: (f.value.max_fwd, f.value.max_bwd) for name, f in te.recipe.Format.__members__.items()}
    for kind in (te.recipe.QParams, te.recipe.MMParams):
        yield kind.__name__, {field.name: getattr(kind(), field.name) for field in dataclasses.fields(kind)}
    yield "default", type(te.get_default_recipe()).__name__


@case("QuantizerRole", "QuantizerRequest", "DelayedScalingRequest")
def roles(te: Side) -> Results:
    role = te.QuantizerRole(module_type="linear", tensor_type="weight", name="x")
    yield "role", (role.module_type, role.tensor_type, role.name, role == te.QuantizerRole("linear", "weight", "x"), hash(role) is not None)
    yield "request", isinstance(te.DelayedScalingRequest(), te.QuantizerRequest)
    yield "fields", {field.name: str(getattr(te.DelayedScalingRequest(), field.name)) for field in dataclasses.fields(te.DelayedScalingRequest)}


@case("is_fp8_available", "is_mxfp8_available", "is_fp8_block_scaling_available", "is_nvfp4_available")
def support(te: Side) -> Results:
    for name in ("is_fp8_available", "is_mxfp8_available", "is_fp8_block_scaling_available", "is_nvfp4_available"):
        yield name, (getattr(te, name)(), getattr(te, name)(return_reason=True)[0])


@case("autocast", "fp8_autocast", "quantized_model_init", "fp8_model_init", "checkpoint", "Linear", bound=2.0**-3)
def contexts(te: Side) -> Results:
    for name, opened in {
        "autocast": lambda: te.autocast(enabled=True, recipe=te.recipe.MXFP8BlockScaling()),
        "fp8_autocast": lambda: te.fp8_autocast(enabled=True, fp8_recipe=te.recipe.MXFP8BlockScaling()),
        "off": lambda: te.autocast(enabled=False),
    }.items():
        for init in ("quantized_model_init", "fp8_model_init"):
            torch.manual_seed(3)
            with getattr(te, init)(enabled=name != "off", recipe=te.recipe.MXFP8BlockScaling()):
                module = te.Linear(128, 128)
            yield f"{name} {init} held", type(module.weight).__name__
            for checkpointed in (False, True):
                x = X.clone().requires_grad_()
                with opened():
                    y = te.checkpoint(module, x, use_reentrant=False) if checkpointed else module(x)
                y.sum().backward()
                yield f"{name} {init} {checkpointed}", y.detach()
                yield f"{name} {init} {checkpointed} gradient", x.grad
