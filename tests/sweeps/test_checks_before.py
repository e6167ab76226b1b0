"""Functions whose arguments are checked before they run: what passed once is not looked at again, and that changes no answer."""

from __future__ import annotations

import pytest
from bad_calls import bad_calls

from fusible.conformance.table import load
from fusible.errors import FusibleError
from fusible.tex.calls import examination
from fusible.tex.interface.declare import DECLARATIONS

TABLE = load()
CHECKED = [name for name, declaration in DECLARATIONS.items() if declaration.before and name in TABLE]


def test_what_passed_makes_no_other_call_pass() -> None:
    """Each bad call after the good one that it was made of, and all that passed before."""
    asked = refused = 0
    examination._PASSED.clear()
    for name in CHECKED:
        declaration, record = DECLARATIONS[name], TABLE[name]
        for sample in record.samples(record.dtypes[0]):
            examination.check_before(declaration, sample.arguments)
        for bad in bad_calls(record, record.dtypes[0], [0]):
            wrong = examination.examine(declaration, bad.arguments)
            asked, refused = asked + 1, refused + (wrong is not None)
            if wrong is None:
                examination.check_before(declaration, bad.arguments)
                continue
            with pytest.raises(FusibleError) as caught:
                examination.check_before(declaration, bad.arguments)
            assert str(caught.value) == str(wrong), str(bad)
    assert asked > 1000 and refused > 500, (asked, refused)
    assert examination._PASSED


def test_it_is_known_of_every_such_function_that_it_reads_no_values() -> None:
    """Tensors without any give the same answer."""
    for name in CHECKED:
        for sample in TABLE[name].samples(TABLE[name].dtypes[0]):
            arguments = {key: _without_values(value) for key, value in sample.arguments.items()}
            assert examination.examine(DECLARATIONS[name], arguments) is None, name


def _without_values(value: object) -> object:
    if isinstance(value, list | tuple):
        return type(value)(_without_values(item) for item in value)
    return value.to("meta") if type(value) in examination._TENSORS else value  # type: ignore[attr-defined]
