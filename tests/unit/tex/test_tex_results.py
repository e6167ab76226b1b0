"""What a backend from outside the package returns wrongly is refused where it returns it, in one sentence that names it and the function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fusible
from fusible import tex
from fusible.conformance.table import load
from fusible.errors import BackendError
from fusible.quantized import Float8CurrentScalingQuantizer
from fusible.tex.calls.results import _LIKE, _SEVERAL, _UNSAID
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.selection.registry import registry

TABLE = load()
FUNCTIONS = sorted(name for name in TABLE if name in DECLARATIONS and name not in _UNSAID)
RETURNED: list[Any] = []

Spoil = Callable[[Any], Any]
OF_ALL: dict[str, Spoil] = {"None": lambda y: None, "a number": lambda y: 3.5, "a text": lambda y: "ab", "a dictionary": lambda y: {}}
OF_ONE: dict[str, Spoil] = {"a list": lambda y: [y], "a pair": lambda y: (y, None), "nothing": lambda y: ()}
OF_SEVERAL: dict[str, Spoil] = {
    "too few": lambda y: y[:-1],
    "too many": lambda y: (*y, None),
    "one": lambda y: y[0],
    "a number inside": lambda y: [3, *y[1:]],
}
OF_TENSORS: dict[str, Spoil] = {
    "another shape": lambda y: y.new_zeros((*y.shape, 2)),
    "another dtype": lambda y: y.to(torch.int16),
    "a tensor of another kind": lambda y: torch.zeros(y.shape, dtype=torch.complex64),
}


def returning(self: Any, *args: Any, **kwargs: Any) -> Any:
    return RETURNED[0]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    before = registry.registered()
    yield
    registry.put_registered(before)


def tex_function(name: str) -> Callable[..., Any]:
    return getattr(tex.prim, name.removeprefix("prim_")) if name.startswith("prim_") else getattr(tex, name)


def spoils(name: str, result: Any) -> dict[str, Spoil]:
    annotation = DECLARATIONS[name].signature.return_annotation
    if annotation in ("None", None):
        return {}
    if annotation in ("int", "bool"):
        return {**OF_ALL, **OF_ONE}
    if name not in _SEVERAL:
        return {**OF_ALL, **OF_ONE}
    least, most = _SEVERAL[name]
    fixed = ("too few", "too many") if least == most else ()
    inside = () if any(isinstance(item, str | int) for item in result) else ("one", "a number inside")
    return {**OF_ALL, **{what: OF_SEVERAL[what] for what in (*fixed, *inside) if len(result)}}


def backend_of(*functions: str, **fields: Any) -> None:
    methods = dict.fromkeys(functions, returning)
    tex.register_backend(type("Spoiling", (tex.TEXBackendBase,), {"NAME": "spoiling", "PRIORITY": 900, **methods, **fields}), replace=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_takes_what_the_reference_gives_and_nothing_else(name: str) -> None:
    record, call = TABLE[name], tex_function(name)
    with tex.set_backend("torch"):
        results = [call(**sample.arguments) for sample in record.samples(record.dtypes[0], 3)]
    backend_of(name)
    for result, sample in zip(results, record.samples(record.dtypes[0], 3), strict=True):
        RETURNED[:] = [result]
        assert call(**sample.arguments) is result
        for spoil in spoils(name, result).values():
            RETURNED[:] = [spoil(result)]
            shown = name.replace("prim_", "prim.")
            with pytest.raises(
                BackendError, match=rf"^what the backend spoiling returns from {shown}: expected .*; let it return what help\(tex"
            ) as caught:
                call(**sample.arguments)
            assert ", got " in str(caught.value)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name in _LIKE])
def test_shapes_and_dtypes_that_follow_from_the_arguments_are_held_to_them(name: str) -> None:
    record, call = TABLE[name], tex_function(name)
    for dtype in record.dtypes:
        with tex.set_backend("torch"):
            results = [call(**sample.arguments) for sample in record.samples(dtype, 4)]
        backend_of(name)
        for result, sample in zip(results, record.samples(dtype, 4), strict=True):
            first = result[0] if name in _SEVERAL else result
            for spoil in OF_TENSORS.values() if type(first) is torch.Tensor else [lambda y: torch.zeros(3, 5, 7)]:
                RETURNED[:] = [[spoil(first), *result[1:]] if name in _SEVERAL else spoil(first)]
                with pytest.raises(BackendError, match=f"^what the backend spoiling returns from {name}: expected a (quantized )?tensor"):
                    call(**sample.arguments)


USES: dict[str, tuple[str, Callable[[], torch.nn.Module]]] = {
    "an activation": ("gelu", fusible.GELU),
    "a norm": ("rmsnorm_fwd", lambda: fusible.RMSNorm(32)),
    "a cast": ("quantize", lambda: fusible.Linear(32, 32)),
    "a gradient": ("dgelu", fusible.GELU),
}


@pytest.mark.parametrize("wrong", [None, (), [], 3, "ab"], ids=str)
@pytest.mark.parametrize("use", USES)
def test_modules_blame_the_backend_and_not_their_arguments(use: str, wrong: Any) -> None:
    function, make = USES[use]
    backend_of(function)
    RETURNED[:] = [wrong]
    with pytest.raises(BackendError, match=f"^what the backend spoiling returns from {function}( of .*)?: expected"):
        with fusible.autocast(enabled=function == "quantize", recipe=fusible.Float8CurrentScaling()):
            make()(torch.randn(16, 32, requires_grad=True)).sum().backward()


def test_functions_registered_one_by_one_and_methods_given_by_implement_are_held_to_it_too() -> None:
    x, quantizer = torch.randn(4, 32), Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3)
    fields: dict[str, Any] = {"impl_id": "vendor.spoiling", "kind": tex.BackendImplKind.VENDOR, "vendor": "Spoiling", "priority": 900}
    registry.register_many([tex.OpImpl(op_name="quantize", fn=lambda tensor, quantizer, output=None, noop=None: [tensor], **fields)])
    with pytest.raises(BackendError, match="^what the backend spoiling returns from quantize: expected one tensor, got a list of 1;"):
        tex.quantize(x, quantizer)
    tex.implement(tex.gelu, backend="cpu")(lambda backend, input, quantizer: None)
    try:
        with pytest.raises(BackendError, match="^what the backend cpu returns from gelu: expected one tensor, got None;"):
            tex.gelu(x, None)
    finally:
        tex.unimplement(tex.gelu, backend="cpu")
