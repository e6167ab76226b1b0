"""The dtypes that a public function takes. From one declaration they are checked, documented and tested.

``@constrained(input="T1", returns="T1", T1=FLOATS)`` says that ``input`` is a tensor whose dtype, called ``T1``, is one of ``FLOATS``, and that
the result has that dtype too. Parameters with one type variable have one dtype; Python numbers among them adopt it. ``"[T1]"`` is a sequence of
tensors, ``"T1?"`` a tensor or ``None``. A parameter named ``dtype`` or ``..._dtype`` is a dtype itself; where its default is ``None``, ``None`` means
the dtype ``T1``, and elsewhere ``None`` is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

from fusible.errors import DTypeError, FusibleError, expected
from fusible.lazy.config import config
from fusible.lazy.dtypes import ALL, DTYPES, dtype
from fusible.lazy.frontend import convert
from fusible.lazy.frontend.refusals import OF_PYTHON, Refusals
from fusible.lazy.frontend.registry import TENSOR_METHOD_REGISTRY
from fusible.lazy.frontend.tensor import Tensor
from fusible.lazy.locate import locate, pointing
from fusible.lazy.printing import shown

__all__ = ["Constraints", "FUNCTIONS", "Public", "Rule", "constrained", "located"]

F = TypeVar("F", bound=Callable[..., Any])

FUNCTIONS: dict[str, Public] = {}
"""Every function that was declared with ``constrained``, by name."""


@dataclass(frozen=True)
class Rule:
    """What the dtypes of several type variables must fulfil together: in words, as a predicate of the type variables, and as advice for an error."""

    wanted: str
    holds: Callable[..., bool]
    do: str


@dataclass(frozen=True)
class Constraints:
    """The declaration of one function.

    ``inputs`` maps a parameter to its type variable, ``variables`` a type variable to the dtypes that it may be. ``returns`` has the type variable of
    the result, or of each of several results. ``mixes`` are groups of dtypes that may differ under one type variable.
    """

    inputs: Mapping[str, str]
    variables: Mapping[str, frozenset[dtype]]
    returns: tuple[str, ...]
    rule: Rule | None = None
    mixes: tuple[frozenset[dtype], ...] = ()

    def combinations(self) -> Iterator[tuple[dict[str, dtype], bool]]:
        """Every assignment of dtypes to the type variables, and whether the function accepts it."""
        for chosen in product(DTYPES.values(), repeat=len(self.variables)):
            given = dict(zip(self.variables, chosen, strict=True))
            yield given, self.accepts(given)

    def accepts(self, given: Mapping[str, dtype]) -> bool:
        """Whether dtypes for the type variables are legal."""
        if any(of not in self.variables[name] for name, of in given.items()):
            return False
        return self.rule is None or self.rule.holds(**given)

    def document(self) -> str:
        """The lines that the function's documentation ends with."""
        lines = ["Dtypes:"]
        by_variable = {name: [p for p, v in self.inputs.items() if v.strip("[]?") == name] for name in self.variables}
        for name, allowed in self.variables.items():
            what = by_variable[name] + self._results(name)
            lines.append(f"    {name} ({', '.join(what)}): {spell(allowed)}")
        for name in dict.fromkeys(self.returns):
            if name not in self.variables:
                lines.append(f"    {', '.join(self._results(name))}: {name}")
        if self.rule is not None:
            lines.append(f"    only {self.rule.wanted}")
        lines += [f"    {spell(group)} may mix" for group in self.mixes]
        return "\n".join(lines)

    def _results(self, name: str) -> list[str]:
        """The results, in words, whose dtype is ``name``."""
        if len(self.returns) == 1:
            return ["the result"] if self.returns == (name,) else []
        return [f"result {i}" for i, of in enumerate(self.returns) if of == name]


@dataclass(frozen=True)
class Public:
    """A declared function: ``call`` is what users call."""

    name: str
    call: Callable[..., Any]
    constraints: Constraints


def spell(allowed: frozenset[dtype]) -> str:
    """The names of dtypes, in the order of their table."""
    return ", ".join(name for name, of in DTYPES.items() if of in allowed)


