"""The key of a call: it holds the kinds of what decides, and the compiled way and Python's give the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusible import cpp_extensions, tex
from fusible.errors import FusibleError
from fusible.quantized import Float8CurrentScalingQuantizer
from fusible.tex.backends.cpu import compiled_keys
from fusible.tex.interface.declare import DECLARATIONS, Declaration
from fusible.tex.operands import KINDS, kind, sort
from fusible.tex.selection.call_keys import Keys, arguments_of, key_maker, kinds_in, python_key_maker

compiled = pytest.mark.skipif(not cpp_extensions.available, reason=cpp_extensions.reason if not cpp_extensions.available else "")


def _kept(make: Callable[[Declaration], Keys]) -> Callable[[Declaration], Keys]:
    kept = functools.cache(lambda name: make(DECLARATIONS[name]))
    return lambda declaration: kept(declaration.name)


MAKERS = [pytest.param(_kept(key_maker), marks=compiled, id="compiled"), pytest.param(_kept(python_key_maker), id="python")]


class _Int(int):
    """A number of a class of its own."""


def _values() -> dict[str, Any]:
    x, ones = torch.randn(3, 4), torch.ones(4, dtype=torch.int32)
    quantizer = Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, "cpu")
    storageless = torch.ones(4)
    storageless.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.empty(4)
    dtypes = torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e8m0fnu
    return {
        "None": None,
        "True": True,
        "1": 1,
        "1.0": 1.0,
        "_Int": _Int(1),
        "a string": "cpu",
        "a list": [x, None],
        "a tuple": (x,),
        "an object": object(),
        "dtype": torch.float32,
        "DType": tex.DType.kFloat32,
        "mask": tex.NVTE_Mask_Type.NVTE_NO_MASK,
        "device": torch.device("cpu"),
        "fp32": x,
        "parameter": torch.nn.Parameter(x),
        "transposed": x.T,
        "requires_grad": x.clone().requires_grad_(),
        "lengths": ones,
        "lengths [1, 4]": ones[None],
        "one length": ones[0],
        "int64": ones.long(),
        "quantizer": quantizer,
        "quantized": quantizer(x),
        **{str(dtype): torch.zeros(4).to(dtype) for dtype in dtypes},
        # What torch's exchange interface refuses; after one of these the extension asks tensors by name for a while.
        "negated": torch._neg_view(x),
        "without memory": storageless,
        "zeros": torch._efficientzerotensor((4,)),
        "fake": fake,
        "meta": x.to("meta"),
        "sparse": x.to_sparse(),
        "fp32 by name": x,
        "parameter by name": torch.nn.Parameter(x),
        "lengths by name": ones,
    }


VALUES = _values()
SERVED = [declaration for declaration in DECLARATIONS.values() if arguments_of(declaration)]


@compiled
@pytest.mark.parametrize("declaration", SERVED, ids=lambda d: d.name)
def test_the_compiled_key_is_pythons(declaration: Declaration) -> None:
    native, python = key_maker(declaration), python_key_maker(declaration)
    assert type(native) is not type(python), "the keys of this installation are compiled"
    count = len(arguments_of(declaration))
    for name, value in VALUES.items():
        expected, got = python(*[value] * count), native(*[value] * count)
        assert got == expected and [type(entry) for entry in got] == [type(entry) for entry in expected], name


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("value", VALUES)
def test_a_key_tells_the_kinds_of_what_decides(make: Any, value: str) -> None:
    for declaration in SERVED:
        key = make(declaration)(*[VALUES[value]] * len(arguments_of(declaration)))
        for ask, entry in zip(declaration.asks, kinds_in(declaration, key), strict=True):
            if declaration.signature.parameters[ask].annotation == "bool":  # nothing but flags comes that far
                assert entry is VALUES[value]
            else:
                assert entry == kind(VALUES[value]), (declaration.name, ask)


@pytest.mark.parametrize("make", MAKERS)
def test_what_is_of_another_kind_or_sort_has_another_key(make: Any) -> None:
    """Of the entries of a tensor that decides: no two of these values are one to dispatch. Of an index tensor likewise."""
    declaration = DECLARATIONS["copy_to_kv_cache"]
    place = arguments_of(declaration).index
    key = make(declaration)
    keys = {name: key(*[value] * len(arguments_of(declaration))) for name, value in VALUES.items()}
    tensors = ("None", "dtype", "fp32", "torch.bfloat16", "int64", "meta", "sparse", "quantized", "quantizer")
    deciding = {name: keys[name][place("new_k")] for name in tensors}
    assert len(set(deciding.values())) == len(deciding)
    vectors = ("None", "lengths", "lengths [1, 4]", "one length", "int64", "fp32", "meta", "sparse")
    lengths = {name: keys[name][place("cu_new_lens")] for name in vectors}
    assert len(set(lengths.values())) == len(lengths)


def test_a_dtype_is_not_taken_for_a_tensor_of_it() -> None:
    x = torch.randn(2, 4)
    tex.relu(x, None)
    with pytest.raises(FusibleError, match="relu"):
        tex.relu(x.dtype, None)


@compiled
def test_the_maker_of_keys_refuses_what_it_does_not_know() -> None:
    with pytest.raises(FusibleError, match="entries of call_key: expected .*, got .kx."):
        cpp_extensions.call_key(b"kx", KINDS, sort, sort)
    key = compiled_keys(b"kv", KINDS, sort, sort)
    assert key is not None and key(VALUES["fp32"], 3) == (torch.float32, 3)
    with pytest.raises(TypeError, match="a call's key: expected 2 arguments, got 1"):
        key(VALUES["fp32"])
    with pytest.raises(ZeroDivisionError):  # what Python's own descriptions raise comes through
        cpp_extensions.call_key(b"s", KINDS, lambda x: 1 // 0, sort)(3)
