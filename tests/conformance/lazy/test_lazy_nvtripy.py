"""The public interface of NVIDIA's nvtripy, name by name: what ``fusible.lazy`` has of it, and what it has not is on the list in the documentation.

``nvtripy-*.json`` is what ``nvtripy_inventory.py`` reads from a version's sources.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvtripy_inventory import inventory

from fusible import lazy
from fusible.lazy.frontend.interface import FUNCTIONS

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "lazy" / "coming-from-tripy.md"
VERSIONS = sorted(HERE.glob("nvtripy-*.json"))
Rows = list[list[str]]

_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "any",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}
_OPERATORS = "Tensor's operators"
_MODULES = {
    "BatchNorm": (2,),
    "Conv": (2, 2, (1,)),
    "ConvTranspose": (2, 2, (1,)),
    "Embedding": (2, 2),
    "GroupNorm": (1, 2),
    "InstanceNorm": (2,),
    "LayerNorm": (2,),
    "Linear": (2, 2),
    "Sequential": (lazy.relu,),
}


def listed() -> list[str]:
    """The names in the documentation's table of differences."""
    table = PAGE.read_text().partition("<!-- differences -->")[2].partition("<!-- end -->")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def instance_of(name: str) -> Any:
    """An object of a class of the interface, for attributes that only objects have."""
    if name in _MODULES:
        return getattr(lazy, name)(*_MODULES[name])
    made: dict[str, Callable[[], Any]] = {
        "Bounds": lambda: lazy.Bounds((1,), (1,), (1,)),
        "DimensionInputInfo": lambda: lazy.DimensionInputInfo((1, 2, 3)),
        "Executable": lambda: lazy.compile(lazy.relu, args=[lazy.InputInfo((1,), lazy.float32)]),
        "InputInfo": lambda: lazy.InputInfo((1,), lazy.float32),
        "NamedDimension": lambda: lazy.NamedDimension("n", 1, 2, 3),
        "Tensor": lambda: lazy.Tensor([1.0]),
        "device": lambda: lazy.device("cpu"),
        "dtype": lambda: lazy.float32,
    }
    return made[name]() if name in made else getattr(lazy, name)


def compared(name: str, call: Any, theirs: Rows, default: Callable[[str], Any]) -> Iterator[str]:
    """Where our signature is another: ``name(parameter)`` for one that we lack, that stands elsewhere, has another default, or is ours alone."""
    ours = [p for p in inspect.signature(call).parameters.values() if p.name not in ("self", "cls")]
    theirs = [row for row in theirs if row[0] not in ("self", "cls")]
    by_name = {p.name: p for p in ours}
    order = [p.name for p in ours if p.name in {row[0] for row in theirs}]
    for place, (parameter, kind, *given) in enumerate(theirs):
        own = by_name.pop(parameter, None)
        defaults = [] if own is None or own.default is own.empty else [own.default]
        if own is None or _KINDS[own.kind] != kind or order[place] != parameter or defaults != [default(text) for text in given]:
            yield f"{name}({parameter})"
    yield from (f"{name}({parameter})" for parameter in by_name)


def default_of(text: str) -> Any:
    """The value of a default, whose text names dtypes and devices as the package does."""
    return eval(text, {**vars(lazy), "tp_device": lazy.device})


def overloads_serve(name: str, overloads: list[Rows]) -> Iterator[str]:
    """Of a function with several signatures: whether ours binds each of them, by position and by keyword."""
    signature = inspect.signature(getattr(lazy, name))
    for rows in overloads:
        named = {row[0]: ... for row in rows if row[1] == "any"}
        for args, kwargs in ((tuple(named), {}), ((), named)):
            try:
                signature.bind(*args, **kwargs)
            except TypeError:
                yield name


