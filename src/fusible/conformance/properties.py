"""Properties that every call has, whatever the function. They are checked for each sample.

A call writes only to what its sample declares. Its results share memory with an argument or with one another only where those of the reference do,
and they do share it with an argument that is given as an output. They are contiguous where the reference's are. A second call gives the same results
in memory of its own, and draws the same numbers from a generator in the same state. Arguments with gaps between their elements, or that begin behind
the start of their storage, give the same results as others. So does a call while torch's default device and dtype are others: results lie where
arguments do, and what is in float32 is so whatever torch makes of a number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import deepcopy
from typing import Any

import torch

from fusible.conformance.memory import Snapshot, holds, relaid, shared, tensors, with_copies, within
from fusible.conformance.table import Disagreement, Sample, bits
from fusible.errors import NotServedError

__all__ = ["Properties"]

Call = Callable[..., Any]
Compare = Callable[[Any, dict[str, Any]], Any]
_ELSEWHERE = "meta"
"""A device that every torch has, and whose tensors hold nothing."""


class Properties:
    """The properties of one function on one backend. ``reference`` is the same function of the torch backend."""

    def __init__(self, function: str, call: Call, reference: Call, *, memory: bool = True) -> None:
        self._function, self._call, self._reference, self._memory = function, call, reference, memory
        self._compact: set[str] = set()
        self._fixed: set[str] = set()

    def check(self, sample: Sample, fresh: dict[str, Any], before: Snapshot, result: Any, theirs: tuple[Any, Any], compare: Compare) -> None:
        """Raise ``Disagreement`` unless the call that gave ``result`` has the properties.

        ``fresh`` is a copy of the sample's arguments, and ``before`` their memory, both taken before the call. ``theirs`` are the reference's
        ``(arguments, result)``. ``compare(result, arguments)`` raises where the outputs of another call are wrong.
        """
        before.check(sample.written)
        passed, came = self._sides(sample.arguments, result)
        self._shares(passed, came, theirs, sample.written)
        if self._memory:
            self._lies_densely(came, theirs[1])
            self._a_second_call(deepcopy(fresh), result, came, compare)
            self._laid_otherwise(sample, fresh, compare)
            self._while_defaults_are_others(fresh, result, compare)

    def _sides(self, arguments: dict[str, Any], result: Any) -> tuple[Any, Any]:
        """Arguments and result on the backend's side, where it has another."""
        return getattr(self._call, "last", None) or (arguments, result)

    def _shares(self, passed: Any, came: Any, reference: tuple[Any, Any], written: frozenset[str]) -> None:
        again, theirs = reference
        mine, allowed = (shared(result, arguments, under=("result", "")) for result, arguments in ((came, passed), (theirs, again)))
        for place, argument in sorted(mine - allowed):
            raise Disagreement(f"{place} lies in the memory of the argument {argument}")
        if next(tensors(came), None) is not None:
            plain = dict(tensors(passed))  # what records lies in no memory
            for place, argument in sorted(allowed - mine):
                if argument in plain and within(argument, written):
                    raise Disagreement(f"{place} is not the argument {argument} that was given to be written")
        if not self._memory:  # nobody writes to what is immutable
            return
        mine, allowed = (shared(result, result, under=("result", "result"), distinct=False) for result in (came, theirs))
        for place, other in sorted(mine - allowed):
            raise Disagreement(f"{place} lies in the memory of {other}")

    def _lies_densely(self, came: Any, theirs: Any) -> None:
        """Where the reference's result is contiguous, code may rely on it: so must be the backend's."""
        wanted = dict(tensors(theirs))
        for path, x in tensors(came):
            if path in wanted and wanted[path].is_contiguous() and not x.is_contiguous():
                raise Disagreement(f"the result {path} of {list(x.shape)} has the strides {list(x.stride())}")

    def _a_second_call(self, arguments: dict[str, Any], result: Any, came: Any, compare: Compare) -> None:
        first = with_copies(result)
        second = self._call(self._function, **arguments)
        try:
            compare(second, arguments)
        except Disagreement as error:
            raise Disagreement(f"of a second call, {error}") from None
        for path, x, value in first:
            if not torch.equal(bits(x), bits(value)):
                raise Disagreement(f"a second call wrote to the first one's result {path}")
        if any(isinstance(x, torch.Generator) for x in arguments.values()):
            again = dict(tensors(second))
            for path, x in tensors(result):
                if not torch.equal(bits(x), bits(again[path])):
                    raise Disagreement(f"a second call with a generator in the same state drew another result {path}")
        _, comes = self._sides(arguments, second)
        for place, _ in sorted(shared(comes, came, under=("result", "result"))):
            raise Disagreement(f"two calls gave the same memory as {place}")

    def _laid_otherwise(self, sample: Sample, fresh: dict[str, Any], compare: Compare) -> None:
        names = {name for name, x in fresh.items() if (isinstance(x, torch.Tensor | list | tuple) or holds(x)) and next(tensors(x), None) is not None}
        while names := names - self._fixed:
            arguments = relaid(fresh, strided=names - self._compact, shifted=names & self._compact)
            before = Snapshot(arguments)
            try:
                result = self._call(self._function, **arguments)
            except NotServedError:
                return
            except Exception:
                # What the reference refuses as well is no layout of this argument.
                loose = {name for name in names - self._compact if self._refuses(fresh, strided={name})}
                fixed = {name for name in names & self._compact if self._refuses(fresh, shifted={name})}
                if not loose | fixed:
                    raise
                self._compact |= loose
                self._fixed |= fixed
                continue
            try:
                compare(result, arguments)
                before.check(sample.written)
            except Disagreement as error:
                raise Disagreement(f"of arguments with gaps between their elements, {error}") from None
            return

    def _while_defaults_are_others(self, fresh: dict[str, Any], usual: Any, compare: Compare) -> None:
        arguments, when = deepcopy(fresh), f"while torch's defaults are {_ELSEWHERE} and float64"
        former = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device(_ELSEWHERE):
                result = self._call(self._function, **arguments)
        except NotServedError:
            return
        except Exception as error:
            raise Disagreement(f"{when}, {type(error).__name__}: {error}") from error
        finally:
            torch.set_default_dtype(former)
        dtypes = {path: x.dtype for path, x in tensors(usual)}
        for path, x in tensors(result):
            if x.device.type == _ELSEWHERE:
                raise Disagreement(f"the result {path} lies there {when}")
            if x.dtype is not dtypes.get(path, x.dtype):
                raise Disagreement(f"the result {path} is of {x.dtype} and not of {dtypes[path]} {when}")
        try:
            compare(result, arguments)
        except Disagreement as error:
            raise Disagreement(f"{when}, {error}") from None

    def _refuses(self, fresh: dict[str, Any], *, strided: Collection[str] = (), shifted: Collection[str] = ()) -> bool:
        """Whether the reference does not take these arguments so laid."""
        try:
            self._reference(**relaid(fresh, strided=strided, shifted=shifted))
        except Exception:
            return True
        return False
