"""Changes of an operation's options or parameters: its bound op is made anew, or the change is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fusible.errors import ArgumentError, expected
from fusible.nvte import Tensor
from fusible.ops.protocols import OpaqueCode
from fusible.pytorch.engine.bound import BoundOp, note_change, without_memory
from fusible.pytorch.ops.protocols import BasicOperationLike, FusibleOperationLike

__all__ = ["check_fixed", "made_anew"]


@contextmanager
def made_anew(module: BasicOperationLike) -> Iterator[None]:
    """A context whose body changes attributes of ``module``. Afterwards its bound op is made anew, if they matter to it; where that fails, the
    attributes are restored."""
    own, parameters = vars(module).copy(), module._parameters.copy()
    entry = module._bound_op
    assert entry is not None
    former = _options(entry)
    try:
        yield
        for name in () if isinstance(entry.op, OpaqueCode) else entry.parameters:
            if module._parameters.get(name) is None:
                of = f"{name} of {type(module).__name__}"
                raise ArgumentError(expected("a parameter", of=of, got="none", do="assign another one, or use another operation"))
        made = BoundOp(without_memory(module.make_op()), module, module.parameter_names, module.extras)
    except BaseException:
        vars(module).clear()
        vars(module).update(own)
        module._parameters.clear()
        module._parameters.update(parameters)
        raise
    if _options(made) != former:
        module._bound_op = made
        module._changes += 1
        note_change()


def _options(entry: BoundOp) -> tuple[Any, ...]:
    """All of a bound op on which a plan depends. The values of parameters are not: every call hands them in."""
    op = entry.op
    args = {id(arg) for arg in op.args}
    options = {name: value for name, value in vars(op).items() if id(value) not in args and not _is_list_of_tensors(value)}
    return type(op), entry.parameters, options, [arg.shape for arg in op.args], getattr(entry.module, "accumulating_parameters", ())


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, Tensor) for each in value)


def check_fixed(module: FusibleOperationLike, name: str, value: Any) -> None:
    """Raise ``ArgumentError`` for another value of what the parameters were made by."""
    if name in module.fixed_options and vars(module).get(name, value) != value:
        of, do = f"{name} of {type(module).__name__}", "make another operation"
        raise ArgumentError(expected(f"{vars(module)[name]!r}, by which it was made", of=of, got=repr(value), do=do))