def differences(found: dict[str, Any]) -> Iterator[str]:
    for name in found["values"]:
        holder, _, last = name.rpartition(".")
        if not hasattr(getattr(lazy, holder) if holder else lazy, last):
            yield name
    for name, overloads in found["functions"].items():
        rows = [shown["parameters"] for shown in overloads]
        if not hasattr(lazy, name):
            yield name
        elif len(rows) > 1:
            yield from overloads_serve(name, rows)
        else:
            yield from compared(name, getattr(lazy, name), rows[0], default_of)
    for name, shown in found["classes"].items():
        yield from differences_of_class(name, shown)
    for name, overloads in found["methods"].items():
        if not hasattr(lazy.Tensor, name):
            yield f"Tensor.{name}"
        elif not name.startswith("__") and callable(getattr(lazy.Tensor, name)):
            own = overloads[0]["parameters"]
            yield from compared(f"Tensor.{name}", getattr(lazy.Tensor, name), own, default_of)


def differences_of_class(name: str, shown: dict[str, Any]) -> Iterator[str]:
    if not hasattr(lazy, name):
        yield name
        return
    own, made = getattr(lazy, name), instance_of(name)
    yield from (f"{name}.{attribute}" for attribute in shown["properties"] if not hasattr(made, attribute))
    for method, rows in shown["methods"].items():
        if not hasattr(own, method):
            yield f"{name}.{method}"
            continue
        inherited = getattr(object, method, None) is getattr(own, method) or isinstance(getattr(own, method), type(object.__init__))
        if method == "__init__" and own is not lazy.Module and not issubclass(own, type):
            yield from compared(name, own, rows, default_of)
        elif not inherited and method not in ("__init__", "__eq__", "__hash__") and callable(getattr(own, method)):
            yield from compared(f"{name}.{method}", getattr(own, method), rows, default_of)


@pytest.mark.parametrize("path", VERSIONS, ids=lambda path: path.stem)
def test_the_interface_is_theirs_but_for_what_is_listed(path: Path) -> None:
    found = json.loads(path.read_text())
    assert path.stem == f"nvtripy-{found['version']}" and len(found["functions"]) > 60 and len(found["classes"]) > 20
    assert sorted(set(differences(found))) == sorted(listed())


def test_a_name_a_parameter_or_a_default_that_is_another_is_found() -> None:
    """The comparison sees what it is for."""
    found = json.loads(VERSIONS[-1].read_text())
    found["functions"] = {"tanhh": [{"parameters": []}], "softmax": [{"parameters": [["input", "any"], ["dim", "any", "0"]]}]}
    found["functions"]["gelu"] = [{"parameters": [["x", "any"]]}]
    found["functions"]["resize"] = [{"parameters": [["input", "any"], ["size", "any"]]}] * 2
    found["classes"] = {"Linear": {"methods": {"forward": [["self", "any"], ["y", "any"]], "frozen": []}, "properties": ["width"]}}
    found["methods"] = {"__rshift__": []}
    found["values"] = ["float6", "types.DeviceLike"]
    missed = {"tanhh", "softmax(dim)", "gelu(x)", "gelu(input)", "resize", "Linear.forward(y)", "Linear.forward(x)", "Linear.frozen", "Linear.width"}
    assert set(differences(found)) == missed | {"Tensor.__rshift__", "float6", "types.DeviceLike"}


