"""A parameter that an op takes is not set to None, and where a module has lost one, its call says so in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from subjects import MODULES, OPERATIONS, WIDTH, Subject, tokens
from torch import nn

import fusible
from fusible.errors import ArgumentError

COLLECTIVES = {"AllGather", "AllReduce", "ReduceScatter"}
"""They have no parameters, and are made where processes are."""


def _held() -> Iterator[Any]:
    for room, subjects in (("fusible", MODULES), ("ops", OPERATIONS)):
        for index, subject in enumerate(subject for subject in subjects if subject.name not in COLLECTIVES):
            for path, module in subject.make().named_modules():
                for name, _ in module.named_parameters(recurse=False):
                    yield pytest.param(subject, path, name, id=f"{room}.{subject.name}-{index}-{path}.{name}")


@pytest.mark.parametrize("called", [False, True], ids=["fresh", "called"])
@pytest.mark.parametrize(("subject", "path", "name"), list(_held()))
def test_none_is_no_parameter(subject: Subject, path: str, name: str, called: bool) -> None:
    model = subject.make()
    if called:
        subject.call(model, subject.arguments())
    owner = model.get_submodule(path)
    parameter = owner.get_parameter(name)
    for write in (lambda: setattr(owner, name, None), lambda: owner.register_parameter(name, None)):
        with pytest.raises(ArgumentError, match=f"{name} of {type(owner).__name__}: expected a parameter, got none; "):
            write()
    assert owner.get_parameter(name) is parameter
    subject.call(model, subject.arguments())


@pytest.mark.parametrize("called", [False, True], ids=["fresh", "called"])
@pytest.mark.parametrize(("subject", "path", "name"), [case for case in _held() if case.id.startswith("fusible")])
def test_a_call_without_a_parameter_says_which(subject: Subject, path: str, name: str, called: bool) -> None:
    for lose in (lambda owner: owner._parameters.__setitem__(name, None), lambda owner: delattr(owner, name)):
        model = subject.make()
        if called:
            subject.call(model, subject.arguments())
        owner = model.get_submodule(path)
        parameter = owner.get_parameter(name)
        lose(owner)
        with pytest.raises(ArgumentError, match=f"{name} of {type(owner).__name__}: expected a parameter, got none; "):
            subject.call(model, subject.arguments())
        owner.register_parameter(name, parameter)
        subject.call(model, subject.arguments())


def test_a_layer_without_a_bias_is_given_none() -> None:
    layer = fusible.Linear(WIDTH, WIDTH, bias=False)
    with pytest.raises(ArgumentError, match="bias of a Linear that was made without: expected none, got a parameter; make another"):
        layer.bias = nn.Parameter(torch.zeros(WIDTH))
    layer.bias = None
    assert "bias=False" in repr(layer) and layer(tokens()).shape == (32, WIDTH)


def test_a_buffer_that_an_op_takes_is_not_lost() -> None:
    experts = fusible.MixtureOfExperts(WIDTH, WIDTH, 4, score_function="sigmoid", expert_bias=True)
    experts.expert_bias = torch.ones(4)
    experts(tokens())
    experts.expert_bias = None
    with pytest.raises(ArgumentError, match="expert_bias of MixtureOfExperts: expected a parameter, got none"):
        experts(tokens())