def constrained(
    *methods: str,
    returns: str | tuple[str, ...] = (),
    rule: Rule | None = None,
    mixes: Sequence[frozenset[dtype]] = (),
    **declared: Any,
) -> Callable[[F], F]:
    """Declare the dtypes that a function takes: ``parameter="T1"`` for its tensors, ``T1=frozenset`` for each type variable.

    ``methods`` are the names by which it is a method of ``Tensor`` as well. The function is called after the checks, with tensors alone. Its errors
    show the user's line. See the module's documentation.
    """
    variables = {name: frozenset(allowed) for name, allowed in declared.items() if not isinstance(allowed, str)}
    inputs = {name: variable for name, variable in declared.items() if isinstance(variable, str)}

    def decorate(function: F) -> F:
        results = (returns,) if isinstance(returns, str) else returns
        rules = Constraints(inputs, variables, results, rule, tuple(mixes))
        made = _wrap(function, rules)
        if inputs:
            made.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{rules.document()}"
        FUNCTIONS[function.__name__] = Public(function.__name__, made, rules)
        return TENSOR_METHOD_REGISTRY(*methods)(made)

    return decorate


def located(function: F) -> F:
    """``function``, whose errors show the user's line."""
    return _wrap(function, Constraints({}, {}, ()))


_SOURCE_FILE = __file__
_REQUIRED = object()
"""Stands for the default of a dtype parameter that has none."""


class _Name(str):
    """A default as source: the name that stands for it."""

    __repr__ = str.__str__


def _wrap(function: F, rules: Constraints) -> F:
    """A function of the same parameters that converts, checks, and calls ``function``.

    Written out as source, so that a call binds its arguments once: a wrapper of ``*args, **kwargs`` would cost as much as recording.
    """
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    assert rules.inputs.keys() <= signature.parameters.keys(), f"{function.__name__} has no parameter {rules.inputs.keys()}"
    names = [p.name for p in parameters]
    refusals = Refusals(function.__name__, signature)
    scope: dict[str, Any] = {"_name": refusals.name, "_explain": refusals.explain, "_of_python": OF_PYTHON, "_flag": refusals.flag}
    scope |= {"_function": function, "_locate": locate, "FusibleError": FusibleError, "Tensor": Tensor, "_parameters": tuple(names)}
    scope |= {f"_default_{p.name}": p.default for p in parameters}
    bare = [p.replace(annotation=p.empty, default=p.default if p.default is p.empty else _Name(f"_default_{p.name}")) for p in parameters]
    head = inspect.Signature(bare)
    call = ", ".join(
        {p.VAR_POSITIONAL: f"*{p.name}", p.VAR_KEYWORD: f"**{p.name}", p.KEYWORD_ONLY: f"{p.name}={p.name}"}.get(p.kind, p.name) for p in parameters
    )
    body = [f"if type({p.name}) is not bool: _flag({p.name!r}, {p.name})" for p in parameters if p.annotation == "bool"]
    body += _checks(function.__name__, rules, scope)
    lines = [f"def {function.__name__}{head}:", "    try:", *(f"        {line}" for line in body), f"        return _function({call})"]
    given = ", ".join(f"{p!r}: {p}" for p in names)
    lines += ["    except FusibleError as error:", "        _name(error)", "        _locate(error, _parameters)", "        raise"]
    lines += ["    except _of_python as error:", f"        explained = _explain(error, {{{given}}})"]
    lines += ["        if explained is None:", "            raise", "        _locate(explained, _parameters)", "        raise explained from error"]
    exec(compile("\n".join(lines), _SOURCE_FILE, "exec"), scope)
    made = scope[function.__name__]
    made.__wrapped__, made.__doc__, made.__module__, made.__qualname__ = function, function.__doc__, function.__module__, function.__qualname__
    made.__annotations__ = function.__annotations__
    made.__signature__ = signature
    return made


