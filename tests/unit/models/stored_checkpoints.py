"""Checkpoints of every scheme, made by formulas in numpy and ``ml_dtypes``, and written by safetensors: what reader and writer are held to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

__all__ = ["CASES", "Case", "stored_in", "write"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """A checkpoint: its ``quantization_config``, the tensors that are stored, and the float64 values of the quantized weights. ``scales``: the names
    of static scales of activations."""

    quantization_config: dict[str, Any] | None
    stored: dict[str, torch.Tensor]
    values: dict[str, Array]
    scales: tuple[str, ...] = ()
    files: dict[str, Any] = field(default_factory=dict)


def write(case: Case, folder: Path, shards: int = 1) -> Path:
    """The directory of a case, in one file or several with an index."""
    folder.mkdir(parents=True)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    if case.quantization_config is not None:
        config["quantization_config"] = case.quantization_config
    for name, content in {"config.json": config, **case.files}.items():
        (folder / name).write_text(json.dumps(content))
    if shards == 1:
        save_file(case.stored, folder / "model.safetensors", {"format": "pt"})
        return folder
    names, placed = list(case.stored), {}
    for place in range(shards):
        file = f"model-{place + 1:05d}-of-{shards:05d}.safetensors"
        part = names[place::shards]
        save_file({name: case.stored[name] for name in part}, folder / file, {"format": "pt"})
        placed |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in case.stored.values())}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def stored_in(folder: Path) -> dict[str, torch.Tensor]:
    """The stored tensors of a directory, read by safetensors."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}
    return found


def _random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _torch(x: Array, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of the bytes of an array whose type torch does not take from numpy."""
    if dtype is None:
        return torch.from_numpy(np.array(x))
    return torch.from_numpy(np.array(x).view(np.uint8 if dtype.itemsize == 1 else np.int16)).view(dtype)


def _plain(seed: int = 7) -> dict[str, torch.Tensor]:
    rng = _random(seed)
    return {
        "model.embed_tokens.weight": torch.from_numpy(rng.standard_normal((10, 256)).astype(np.float32)).to(torch.bfloat16),
        "model.norm.weight": torch.from_numpy(rng.standard_normal(257).astype(np.float32)),  # of odd size, behind which nothing else is aligned
        "model.norm.bias": torch.from_numpy(rng.standard_normal(3).astype(np.float32)).to(torch.bfloat16),
        "lm_head.weight": torch.from_numpy(rng.standard_normal((10, 256)).astype(np.float16)),
    }


def _fp8(rng: np.random.Generator, shape: tuple[int, ...], kind: Any = ml_dtypes.float8_e4m3fn) -> Array:
    """Every finite number of the type, and zeros."""
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-7, 8, shape))).clip(-400, 400).astype(kind)


def _scales(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return (rng.random(shape) * np.exp2(rng.integers(-20, 0, shape)) + 1e-9).astype(np.float32)


def _e8m0(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Bytes of exponents, the least among them."""
    byte = rng.integers(100, 140, shape).astype(np.uint8)
    byte.flat[0] = 0
    return byte


def _of_bytes(byte: Array) -> Array:
    return byte.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)


def _grown(scales: Array, rows: int, columns: int, shape: tuple[int, ...]) -> Array:
    """Scales of blocks, one for each element."""
    return scales.repeat(rows, -2).repeat(columns, -1)[..., : shape[-2], : shape[-1]]


Stored = tuple[dict[str, torch.Tensor], Array]
"""The tensors of a weight ``w``, and its values."""


