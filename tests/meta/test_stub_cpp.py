"""The typed stub of the compiled extension says what the extension has: names, parameters, types, defaults."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fusible import cpp_extensions

STUB = Path(cpp_extensions.__file__).with_name("_native.pyi")

pytestmark = pytest.mark.skipif(not cpp_extensions.available, reason="the compiled extension is missing")


def _stub_signatures() -> dict[str, str]:
    tree = ast.parse(STUB.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {f.name: f"({ast.unparse(f.args)}) -> {ast.unparse(f.returns or ast.Constant(None))}" for f in functions}


def _native_signatures() -> dict[str, str]:
    from fusible.cpp_extensions import _native

    functions = {name: value for name, value in vars(_native).items() if callable(value) and not name.startswith("_")}
    return {name: _normal(value.__doc__ or "") for name, value in functions.items()}


def _normal(docstring: str) -> str:
    """The first line that pybind11 writes, in the stub's spelling: what converts to a number is written as the number."""
    signature = docstring.splitlines()[0].partition("(")[2]
    signature = re.sub(r"typing\.SupportsInt( \| typing\.SupportsIndex)?", "int", signature)
    signature = re.sub(r"typing\.SupportsFloat( \| typing\.SupportsIndex)?", "float", signature)
    signature = signature.replace("collections.abc.", "")
    as_function = ast.parse(f"def f({signature}: ...").body[0]
    assert isinstance(as_function, ast.FunctionDef)
    return f"({ast.unparse(as_function.args)}) -> {ast.unparse(as_function.returns or ast.Constant(None))}"


def test_the_stub_lists_exactly_the_native_functions_with_their_signatures() -> None:
    assert _stub_signatures() == _native_signatures()


def test_the_package_gives_every_native_function() -> None:
    assert all(callable(getattr(cpp_extensions, name)) for name in _native_signatures())
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_this_name'"):
        _ = cpp_extensions.nothing_of_this_name


@pytest.mark.parametrize("name", sorted(_stub_signatures()))
def test_every_stub_function_says_what_it_does(name: str) -> None:
    nodes = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert ast.get_docstring(nodes[0])