def _checks(name: str, rules: Constraints, scope: dict[str, Any]) -> list[str]:
    """The statements that make tensors of the arguments and check their dtypes. ``scope`` gets what they refer to."""
    checker = _Checker(name, rules)
    scope.update({f"_{check}": getattr(checker, check) for check in ("tensors", "refuse", "differ", "dtype", "sequence", "optional", "exclude")})
    scope.update({f"_allowed_{variable}": allowed for variable, allowed in rules.variables.items()})
    lines: list[str] = []
    bound: set[str] = set()
    for variable in rules.variables:
        tensors = [p for p, v in rules.inputs.items() if v == variable and not _is_dtype(p)]
        if tensors:
            bound.add(variable)
            named, first = ", ".join(tensors), tensors[0]
            test = " and ".join(f"type({p}) is Tensor" for p in tensors)
            lines.append(f"if not ({test}): {named}{',' if len(tensors) == 1 else ''} = _tensors({named})")
            lines.append(f"{variable} = {first}.trace_tensor.dtype")
            lines.append(f"if {variable} not in _allowed_{variable}: _refuse({first!r}, {first}, _allowed_{variable})")
            lines += [f"if {p}.trace_tensor.dtype is not {variable}: _differ({p!r}, {p}, {first!r}, {first})" for p in tensors[1:]]
    for parameter, kind in rules.inputs.items():
        variable = kind.strip("[]?")
        given = f"{parameter!r}, {parameter}, _allowed_{variable}"
        known = variable if variable in bound else "None"
        if _is_dtype(parameter):
            first = next(iter(rules.variables))
            default = known if known != "None" or first == variable else first
            if scope[f"_default_{parameter}"] is not None:
                scope["_required"], default = _REQUIRED, "_required"
            lines.append(f"{variable} = _dtype({given}, {default})")
        elif kind.startswith("["):
            bound.add(variable)
            lines.append(f"{parameter}, {variable} = _sequence({given})")
        elif kind.endswith("?"):
            lines.append(f"if {parameter} is not None: {parameter} = _optional({given}, {known})")
    if rules.rule is not None:
        scope["_holds"] = rules.rule.holds
        given = ", ".join(f"{variable}={variable}" for variable in rules.variables)
        lines.append(f"if not _holds({given}): _exclude({given})")
    return lines


def _is_dtype(parameter: str) -> bool:
    return parameter == "dtype" or parameter.endswith("_dtype")


class _Checker:
    """The functions that the checks of one function call. Each converts an argument, or raises an error that names it."""

    def __init__(self, name: str, rules: Constraints) -> None:
        self.name = name
        self.rules = rules

    def _raise(self, wanted: str, parameters: str, got: object, do: str) -> None:
        if not config.enable_input_validation:
            return
        raise pointing(DTypeError(expected(wanted, of=f"{parameters} of {self.name}", got=got, do=do)), parameters.rpartition(" ")[2])

    def tensors(self, *values: Any) -> list[Tensor]:
        return convert.promote(*values)

    def refuse(self, parameter: str, tensor: Tensor, allowed: frozenset[dtype]) -> None:
        self._raise(f"a dtype among {spell(allowed)}", parameter, tensor.trace_tensor, "cast it first")

    def differ(self, parameter: str, tensor: Tensor, first: str, of: Tensor) -> None:
        if not any(tensor.dtype in group and of.dtype in group for group in self.rules.mixes):
            both = first if first == parameter else f"{first} and {parameter}"
            self._raise("one dtype", both, f"{of.trace_tensor} and {tensor.trace_tensor}", "cast one of them")

    def dtype(self, parameter: str, given: Any, allowed: frozenset[dtype], default: Any) -> dtype | None:
        if given is None and default is not _REQUIRED:
            return default
        if not isinstance(given, dtype) or given not in ALL:
            self._raise("a dtype of fusible.lazy", parameter, shown(given), "pass for instance float32 of it")
        if given not in allowed:
            self._raise(f"a dtype among {spell(allowed)}", parameter, given, "ask for one of these")
        return given

    def sequence(self, parameter: str, given: Any, allowed: frozenset[dtype]) -> tuple[list[Tensor], dtype | None]:
        if not isinstance(given, list | tuple):
            self._raise("a list or tuple of tensors", parameter, type(given).__name__, "pass [a, b]")
        tensors = convert.promote(*given) if given else []
        for tensor in tensors:
            if tensor.dtype not in allowed:
                self.refuse(parameter, tensor, allowed)
            if tensor.dtype is not tensors[0].dtype:
                self.differ(parameter, tensor, parameter, tensors[0])
        return tensors, tensors[0].dtype if tensors else None

    def optional(self, parameter: str, given: Any, allowed: frozenset[dtype], bound: dtype | None) -> Tensor:
        tensor = convert.as_tensor(given, bound)
        if tensor.dtype not in allowed or (bound is not None and tensor.dtype is not bound):
            self.refuse(parameter, tensor, allowed if bound is None else frozenset({bound}))
        return tensor

    def exclude(self, **given: dtype) -> None:
        if not config.enable_input_validation:
            return
        got = ", ".join(f"{variable}={of}" for variable, of in given.items())
        assert self.rules.rule is not None
        raise DTypeError(expected(self.rules.rule.wanted, of=self.name, got=got, do=self.rules.rule.do))
