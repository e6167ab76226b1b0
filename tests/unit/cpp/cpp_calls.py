"""One small valid call of every native function that takes tensors, with its arguments by name, for tests that vary one of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusible.cpp_extensions as native

__all__ = ["CALLS", "INDICES", "WRITTEN", "declared", "invoke", "run", "tensors", "with_argument"]

E4M3 = torch.float8_e4m3fn
ROWS, COLS = 6, 16

CALLS: dict[str, Callable[[], dict[str, Any]]] = {}
"""The arguments of a call of each function, made anew by each call of the value."""

WRITTEN: dict[str, frozenset[str]] = {}
"""The arguments that a function writes."""

INDICES: dict[str, tuple[str, ...]] = {
    "attention_forward": ("lengths_q", "starts_q", "lengths_kv", "starts_kv"),
    "attention_forward_paged": ("lengths_q", "lengths_kv", "page_table_k", "page_table_v"),
    "attention_forward_padded": ("lengths_q", "lengths_kv"),
    "attention_backward": ("lengths_q", "starts_q", "lengths_kv", "starts_kv"),
    "copy_to_cache": ("table", "new_lengths", "cached_lengths"),
    "copy_to_cache_dense": ("table", "new_lengths", "cached_lengths"),
    "rope": ("start_positions",),
    "rope_packed": ("start_positions", "cu_seqlens"),
}
"""The arguments of each call whose elements say where something lies."""


def declared() -> set[str]:
    """The native functions that take a tensor, by the stub."""
    stub = Path(native.__file__).with_name("_native.pyi").read_text(encoding="utf-8")
    return {name for name, parameters in re.findall(r"^def (\w+)\((.*?)\) ->", stub, flags=re.MULTILINE | re.DOTALL) if "TensorLike" in parameters}


def invoke(name: str, arguments: dict[str, Any]) -> Any:
    """What the function of a call returns."""
    return getattr(native, re.sub("_(paged|padded|packed|dense|of_blocks|of_left_blocks)$", "", name))(**arguments)


def run(name: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Calls the function of a call, and returns what it wrote and returned."""
    result = invoke(name, arguments)
    found = {key: value for key, value in _flat(arguments).items() if key.split("/")[0] in WRITTEN[name]}
    if result is not None:
        found["return"] = torch.tensor(list(_numbers(result)), dtype=torch.float64)
    return found


def _numbers(result: Any) -> Iterator[float]:
    """The numbers of a result, however nested; those of 64 bits in halves that float64 holds."""
    if isinstance(result, (list, tuple)):
        for part in result:
            yield from _numbers(part)
    elif isinstance(result, int):
        yield from (float(result >> 32), float(result & 0xFFFFFFFF))
    else:
        yield result


