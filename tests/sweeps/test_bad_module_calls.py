"""Every module and operation refuses a bad call in one sentence that names it or the argument, and leaves arguments, parameters and states alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import groupby
from typing import Any, NamedTuple

import pytest
import torch
from scores import Scores, score
from subjects import MODULES, OPERATIONS, RECIPES, Subject, classes_of
from wrong_values import changed, others, state

from fusible import pytorch
from fusible.pytorch import autocast, ops

ACCEPTED = {
    ("x", "empty"): "no tokens at all are as good as some",
    ("x", "longer"): "any number of tokens will do",
    ("x", "shorter"): "any number of tokens will do",
    ("x", "wider"): "an activation takes any width",
    ("x", "flat"): "operations take [*, width]",
    ("x", "one rank more"): "operations take [*, width]",
    ("x", "meta"): "of tensors on meta alone a pass gives others on meta",
    ("seq_lens", "None"): "one sequence",
    ("seq_lens", "flat"): "it is flat",
    ("cache", "None"): "whole sequences",
    ("extra", "of float64"): "a sum takes any numbers",
    ("extra", "of int64"): "a sum takes any numbers",
    ("extra", "of uint8"): "a sum takes any numbers",
    ("scales", "of float64"): "a factor may be any number",
    ("scales", "of int64"): "a factor may be any number",
    ("scales", "of uint8"): "a factor may be any number",
    ("scales", "flat"): "it is flat",
    ("scales", "one rank more"): "a number for each row, whatever the shape",
    ("split_sizes", "flat"): "it is flat",
    ("split_sizes", "of int64"): "int64 will do",
}
"""Wrong values that are none: what each argument may also be. Whatever lies otherwise in memory gives the same result and is held against it."""

WITHOUT_PARAMETERS = {("x", "of float64"): "what has no parameters of another dtype computes in fp64"}
"""What is accepted by modules that have none."""


class Call(NamedTuple):
    subject: Subject
    recipe: str
    argument: str
    what: str

    def __str__(self) -> str:
        return f"{self.subject.name} under {self.recipe}: {self.argument} {self.what}"


pytestmark = pytest.mark.usefixtures("alone")


def _calls(subjects: Iterable[Subject], recipes: Iterable[str]) -> list[Call]:
    return [
        Call(subject, recipe, name, what)
        for subject in subjects
        for recipe in recipes
        for name, good in subject.arguments().items()
        for what, _ in others(good)
    ]


def _result(subject: Subject, recipe: str, module: Any, arguments: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    with autocast(RECIPES[recipe] is not None, RECIPES[recipe]), torch.no_grad() if "cache" in arguments else nullcontext():
        return subject.call(module, arguments)


def _same(a: Any, b: Any) -> bool:
    return all(map(_same, a, b)) if isinstance(a, tuple) else torch.allclose(a, b, rtol=2.0**-18, atol=2.0**-18)


def _scored(calls: Iterable[Call]) -> Scores:
    """What comes of the calls. Those of one subject under one recipe are of one module, which goes on as if they had not been."""
    scores = Scores()
    for (subject, recipe), some in groupby(sorted(calls, key=lambda call: (id(call.subject), call.recipe)), lambda call: call[:2]):
        torch.manual_seed(1)
        module = subject.make()
        wanted = _result(subject, recipe, module, subject.arguments())
        for call in some:
            _score(call, module, wanted, scores)
        again = _result(subject, recipe, module, subject.arguments())
        scores.add(f"{subject.name} under {recipe}", "right afterwards" if _same(again, wanted) or recipe == "delayed" else "wrong afterwards")
    return scores


def _score(call: Call, module: Any, wanted: Any, scores: Scores) -> None:
    arguments = call.subject.arguments()
    arguments[call.argument] = next(value for what, value in others(arguments[call.argument]) if what == call.what)
    before = list(state([arguments, dict(module.state_dict())]))
    try:
        result = _result(call.subject, call.recipe, module, arguments)
    except Exception as error:
        names = {call.subject.name, call.argument, *(type(inner).__name__ for inner in module.modules())}
        wrong = changed(before, list(state([arguments, dict(module.state_dict())])))
        scores.add(call, score(error, names, changed=wrong), error)
        return
    if call.what == "strided":  # under delayed scaling the scales move on from call to call
        scores.add(call, "accepted" if _same(result, wanted) or call.recipe == "delayed" else "wrong")
    else:
        accepted = ACCEPTED if any(True for _ in module.parameters()) else ACCEPTED | WITHOUT_PARAMETERS
        argument = "x" if call.argument == "input" else call.argument
        scores.add(call, "accepted" if (argument, call.what) in accepted else "accepted without a reason")


@pytest.mark.parametrize(("room", "subjects"), [(pytorch, MODULES), (ops, OPERATIONS)], ids=["modules", "operations"])
def test_every_public_class_is_swept(room: Any, subjects: list[Subject]) -> None:
    assert classes_of(room) == {subject.name for subject in subjects}


def test_a_sample_of_bad_calls_of_modules_is_refused_clearly() -> None:
    calls = _calls([*MODULES, *OPERATIONS], ["none", "delayed"])
    scores = _scored(random.Random(17).sample(calls, 600))
    print(f"{len(calls)} bad calls of {len(MODULES) + len(OPERATIONS)} modules, of which a sample: {dict(scores.counts)}")
    assert not scores.unclear, "\n".join(scores.unclear)
    assert scores.counts["clear"] > 300


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("subjects", [MODULES, OPERATIONS], ids=["modules", "operations"])
def test_every_bad_call_of_a_module_is_refused_clearly(subjects: list[Subject], recipe: str) -> None:
    calls = _calls(subjects, [recipe])
    scores = _scored(calls)
    print(recipe, dict(scores.counts))
    assert not scores.unclear, "\n".join(scores.unclear)
    assert scores.counts["clear"] + scores.counts["accepted"] == len(calls) > 900


def test_what_counts_as_a_change() -> None:
    """A sweep that would not see a change could not fail."""
    counts = Counter[bool]()
    for subject in (*MODULES, *OPERATIONS):
        module = subject.make()
        parameters = list(module.parameters())
        before = list(state(dict(module.state_dict())))
        with torch.no_grad():
            for parameter in parameters[:1]:
                parameter.view(-1)[0] += 1
        counts[changed(before, list(state(dict(module.state_dict())))) == bool(parameters)] += 1
    assert set(counts) == {True}
