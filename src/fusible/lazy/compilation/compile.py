"""Compiling a function of lazy tensors ahead of its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fusible.errors import ArgumentError, expected
from fusible.lazy.assumptions import collected
from fusible.lazy.compilation.argument_checks import ArgumentCheck, SizeCheck, checks_of
from fusible.lazy.compilation.buckets import BucketSource, check_conditions, checked_buckets
from fusible.lazy.compilation.executable import Executable
from fusible.lazy.compilation.input_info import InputInfo
from fusible.lazy.compilation.parametrized import Parametrized
from fusible.lazy.compilation.signature import Leaf, Parameter, Signature, Template, bind, filled, mapped
from fusible.lazy.compilation.source import TraceSource
from fusible.lazy.device import DEFAULT
from fusible.lazy.frontend import Tensor, located, wrapped
from fusible.lazy.source import user_line
from fusible.lazy.trace import DimensionInput, Input, Trace, TraceTensor

__all__ = ["compile"]


@located
def compile(
    func: Callable[..., Any],
    optimization_level: int = 3,
    *,
    args: Sequence[Any] = [],  # as there; nothing writes to either
    kwargs: Mapping[str, Any] | None = {},
    donate: Sequence[str] = (),
    buckets: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Executable:
    """Trace ``func`` (a function or a module) once on ``args`` and ``kwargs``, and compile what it records.

    Every ``InputInfo`` and ``DimensionInputInfo`` among the arguments, also within dicts, lists and tuples, becomes a runtime input, named by
    the function's parameter; everything else is a constant, and is not passed to the executable. Tensors among the constants, or captured by
    ``func``, are read from their memory at every call. The parameters of a module that have no name get that of the
    state dict. ``func`` returns a tensor, or (nested) lists and tuples of them. ``optimization_level`` is the compiler's effort, from 0 to 5 (XLA's
    own highest is 3). ``donate`` names inputs whose memory the results may take over, as ``InputInfo(..., donate=True)`` does.

    Where dimensions are dynamic, ``func`` records sizes as expressions. Two different sizes that have to agree are taken to be equal, and
    checked at each call; a dynamic size is taken not to be 1 where it meets another. A program is compiled for each set of sizes that is met, or with
    ``buckets``, by the name of a dimension (``NamedDimension.name``, or ``argument.dimension`` as in ``"tokens.1"``) ascending sizes up to its
    bound, for each bucket: inputs are padded with zeros to the next one, the program is rewritten so that no result depends on padding, and
    results are cut to their true sizes. They are those of an exact program but for the order of sums.

    Raises ``ArgumentError`` for arguments that ``func`` does not take, another return value, or a donated input that no result fits, and
    ``CompileError`` where ``func`` uses the value of a runtime input, or with buckets an operation that cannot tell padding from elements.
    """
    if type(optimization_level) is not int or not 0 <= optimization_level <= 5:
        raise ArgumentError(expected("an int from 0 to 5", of="optimization_level", got=repr(optimization_level), do="use 3, the default"))
    name = getattr(func, "__qualname__", type(func).__name__)
    bound = bind(func, name, args, {} if kwargs is None else kwargs)
    owner = getattr(func, "__self__", func)  # of a method, the module
    if isinstance(owner, Parametrized):
        owner._name_parameters()
    signature = _donating(Signature.of(bound, name), donate)
    checks = checks_of(signature)
    tracers = [_tracer(check, i, leaf.name) for i, (check, leaf) in enumerate(zip(checks, signature.leaves, strict=True))]
    made = {leaf.name: tracer for leaf, (tracer, _) in zip(signature.leaves, tracers, strict=True)}
    arguments = filled(bound, made)
    with collected() as conditions:
        returned = func(*arguments.args, **arguments.kwargs)
    outputs: list[Tensor] = []
    _flatten(returned, outputs, name)
    if not outputs:
        raise ArgumentError(expected("at least one tensor", of=f"the return value of {name}", got="none", do="return what it computes"))
    trace = Trace(outputs, [tensor for _, tensor in tracers])
    aliases = _aliases(signature, trace)
    results = [(t.shape, t.dtype, t.device) for t in trace.outputs]
    level = min(optimization_level, 3)
    chosen = checked_buckets(buckets, [found for a in checks for found, _ in a.origins], bool(aliases))
    check_conditions(list(conditions), chosen)
    source = BucketSource(trace, level, chosen) if chosen else TraceSource(trace, level, aliases)
    return Executable(name, signature, checks, results, source, single=isinstance(returned, Tensor), conditions=list(conditions))


def _tracer(check: ArgumentCheck, index: int, name: str) -> tuple[Any, TraceTensor]:
    """The tensor or size that the function gets for a runtime input, and its recorded value, which errors call ``name``."""
    if isinstance(check, SizeCheck):
        op: Input = DimensionInput(index, (), check.dtype, check.size)
    else:
        op = Input(index, check.shape, check.dtype)  # type: ignore[arg-type] - see Shape
    tensor = op.output(DEFAULT, user_line(), name)
    return wrapped(check.size) if isinstance(check, SizeCheck) else Tensor.from_trace_tensor(tensor), tensor


def _donating(signature: Signature, names: Sequence[str]) -> Signature:
    """``signature`` where the inputs called ``names`` (a whole argument, or one input in it) are donated."""
    known = {p.name for p in signature.parameters} | {leaf.name for leaf in signature.leaves}
    for name in names:
        if name not in known:
            wanted = f"names among {', '.join(sorted(known))}"
            raise ArgumentError(expected(wanted, of="donate", got=repr(name), do="name runtime inputs"))

    def marked(p: Parameter) -> Template:
        def mark(leaf: Leaf) -> Leaf:
            if isinstance(leaf.info, InputInfo) and (p.name in names or leaf.name in names):
                return replace(leaf, info=replace(leaf.info, donate=True))
            return leaf

        return mapped(p.template, mark)

    return Signature(signature.function, [replace(p, template=marked(p)) for p in signature.parameters])


def _aliases(signature: Signature, trace: Trace) -> dict[int, int]:
    """For each donated input the first result of its type that no other input has. Raises ``ArgumentError`` where there is none."""
    free = list(range(len(trace.outputs)))
    aliases: dict[int, int] = {}
    for i, (leaf, t) in enumerate(zip(signature.leaves, trace.inputs, strict=True)):
        if isinstance(leaf.info, InputInfo) and leaf.info.donate:
            taken = next((j for j in free if trace.outputs[j].shape == t.shape and trace.outputs[j].dtype is t.dtype), None)
            if taken is None:
                wanted = f"a result of {t.dtype} {list(t.shape)} to take its memory"
                raise ArgumentError(expected(wanted, of=f"the donated input {leaf.name}", got="none that is free", do="do not donate it"))
            free.remove(taken)
            aliases[i] = taken
    return aliases


def _flatten(value: Any, into: list[Tensor], name: str) -> None:
    if isinstance(value, Tensor):
        into.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _flatten(item, into, name)
    else:
        wanted = "a lazy tensor, or nested lists and tuples of them"
        raise ArgumentError(expected(wanted, of=f"the return value of {name}", got=type(value).__name__, do="return tensors"))