def tensors(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors among arguments; one of a list by the list's name and its place."""
    return {name: value for name, value in _flat(arguments).items() if isinstance(value, Tensor)}


def with_argument(arguments: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """The arguments with another value at a place that ``tensors`` gave."""
    name, _, number = place.partition("/")
    if not number:
        return {**arguments, name: value}
    return {**arguments, name: [value if i == int(number) else x for i, x in enumerate(arguments[name])]}


def _flat(arguments: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        flat.update({f"{name}/{i}": x for i, x in enumerate(value)} if isinstance(value, list) else {name: value})
    return flat


def _call(*written: str) -> Callable[[Callable[[], dict[str, Any]]], None]:
    def register(make: Callable[[], dict[str, Any]]) -> None:
        CALLS[make.__name__] = make
        WRITTEN[make.__name__] = frozenset(written)

    return register


def _x(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def _codes(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def _i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@_call("dst", "dst_transposed", "amax", "bias_grad")
def quantize() -> dict[str, Any]:
    return {
        "src": _x(ROWS, COLS), "dst": _codes(ROWS, COLS), "scale": torch.tensor([2.0]), "fp8_dtype": E4M3, "dst_transposed": _codes(COLS, ROWS),
        "amax": torch.zeros(1), "bias_grad": torch.zeros(COLS), "noop": torch.zeros(1),
    }  # fmt: skip


@_call("dst")
def dequantize() -> dict[str, Any]:
    src = torch.arange(ROWS * COLS).remainder(120).to(torch.uint8).view(ROWS, COLS)
    return {"src": src, "dst": torch.zeros(ROWS, COLS), "scale_inv": torch.tensor([0.5]), "fp8_dtype": E4M3}


@_call("dst", "exponents", "dst_columns", "exponents_columns")
def quantize_mxfp8() -> dict[str, Any]:
    return {
        "src": _x(32, 64), "fp8_dtype": E4M3, "dst": _codes(32, 64), "exponents": _codes(32, 2), "dst_columns": _codes(32, 64),
        "exponents_columns": _codes(1, 64),
    }  # fmt: skip


@_call("dst")
def dequantize_mxfp8() -> dict[str, Any]:
    src = torch.arange(32 * 64).remainder(120).to(torch.uint8).view(32, 64)
    return {"src": src, "exponents": torch.full((32, 2), 120, dtype=torch.uint8), "along_rows": True, "dst": torch.zeros(32, 64), "fp8_dtype": E4M3}


@_call("dst", "scale_bytes")
def quantize_nvfp4() -> dict[str, Any]:
    return {
        "src": _x(32, 64), "amax": torch.tensor([3.0]), "dst": _codes(64, 16), "scale_bytes": _codes(64, 2), "columns": True,
        "seed": torch.tensor([5]),
    }  # fmt: skip


@_call("dst", "out", "source_amax")
def transform_columns() -> dict[str, Any]:
    dst = torch.zeros(32, 64, dtype=torch.bfloat16)
    return {"src": _x(32, 64), "transform": torch.eye(16), "dst": dst, "out": torch.zeros(1), "source_amax": torch.zeros(1)}


@_call("dst")
def dequantize_nvfp4() -> dict[str, Any]:
    src = torch.arange(32 * 32).remainder(256).to(torch.uint8).view(32, 32)
    return {"src": src, "scale_bytes": torch.full((32, 4), 56, dtype=torch.uint8), "dst": torch.zeros(32, 64)}


@_call("dst", "scale_inv", "dst_columns", "scale_inv_columns")
def quantize_block_fp8() -> dict[str, Any]:
    return {
        "src": _x(ROWS, COLS), "fp8_dtype": E4M3, "dst": _codes(ROWS, COLS), "scale_inv": torch.zeros(1, ROWS), "dst_columns": _codes(COLS, ROWS),
        "scale_inv_columns": torch.zeros(1, COLS), "epsilon": 0.5,
    }  # fmt: skip


@_call("dst")
def dequantize_block_fp8() -> dict[str, Any]:
    src = torch.arange(ROWS * COLS).remainder(120).to(torch.uint8).view(ROWS, COLS)
    return {"src": src, "scale_inv": torch.full((1, ROWS), 0.5), "tiled": False, "dst": torch.zeros(ROWS, COLS), "fp8_dtype": E4M3}


@_call("out")
def amax() -> dict[str, Any]:
    return {"src": _x(ROWS, COLS), "out": torch.zeros(1)}


@_call("dst")
def column_sums() -> dict[str, Any]:
    return {"src": _x(ROWS, COLS), "dst": torch.zeros(COLS)}


@_call("dst")
def transpose_bytes() -> dict[str, Any]:
    return {"src": _x(ROWS, COLS).mul(9).to(torch.uint8), "dst": _codes(COLS, ROWS)}


@_call("dst", "dst_transposed", "amax")
def activation() -> dict[str, Any]:
    return {
        "name": "gelu", "src": _x(ROWS, COLS), "dst": _codes(ROWS, COLS), "dtype": E4M3, "dst_transposed": _codes(COLS, ROWS),
        "scale": torch.tensor([2.0]), "amax": torch.zeros(1),
    }  # fmt: skip


@_call("dst", "bias_grad")
def activation_backward() -> dict[str, Any]:
    return {
        "name": "silu", "grad": _x(ROWS, COLS), "src": _x(ROWS, COLS, seed=1), "dst": torch.zeros(ROWS, COLS), "dtype": torch.float32,
        "bias_grad": torch.zeros(COLS),
    }  # fmt: skip


@_call("dst")
def gated_activation() -> dict[str, Any]:
    return {"name": "swiglu", "src": _x(ROWS, 2 * COLS), "dst": torch.zeros(ROWS, COLS), "dtype": torch.float32}


@_call("dst")
def gated_activation_backward() -> dict[str, Any]:
    return {
        "name": "geglu", "grad": _x(ROWS, COLS), "src": _x(ROWS, 2 * COLS), "dst": torch.zeros(ROWS, 2 * COLS), "dtype": torch.float32
    }  # fmt: skip


@_call("mu", "rsigma", "dst")
def norm_fwd() -> dict[str, Any]:
    return {
        "x": _x(ROWS, COLS), "weight": _x(COLS), "bias": _x(COLS, seed=1), "mu": torch.zeros(ROWS), "rsigma": torch.zeros(ROWS), "eps": 1e-5,
        "zero_centered_gamma": True, "dst": torch.zeros(ROWS, COLS), "dtype": torch.float32,
    }  # fmt: skip


@_call("dx", "dgamma", "dbeta")
def norm_bwd() -> dict[str, Any]:
    return {
        "dz": _x(ROWS, COLS), "x": _x(ROWS, COLS, seed=1), "mu": _x(ROWS), "rsigma": _x(ROWS, seed=1), "weight": _x(COLS),
        "zero_centered_gamma": False, "dx": torch.zeros(ROWS, COLS), "dgamma": torch.zeros(COLS), "dbeta": torch.zeros(COLS),
        "add": _x(ROWS, COLS, seed=2),
    }  # fmt: skip


def _adam() -> dict[str, Any]:
    lists = {name: [_x(ROWS, COLS, seed=i)] for i, name in enumerate(("gradients", "weights", "first", "second", "masters"))}
    lists["second"][0].abs_()
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8, "correction1": 0.1, "correction2": 0.01, "decoupled": True}
    return {**lists, **numbers, "weight_decay": 0.1}


@_call("weights", "first", "second", "masters")
def multi_tensor_adam() -> dict[str, Any]:
    return _adam()


@_call("weights", "first", "second", "first_scales", "second_scales", "masters", "master_scales")
def multi_tensor_adam_scaled() -> dict[str, Any]:
    scales = {name: [torch.full((1,), 0.25 * i)] for i, name in enumerate(("first_scales", "second_scales", "master_scales"), 1)}
    of_bytes = {name: [torch.arange(ROWS * COLS).remainder(100).to(torch.uint8).reshape(ROWS, COLS)] for name in ("first", "second")}
    return {**_adam(), **scales, **of_bytes, "masters": [_x(ROWS, COLS, seed=4).half()]}


@_call("weights", "momenta", "copies")
def multi_tensor_sgd() -> dict[str, Any]:
    lists = {name: [_x(ROWS, COLS, seed=i)] for i, name in enumerate(("gradients", "weights", "momenta"))}
    numbers = {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "scale": 0.5}
    flags = {"nesterov": False, "first_run": False, "decay_after": False}
    return {**lists, "copies": [torch.zeros(ROWS, COLS, dtype=torch.bfloat16)], **numbers, **flags}


@_call()
def multi_tensor_l2norm() -> dict[str, Any]:
    return {"tensors": [_x(ROWS, COLS), _x(3)]}


@_call()
def fingerprints() -> dict[str, Any]:
    return {"tensors": [_x(ROWS, COLS), _codes(3), _x(5).bfloat16()]}


@_call("outputs")
def multi_tensor_scale() -> dict[str, Any]:
    return {"inputs": [_x(ROWS, COLS)], "outputs": [torch.zeros(ROWS, COLS)], "scale": 2.0}


@_call("dst")
def rope() -> dict[str, Any]:
    return {
        "src": _x(3, 2, 2, COLS), "dst": torch.zeros(3, 2, 2, COLS), "freqs": _x(8, 1, 1, COLS), "sequence_first": True, "interleaved": False,
        "backward": False, "start_positions": _i32(0, 5),
    }  # fmt: skip


@_call("dst")
def rope_packed() -> dict[str, Any]:
    return {
        "src": _x(7, 2, COLS), "dst": torch.zeros(7, 2, COLS), "freqs": _x(8, 1, 1, COLS), "sequence_first": False, "interleaved": True,
        "backward": True, "start_positions": _i32(1, 2), "cu_seqlens": _i32(0, 3, 6),
    }  # fmt: skip


@_call("dst")
def softmax_forward() -> dict[str, Any]:
    mask = torch.arange(ROWS * COLS).remainder(3).eq(0).to(torch.uint8).view(1, 1, ROWS, COLS)
    return {"src": _x(2, 2, ROWS, COLS), "dst": torch.zeros(2, 2, ROWS, COLS), "scale": 0.5, "mask": mask}


@_call("dst")
def softmax_backward() -> dict[str, Any]:
    return {"grads": _x(2, ROWS, COLS), "results": _x(2, ROWS, COLS, seed=1), "dst": torch.zeros(2, ROWS, COLS), "scale": 0.5, "causal": True}


def _product(rows: int, depth: int) -> dict[str, Any]:
    return {
        "left": _x(rows, depth), "left_transposed": False, "left_dtype": torch.float32, "left_scale": torch.tensor([2.0]), "right": _x(8, depth),
        "right_transposed": True, "right_dtype": torch.float32, "right_scale": torch.tensor([0.5]), "dst": torch.zeros(ROWS, 8),
        "dtype": torch.float32, "bias": _x(8), "addend": _x(ROWS, 8), "beta": 1.0, "gelu": 1, "pre_gelu": torch.zeros(ROWS, 8),
        "column_sums": torch.zeros(8),
    }  # fmt: skip


@_call("dst", "pre_gelu", "column_sums")
def gemm() -> dict[str, Any]:
    return _product(ROWS, COLS)


@_call("dst", "pre_gelu", "column_sums")
def gemm_of_blocks() -> dict[str, Any]:
    right = torch.arange(8 * COLS).remainder(256).to(torch.uint8).view(8, COLS)
    return {**_product(ROWS, 2 * COLS), "right": right, "right_dtype": 10, "right_scales": torch.full((8, 2), 56, dtype=torch.uint8)}


@_call("dst", "pre_gelu", "column_sums")
def gemm_of_left_blocks() -> dict[str, Any]:
    left = torch.arange(ROWS * COLS).remainder(256).to(torch.uint8).view(ROWS, COLS)
    scales = torch.full((ROWS, 2), 56, dtype=torch.uint8)
    return {**_product(ROWS, 2 * COLS), "left": left, "left_dtype": 10, "left_scales": scales}


def _rules() -> dict[str, Any]:
    return {"scale": 0.3, "causal": True, "causal_bottom_right": True, "window_left": -1, "window_right": -1, "window_bottom_right": False}


def _written_forward(*leading: int) -> dict[str, Tensor]:
    return {"out": torch.zeros(*leading, COLS), "stats": torch.zeros(*leading, 1), "largest": torch.zeros(*leading, 1)}


@_call("out", "stats", "largest")
def attention_forward() -> dict[str, Any]:
    """Packed sequences of 2 and 3 tokens, each with padding after it, and a token of no sequence; dropout, and an extra logit."""
    return {
        "q": _x(8, 2, COLS), "k": _x(8, 1, COLS, seed=1), "v": _x(8, 1, COLS, seed=2), **_written_forward(8, 2), **_rules(),
        "lengths_q": _i32(0, 2, 5), "starts_q": _i32(0, 3, 7), "lengths_kv": _i32(0, 2, 5), "starts_kv": _i32(0, 3, 7), "extra_logits": _x(2),
        "dropout": 0.3, "rng_state": torch.tensor([5, 6]), "max_seqlen_q": 3, "max_seqlen_kv": 3,
    }  # fmt: skip


@_call("out", "stats", "largest")
def attention_forward_paged() -> dict[str, Any]:
    return {
        "q": _x(5, 2, COLS), "k": _x(6, 2, 1, COLS, seed=1), "v": _x(6, 2, 1, COLS, seed=2), **_written_forward(5, 2), **_rules(),
        "lengths_q": _i32(0, 2, 5), "lengths_kv": _i32(0, 4, 9), "page_table_k": torch.stack((_i32(5, 1, 0), _i32(2, 0, 4))),
        "page_table_v": torch.stack((_i32(3, 1, 0), _i32(2, 5, 4))),
    }  # fmt: skip


@_call("out", "stats", "largest")
def attention_forward_padded() -> dict[str, Any]:
    return {
        "q": _x(2, 4, 2, COLS), "k": _x(2, 5, 1, COLS, seed=1), "v": _x(2, 5, 1, COLS, seed=2), **_written_forward(2, 4, 2), **_rules(),
        "lengths_q": _i32(0, 2, 6), "lengths_kv": _i32(0, 5, 8),
    }  # fmt: skip


@_call("dq", "dk", "dv", "extra_gradient")
def attention_backward() -> dict[str, Any]:
    names = {"q": 2, "k": 1, "v": 1, "out": 2, "grad": 2}
    return {
        **{name: _x(8, heads, COLS, seed=i) for i, (name, heads) in enumerate(names.items())}, "stats": _x(8, 2, 1).add(4),
        "dq": torch.zeros(8, 2, COLS), "dk": torch.zeros(8, 1, COLS), "dv": torch.zeros(8, 1, COLS), **_rules(), "lengths_q": _i32(0, 2, 5),
        "starts_q": _i32(0, 3, 7), "lengths_kv": _i32(0, 2, 5), "starts_kv": _i32(0, 3, 7), "extra_logits": _x(2), "extra_gradient": torch.zeros(2),
    }  # fmt: skip


def _cache(pages: int, size: int) -> dict[str, Tensor]:
    return {
        "new_k": _x(5, 2, 3), "k_cache": _x(pages, size, 2, 3), "new_v": _x(5, 2, 4), "v_cache": _x(pages, size, 2, 4),
        "new_lengths": _i32(0, 2, 4), "cached_lengths": _i32(0, 4, 7),
    }  # fmt: skip


@_call("k_cache", "v_cache")
def copy_to_cache() -> dict[str, Any]:
    return {**_cache(6, 2), "table": torch.stack((_i32(5, 1, 0), _i32(2, 3, 4))), "paged": True}


@_call("k_cache", "v_cache")
def copy_to_cache_dense() -> dict[str, Any]:
    return {**_cache(3, 5), "table": _i32(2, 0), "paged": False}