def accepted(rows: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Every combination of dtypes that a function of theirs takes, by parameter."""
    names = list(rows["taken"])
    for given in itertools.product(*rows["taken"].values()):
        by_name = dict(zip(names, given, strict=True))
        if all(by_name[a] == by_name[b] for a, b in rows.get("equal", ())) and list(given) not in rows.get("refused", ()):
            yield by_name


OTHER_NAMES = {"deconvolution": "convolution_transpose", "__eq__": "eq", "__ne__": "ne"}
COMPOSED = {"__getitem__", "instancenorm", "layernorm", "shape"}
"""What takes any dtype, or is a module here (``test_lazy_modules_torch`` has those)."""


@pytest.mark.parametrize("path", VERSIONS, ids=lambda path: path.stem)
def test_every_combination_of_dtypes_that_they_take_is_taken(path: Path) -> None:
    """By declaration; ``test_lazy_constraints`` calls every function with everything that is declared."""
    by_call = {id(public.call): public for public in FUNCTIONS.values()}
    seen = 0
    for name, overloads in json.loads(path.read_text())["dtypes"].items():
        if name in COMPOSED:
            continue
        holder = lazy.Tensor if name.startswith("__") else lazy
        public = by_call.get(id(getattr(holder, name, None))) or FUNCTIONS[OTHER_NAMES.get(name, name)]
        parameters = list(inspect.signature(public.call).parameters)
        first, last = parameters[0], parameters[-1]
        own = {"self": first, "other": last} if name.startswith("__") else {}
        inputs, variables = public.constraints.inputs, public.constraints.variables
        for given in itertools.chain.from_iterable(accepted(rows) for rows in overloads if rows):
            bound = {inputs[own.get(p, p)].strip("[]?"): getattr(lazy, of) for p, of in given.items() if own.get(p, p) in inputs}
            assert public.constraints.accepts({v: bound.get(v, next(iter(variables[v]))) for v in variables}), (name, given)
            seen += 1
    assert seen > 500


def test_the_inventory_reads_a_package(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text('__version__ = "9"\n')
    (tmp_path / "ops.py").write_text(
        "@export.public_api(document_under='x')\n@wrappers.interface(input_requirements=OneOf(GetInput('a').dtype, [dt.int8, dt.bool])"
        " & (GetInput('b').dtype == GetInput('a').dtype) & If(GetInput('dtype') != None, GetInput('dtype') != dt.int4))\n"
        "def f(a, b=dt.int8, *c, dtype: int = None, **d): ...\n\n"
        "@register_tensor_method('__add__')\ndef __add__(self, other): ...\n\n"
        "@export.public_api()\nclass K(B):\n    w: int\n    def __init__(self, n=1):\n        self.n = n\n        self._m = n\n    def g(self): ...\n"
        "    def _h(self): ...\n    @property\n    def p(self): ...\n\n"
        "def unseen(): ...\n\nlevel = export.public_api(module=m)(3)\nint3 = _make_int_datatype('int3')\n"
    )
    found = inventory(tmp_path)
    assert found["version"] == "9" and found["values"] == ["int3", "ops.level"] and found["methods"]["__add__"]
    rows = [["a", "any"], ["b", "any", "int8"], ["c", "*"], ["dtype", "keyword", "None"], ["d", "**"]]
    assert found["functions"] == {"f": [{"parameters": rows}]}
    methods = {"__init__": [["self", "any"], ["n", "any", "1"]], "g": [["self", "any"]]}
    assert found["classes"] == {"K": {"bases": ["B"], "methods": methods, "properties": ["n", "p", "w"]}}
    (dtypes,) = found["dtypes"]["f"]
    assert dtypes["taken"]["a"] == ["int8", "bool"] and "int4" not in dtypes["taken"]["dtype"] and dtypes["equal"] == [["a", "b"]]
    assert "refused" not in dtypes and len(list(accepted(dtypes))) == 2 * 8


def test_each_overload_is_served_as_it_is_called_there() -> None:
    three = np.arange(3, dtype=np.float32)
    for called in (lazy.arange(3), lazy.arange(stop=3), lazy.arange(0, 3), lazy.arange(start=0, stop=3), lazy.arange(3, lazy.float32)):
        assert np.array_equal(called.numpy(), three) and called.dtype is lazy.float32
    assert lazy.arange(3, dtype=lazy.int32).dtype is lazy.int32 and lazy.arange(5, 2, -1).tolist() == [5.0, 4.0, 3.0]
    image = lazy.Tensor(np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2))
    by_shape = lazy.resize(image, (1, 1, 4, 4), "nearest").numpy()
    for called in (
        lazy.resize(image, output_shape=(1, 1, 4, 4), mode="nearest"),
        lazy.resize(image, scales=(1, 1, 2, 2), mode="nearest"),
        lazy.resize(image, (1.0, 1.0, 2.0, 2.0), "nearest"),
    ):
        assert np.array_equal(called.numpy(), by_shape)