def _tiles(suffix: str, shape: tuple[int, ...], scale: str, kind: Any = ml_dtypes.float8_e4m3fn) -> Stored:
    rng = _random(shape[0] + len(scale))
    elements, grid = _fp8(rng, shape, kind), (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    data = {"w": _torch(elements, torch.float8_e4m3fn if kind is ml_dtypes.float8_e4m3fn else torch.float8_e5m2)}
    if scale == "e8m0":
        byte = _e8m0(rng, grid)
        stored, values = _torch(byte, torch.float8_e8m0fnu), _of_bytes(byte)
    elif scale == "powers":
        values = np.exp2(rng.integers(-20, 5, grid)).astype(np.float32)
        stored = _torch(values)
    elif scale == "bf16":
        values = _scales(rng, grid).astype(ml_dtypes.bfloat16)
        stored = _torch(values, torch.bfloat16)
    else:
        values = _scales(rng, grid)
        stored = _torch(values)
    return {**data, f"w{suffix}": stored}, elements.astype(np.float64) * _grown(values.astype(np.float64), 128, 128, shape)


def _one_scale(suffix: str, shape: tuple[int, ...], scale_shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Stored:
    rng = _random(len(scale_shape) + shape[1])
    elements, scale = _fp8(rng, shape), _torch(_scales(rng, scale_shape)).to(dtype)
    values = scale.to(torch.float64).numpy()
    grown = values.reshape(-1, 1) if scale.numel() > 1 else values.reshape(())
    return {"w": _torch(elements, torch.float8_e4m3fn), f"w{suffix}": scale}, elements.astype(np.float64) * grown


def _mxfp8(suffix: str, shape: tuple[int, ...], dtype: torch.dtype) -> Stored:
    rng = _random(shape[0])
    elements, byte = _fp8(rng, shape), _e8m0(rng, (*shape[:-1], shape[-1] // 32))
    values = elements.astype(np.float64) * _of_bytes(byte).repeat(32, -1)
    return {"w": _torch(elements, torch.float8_e4m3fn), f"w{suffix}": _torch(byte).view(dtype)}, values


def _e2m1(packed: Array) -> Array:
    codes = np.stack([packed & 0xF, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    return codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def _nvfp4(names: tuple[str, str, str], shape: tuple[int, int], amax: float, inverse: bool) -> Stored:
    rng = _random(shape[0])
    packed = rng.integers(0, 256, (shape[0], shape[1] // 2)).astype(np.uint8)
    scale = (rng.random((shape[0], shape[1] // 16)) * 440 + 1).astype(ml_dtypes.float8_e4m3fn)
    bf16 = np.float32(np.asarray(amax, np.float32).astype(ml_dtypes.bfloat16))
    whole = np.float32(2688) / bf16 if inverse else bf16 / np.float32(2688)
    factor = 1 / np.float64(whole) if inverse else np.float64(whole)
    elements, scales, tensor_scale = names
    parts = {f"w{elements}": _torch(packed), f"w{scales}": _torch(scale, torch.float8_e4m3fn)}
    parts[f"w{tensor_scale}"] = torch.tensor([float(whole)] if inverse else float(whole), dtype=torch.float32)
    return parts, _e2m1(packed) * scale.astype(np.float64).repeat(16, -1) * factor


def _mxfp4(names: tuple[str, str], shape: tuple[int, ...], grouped: bool) -> Stored:
    rng = _random(shape[-1])
    packed = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2)).astype(np.uint8)
    byte = _e8m0(rng, (*shape[:-1], shape[-1] // 32))
    values = _e2m1(packed) * _of_bytes(byte).repeat(32, -1)
    return {f"w{names[0]}": _torch(packed.reshape(*byte.shape, 16) if grouped else packed), f"w{names[1]}": _torch(byte)}, values


def _case(config: dict[str, Any] | None, weights: Mapping[str, Stored], scales: tuple[str, ...] = (), files: dict[str, Any] | None = None) -> Case:
    """A case of several weights, whose names take the place of the ``w`` of their tensors."""
    stored = _plain()
    for name, (parts, _) in weights.items():
        stored |= {f"{name}{part.removeprefix('w')}": tensor for part, tensor in parts.items()}
    rng = _random(11)
    stored |= {name: torch.tensor(float(rng.random()), dtype=torch.float32) for name in scales}
    return Case(config, stored, {name: values for name, (_, values) in weights.items()}, scales, files or {})


_Q, _K, _V, _O = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo")
_EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
_STATIC = ("model.layers.0.self_attn.q_proj.input_scale", "model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.v_proj.v_scale")


def _fine(**options: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"], **options}


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "float", "symmetric": True, "dynamic": False, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def _modelopt(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "producer": {"name": "modelopt", "version": "0.29"}, "ignore": ["lm_head"]}


def _fine_cases() -> dict[str, Callable[[], Case]]:
    inv, kind = "_scale_inv", ml_dtypes.float8_e5m2
    square, ragged = (256, 384), (200, 136)
    return {
        "plain": lambda: _case(None, {}),
        "deepseek": lambda: _case(_fine(), {_Q: _tiles(inv, square, "fp32"), _K: _tiles(inv, ragged, "fp32"), _V: _tiles(inv, square, "fp32", kind)}),
        "deepseek, bf16 scales": lambda: _case(_fine(), {_Q: _tiles(inv, square, "bf16")}),
        "deepseek, e8m0": lambda: _case(_fine(scale_fmt="ue8m0"), {_Q: _tiles(inv, square, "e8m0"), _K: _tiles(inv, ragged, "e8m0")}),
        "deepseek, e8m0 as fp32": lambda: _case(_fine(scale_fmt="ue8m0"), {_Q: _tiles(inv, square, "powers")}),
        "deepseek, experts": lambda: _case(_fine(), {_EXPERTS: _tiles(inv, (3, 256, 384), "fp32")}),
        "fine-grained, 1x32": lambda: _case(
            _fine(scale_fmt="ue8m0", weight_block_size=[1, 32]),
            {_Q: _mxfp8(inv, (64, 96), torch.float8_e8m0fnu), _K: _mxfp8(inv, (32, 32), torch.uint8)},
        ),
        "fine-grained, tensor": lambda: _case(_fine(weight_block_size=None), {_Q: _one_scale(inv, (48, 80), ())}),
        "static fp8": lambda: _case(
            {"quant_method": "fp8", "activation_scheme": "static"}, {_Q: _one_scale("_scale", (48, 80), (1,))}, _STATIC[:1]
        ),
    }  # fmt: skip


def _compressed_cases() -> dict[str, Callable[[], Case]]:
    packed = ("_packed", "_scale", "_global_scale")
    fp8, nv, mx = "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"
    return {
        "compressed, tensor": lambda: _case(_compressed(fp8, num_bits=8, strategy="tensor"), {_Q: _one_scale("_scale", (48, 80), (1,))}, _STATIC),
        "compressed, tensor, bf16": lambda: _case(
            _compressed(fp8, num_bits=8, strategy="tensor"), {_Q: _one_scale("_scale", (48, 80), (1, 1), torch.bfloat16)}
        ),
        "compressed, channel": lambda: _case(_compressed(fp8, num_bits=8, strategy="channel"), {_Q: _one_scale("_scale", (50, 300), (50, 1))}),
        "compressed, channel, bf16": lambda: _case(
            _compressed(fp8, num_bits=8, strategy="channel"), {_Q: _one_scale("_scale", (64, 300), (64,), torch.bfloat16)}
        ),
        "compressed, block": lambda: _case(_compressed(fp8, num_bits=8, strategy="block"), {_Q: _tiles("_scale", (256, 384), "fp32")}),
        "compressed, mxfp8": lambda: _case(_compressed("mxfp8-quantized", num_bits=8), {_Q: _mxfp8("_scale", (64, 96), torch.uint8)}),
        "compressed, nvfp4": lambda: _case(_compressed(nv, num_bits=4), {_Q: _nvfp4(packed, (64, 96), 3.7, True)}),
        "compressed, mxfp4": lambda: _case(_compressed(mx, num_bits=4), {_Q: _mxfp4(packed[:2], (40, 96), False)}),
        "compressed, mixed": lambda: _case(
            _compressed("mixed-precision"), {_Q: _nvfp4(packed, (64, 96), 0.02, True), _K: _one_scale("_scale", (48, 80), (48, 1))}
        ),
    }  # fmt: skip


def _other_cases() -> dict[str, Callable[[], Case]]:
    stored, scales = ("", "_scale", "_scale_2"), _STATIC
    file = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}
    return {
        "modelopt, fp8": lambda: _case(_modelopt("FP8"), {_Q: _one_scale("_scale", (48, 80), ())}, scales),
        "modelopt, channel": lambda: _case(_modelopt("FP8_PER_CHANNEL_PER_TOKEN"), {_Q: _one_scale("_scale", (48, 80), (48,))}, scales),
        "modelopt, nvfp4": lambda: _case(_modelopt("NVFP4"), {_Q: _nvfp4(stored, (64, 96), 3.7, False)}, scales),
        "modelopt, own file": lambda: _case(None, {_Q: _nvfp4(stored, (64, 96), 0.9, False)}, scales, {"hf_quant_config.json": file}),
        "gpt-oss": lambda: _case({"quant_method": "mxfp4"}, {_EXPERTS: _mxfp4(("_blocks", "_scales"), (3, 40, 64), True)}),
    }


CASES = _fine_cases() | _compressed_cases() | _other_cases()
"""By name what makes a case."""
