"""A runner that calls tex on lazy tensors: torch tensors go in and come out, and what a call wrote is written into the torch tensors."""

from __future__ import annotations

import inspect
from copy import copy
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from tex_backends import Runner

from fusible import lazy, tex
from fusible.quantized import Float8Tensor, Float8TensorStorage, Quantizer
from fusible.tex.backends.xla.operands import _FROM_TORCH

_TO_TORCH = {of: dtype for dtype, of in _FROM_TORCH.items()}
_FIELDS = ("_data", "_transpose", "_scale_inv")


class Crossing:
    """One call's way in and out. Objects keep their identity: what comes out and had come in is the very object that came in."""

    def __init__(self) -> None:
        self._entered: dict[int, tuple[Any, Any]] = {}
        self._former: dict[int, Any] = {}
        self._left: dict[int, torch.Tensor] = {}

    def enter(self, x: Any) -> Any:
        if isinstance(x, dict):
            return {name: self.enter(value) for name, value in x.items()}
        if isinstance(x, list | tuple):
            return type(x)(self.enter(value) for value in x)
        if not isinstance(x, torch.Tensor | Float8TensorStorage | Quantizer):
            return x
        if id(x) not in self._entered:
            self._entered[id(x)] = (x, self._converted(x))
        return self._entered[id(x)][1]

    def _converted(self, x: Any) -> Any:
        if isinstance(x, Quantizer):
            twin = copy(x)
            for name in ("scale", "amax"):
                if isinstance(getattr(x, name, None), torch.Tensor):
                    setattr(twin, name, self.enter(getattr(x, name)))
            return twin
        if isinstance(x, Float8Tensor | Float8TensorStorage):
            data, transpose, scale_inv = (self.enter(getattr(x, name)) for name in _FIELDS)
            twin = Float8TensorStorage(
                data=data, fp8_scale_inv=scale_inv, fp8_dtype=x._fp8_dtype, fake_dtype=x._dtype, data_transpose=transpose,
                quantizer=self.enter(x._quantizer),
            )  # fmt: skip
            twin._transpose_invalid = x._transpose_invalid
            return twin
        if x.dtype not in _FROM_TORCH:
            return x
        tensor = lazy.Tensor(x.detach().clone(memory_format=torch.contiguous_format))
        self._former[id(tensor)] = tensor.trace_tensor
        return tensor

    def leave(self, result: Any) -> Any:
        """``result`` in torch tensors, after writing back what changed."""
        tensors: dict[int, lazy.Tensor] = {}
        self._collect(result, tensors)
        for original, twin in list(self._entered.values()):
            if isinstance(twin, lazy.Tensor):
                if twin.trace_tensor is not self._former[id(twin)]:
                    tensors[id(twin)] = twin
            elif not isinstance(original, torch.Tensor) or isinstance(original, Float8Tensor):
                self._collect([getattr(twin, name, None) for name in (*_FIELDS, "amax")], tensors)
        if tensors:
            outputs = lazy.compile(lambda: list(tensors.values()))()
            self._left = {key: torch.from_dlpack(output) for key, output in zip(tensors, outputs, strict=True)}
        for original, twin in list(self._entered.values()):
            self._write_back(original, twin)
        return self._result(result)

    def _collect(self, x: Any, into: dict[int, lazy.Tensor]) -> None:
        if isinstance(x, list | tuple):
            for value in x:
                self._collect(value, into)
        elif isinstance(x, Float8TensorStorage):
            self._collect([getattr(x, name) for name in _FIELDS], into)
        elif isinstance(x, lazy.Tensor):
            into[id(x)] = x

    def _write_back(self, original: Any, twin: Any) -> None:
        if isinstance(twin, lazy.Tensor):
            if twin.trace_tensor is not self._former[id(twin)]:
                original.copy_(self._left[id(twin)].view(original.shape))
        elif isinstance(twin, Float8TensorStorage):
            for name in _FIELDS:
                setattr(original, name, self._result(getattr(twin, name)))
            original._transpose_invalid = twin._transpose_invalid
        elif isinstance(getattr(twin, "amax", None), lazy.Tensor):
            new = self._left[id(twin.amax)]
            if original.amax is None:
                original.amax = new
            else:
                original.amax.copy_(new)

    def _result(self, x: Any) -> Any:
        for original, twin in self._entered.values():
            if twin is x and x is not None:
                return original
        if isinstance(x, list | tuple):
            return type(x)(self._result(value) for value in x)
        if isinstance(x, lazy.Tensor):
            return self._left[id(x)]
        if not isinstance(x, Float8TensorStorage):
            return x
        fields = {
            "data": self._result(x._data), "data_transpose": self._result(x._transpose), "fp8_scale_inv": self._result(x._scale_inv),
            "fp8_dtype": x._fp8_dtype, "quantizer": self._result(x._quantizer),
        }  # fmt: skip
        dtype = _TO_TORCH[x._dtype]
        return Float8TensorStorage(fake_dtype=dtype, **fields) if x._quantizer.internal else Float8Tensor(tuple(x.shape), dtype, **fields)


class LazyRunner(Runner):
    """Records each call, compiles it with everything it wrote, and runs it."""

    def __call__(self, function: str, **arguments: Any) -> Any:
        if function == "fused_attn_fwd" and arguments["p_dropout"] and arguments["rng_gen"] is None:
            arguments["rng_gen"] = torch.tensor([20240229, 3])
        crossing = Crossing()
        decision = tex.explain(function, **crossing.enter(arguments))
        if decision.backend != self.backend:
            pytest.skip(dict(decision.others)[self.backend])
        owner, name = (tex.prim, function.removeprefix("prim_")) if function.startswith("prim_") else (tex, function)
        return crossing.leave(getattr(owner, name)(**crossing.enter(arguments)))


RUNNER = LazyRunner("xla")


def adopted(module: ModuleType) -> dict[str, Any]:
    """The tests of ``module`` that take a runner, without the parametrisation that says which; those whose runner varies with more are left out."""
    tests: dict[str, Any] = {}
    for name, test in vars(module).items():
        if not name.startswith("test_") or test.__module__ != module.__name__ or "runner" not in inspect.signature(test).parameters:
            continue
        marks = getattr(test, "pytestmark", [])
        if any("runner" in mark.args[0] and mark.args[0] != "runner" for mark in marks if mark.name == "parametrize"):
            continue
        twin = FunctionType(test.__code__, test.__globals__, name, test.__defaults__, test.__closure__)
        twin.__dict__.update(test.__dict__)
        twin.__annotations__, twin.__doc__ = test.__annotations__, test.__doc__
        twin.pytestmark = [mark for mark in marks if mark.args[:1] != ("runner",)]  # type: ignore[attr-defined]
        tests[name] = twin
    return tests
