"""Whatever wrong call NVIDIA's package refuses, Fusible refuses by an exception that the same ``except`` clause catches, in a sentence."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from te_client import package
from te_public import sides
from te_refusals import CALLED, MADE, made_with
from wrong_values import others

from fusible.errors import ArgumentError, DTypeError, FusibleError, NotServedError, ShapeError

FAMILIES = (ValueError, TypeError, RuntimeError, AssertionError)
TAKEN = {
    ("GroupedLinear", "device", "None"): "torch's default device",
    ("GroupedLinear", "inp", "longer"): "rows beyond the last group belong to nobody",
    ("ops.GroupedLinear", 0, "longer"): "rows beyond the last group belong to nobody",
    ("ops.GroupedLinear", 0, "one rank more"): "[*, in_features]",
    ("ops.ScaledSwiGLU", 1, "meta"): "of tensors on meta alone a pass gives others on meta",
    ("recipe.DelayedScaling", "margin", "2.5"): "any power of two",
    ("recipe.MXFP8BlockScaling", "margin", "2.5"): "it has no effect",
    **{(f"ops.{name}", "input", "of float64"): "what has no parameters computes in fp64 of fp64" for name in ("GELU", "SwiGLU")},
    **{("DotProductAttention", f"{name}_layer", "strided"): "however it lies in memory" for name in ("query", "key", "value")},
    **{(name, "attention_mask", "a tensor"): "a causal mask reads no other" for name in ("MultiheadAttention", "TransformerLayer")},
}
"""What the package refuses on a CPU and ours takes, by the name, the argument and the value: why it is right."""


def outcome(call: Callable[[], Any]) -> Exception | None:
    try:
        result = call()
        if hasattr(result, "__enter__"):
            with result:
                pass
    except Exception as error:  # whatever it raises
        return error
    return None


def called(function: Any, arguments: dict[Any, Any]) -> Any:
    by_place = [value for key, value in arguments.items() if isinstance(key, int)]
    return function(*by_place, **{key: value for key, value in arguments.items() if isinstance(key, str)})


def families(error: Exception) -> set[type]:
    """The families to which an exception of the package belongs. ``NotImplementedError`` is the package's where its own code raises it: torch says by
    it that a kernel lacks a dtype or a layout."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    own = trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("transformer_engine")
    return {family for family in (*FAMILIES, *((NotImplementedError,) if own else ())) if isinstance(error, family)}


def held_against(name: str, theirs: Any, ours: Any, arguments: Callable[[], dict[Any, Any]], varied: dict[Any, Any]) -> Iterator[str]:
    """What is wrong with how ours refuses what theirs does, and a line without text for each that is right."""
    for argument, base in varied.items():
        for what, bad in others(base):
            wanted, found = (outcome(lambda side=side: called(side, {**arguments(), argument: bad})) for side in (theirs, ours))  # noqa: B023
            where = f"{name}: {argument} {what}"
            if wanted is None or (name, argument, what) in TAKEN:
                continue
            if found is None:
                yield f"{where}: taken, while the package raises {wanted!r}"
            elif missing := [family.__name__ for family in families(wanted) if not isinstance(found, family)]:
                yield f"{where}: {found!r} is no {', '.join(missing)}, as which the package raises {wanted!r}"
            elif families(wanted) and not isinstance(found, FusibleError) and wanted.__class__ is not found.__class__:
                yield f"{where}: {found!r} is no sentence of ours"
            else:
                yield ""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _judged(lines: list[str], least: int) -> None:
    assert not (wrong := [line for line in lines if line]), "\n".join(wrong)
    assert len(lines) >= least


def test_constructors_are_refused_so_that_the_same_clause_catches_it() -> None:
    lines = []
    with package():
        theirs, ours = sides()
        for name, subject in MADE.items():
            of_theirs, of_ours = subject.get(theirs), subject.get(ours)
            parameters = inspect.signature(of_theirs).parameters.values()
            names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
            good = dict(zip(names, made_with(name), strict=False))
            varied = {p.name: good.get(p.name, p.default) for p in parameters if p.name in names}
            varied = {name: value for name, value in varied.items() if value is not inspect.Parameter.empty}
            lines += held_against(name, of_theirs, of_ours, lambda good=good: good, varied)
    _judged(lines, 1_100)


def test_calls_are_refused_so_that_the_same_clause_catches_it() -> None:
    lines = []
    with package():
        theirs, ours = sides()
        for name, subject in CALLED.items():
            of_theirs, of_ours = subject.get(theirs), subject.get(ours)
            for side in (of_theirs, of_ours):
                assert (wrong := outcome(lambda side=side: called(side, subject.arguments()))) is None, (name, wrong)  # noqa: B023
            lines += held_against(name, of_theirs, of_ours, subject.arguments, subject.arguments())
    _judged(lines, 600)


@pytest.mark.parametrize("kind", [ArgumentError, DTypeError, ShapeError, NotServedError])
def test_an_error_about_arguments_is_of_every_family_by_which_the_package_tells_of_one(kind: type[Exception]) -> None:
    assert all(issubclass(kind, family) for family in FAMILIES)
    error = kind("another: expected one thing, got a third; give the first.")
    assert str(error) == "another: expected one thing, got a third; give the first." and isinstance(error, FusibleError)
    with pytest.raises(AssertionError):
        raise error


def test_an_error_comes_through_autograd_and_threads_as_it_is() -> None:
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            raise ArgumentError("another: expected one thing, got a third; give the first.")

    with pytest.raises(ArgumentError, match="expected one thing"):
        Refuses.apply(torch.ones(2, requires_grad=True)).sum().backward()
