"""Every option of every module that is set takes effect at the next call, or is refused in one sentence and nothing has changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_options import SUBJECTS, Options, modules, options_of
from scores import score
from subjects import WIDTH, tokens
from torch import nn

import fusible
from fusible.errors import ArgumentError, FusibleError
from fusible.pytorch import ops

RECIPE = fusible.Float8CurrentScaling()
REFUSED_VALUES = {("MixtureOfExperts", "gelu")}
"""Of what may be set the values that a module cannot have: an activation that is not gated, where two products are made at once."""
CASES = [
    pytest.param(subject, option, value, id=f"{subject.title}-{option}-{i}")
    for subject in SUBJECTS
    for option, values in subject.others.items()
    for i, value in enumerate(values)
]
SHOWN = frozenset({"fresh", "called", "in a Sequential"})


def _made(subject: Options, **options: Any) -> nn.Module:
    torch.manual_seed(5)
    made = subject.made(**{**subject.good, **options})
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) / 2)
    return made


def _results(model: nn.Module, subject: Options) -> list[Any]:
    """y and all gradients of a call; ``main_grad`` of what is added there."""
    torch.manual_seed(3)
    if subject.made is fusible.CrossEntropyLoss:
        x = tokens(12, 8)
        loss = model(x, torch.arange(12) % 8)
        loss.sum().backward()
        return [loss, x.grad]
    x, more = tokens(columns=subject.columns), {"extra_inputs": [tokens(columns=2 * WIDTH, grad=False)]} if subject.extra else {}
    for parameter in model.parameters():
        parameter.grad, parameter.main_grad = None, torch.zeros_like(parameter)  # type: ignore[attr-defined]
    with fusible.autocast(recipe=RECIPE):
        y = model(x, **more)
    y.square().sum().backward()
    return [y, x.grad, *(each for p in model.parameters() for each in (p.grad, p.main_grad))]  # type: ignore[attr-defined]


def _equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(one, other, strict=True))


def _called(module: nn.Module, subject: Options) -> nn.Module:
    for _ in range(3):  # the third is replayed
        _results(module, subject)
    return module


WAYS: dict[str, Callable[[nn.Module, Options], nn.Module]] = {
    "fresh": lambda module, subject: module,
    "called": _called,
    "in a Sequential": lambda module, subject: _called(fusible.Sequential(module), subject),
    "in an ops.Sequential": lambda module, subject: _called(ops.Sequential(module), subject),
    "in a Residual": lambda module, subject: _called(fusible.Residual(module), subject),
    "by the compiled executor": lambda module, subject: _called(module.compile("xla"), subject),  # type: ignore[operator, arg-type, attr-defined]
}


def _ways(subject: Options) -> list[str]:
    if subject.made is fusible.CrossEntropyLoss:
        return ["fresh", "called"]
    left_out = {"in an ops.Sequential"} if subject.extra else set()
    left_out |= {"by the compiled executor"} if subject.made is fusible.MixtureOfExperts else set()  # it does not serve it
    return [way for way in WAYS if way not in left_out and (way != "in a Residual" or subject.columns == WIDTH)]


def test_every_option_of_every_module_is_swept() -> None:
    assert {subject.title for subject in SUBJECTS} == set(modules())
    for subject in SUBJECTS:
        assert options_of(subject.made) == set(subject.good) == set(subject.others), subject.title


@pytest.mark.parametrize(("subject", "option", "value"), CASES)
def test_an_option_takes_effect_at_the_next_call_or_is_refused(subject: Options, option: str, value: Any) -> None:
    former = _results(_made(subject), subject)
    live = option in subject.live and not (isinstance(value, str) and (subject.title, value) in REFUSED_VALUES)
    for way in _ways(subject) if live else ("fresh", "called"):
        module = _made(subject)
        model = WAYS[way](module, subject)
        if not live:
            before = repr(module), _results(copy.deepcopy(model), subject)
            with pytest.raises((FusibleError, TypeError)) as caught:
                setattr(module, option, value)
            assert score(caught.value, {option}) == score(caught.value, {subject.title}) == "clear", caught.value
            assert repr(module) == before[0] and _equal(_results(model, subject), before[1]), way
            continue
        setattr(module, option, value)
        wanted = _made(subject, **{option: value})
        assert repr(module) == repr(wanted), way
        want = _results(WAYS[way](wanted, subject), subject)
        assert _equal(_results(model, subject), want), way
        if way in SHOWN:
            assert way == "in a Sequential" or not _equal(want, former), "it makes no difference"
            for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert repr(copied) == repr(model) and _equal(_results(copied, subject), want), way


@pytest.mark.parametrize("subject", SUBJECTS, ids=[subject.title for subject in SUBJECTS])
def test_an_option_is_set_back(subject: Options) -> None:
    """From each value to each other, in one module."""
    module = _made(subject)
    former, text = _results(module, subject), repr(module)
    for option in subject.live:
        for value in subject.others[option]:
            if not (isinstance(value, str) and (subject.title, value) in REFUSED_VALUES):
                setattr(module, option, value)
                _results(module, subject)
        setattr(module, option, subject.good[option])
        assert _equal(_results(module, subject), former) and repr(module) == text, option


def test_a_value_that_the_constructor_refuses_is_not_set() -> None:
    wrong = {"p": [1.5, "a", None], "eps": ["a", -1.0, None], "zero_centered_gamma": [3], "causal": [None, "a"], "window_size": [3, (-2, 0)]}
    wrong |= {
        "soft_cap": [0.0, -1.0],
        "alibi": [(1.0,) * 9, "a"],
        "dropout": [1.0],
        "rope_factors": [(1.0,) * 9],
        "rope_width": [3, 99],
        "scale": ["a"],
    }
    wrong |= {"high_precision": [3], "accumulate_into_main_grad": ["a"], "top_k": [0, 9, 2.5], "activation": ["a", 3], "normalized": ["a"]}
    wrong |= {"score_function": ["a"], "scaling_factor": ["a"], "label_smoothing": [2.0], "z_loss": [-1.0], "reduction": ["a"], "rope_scale": ["a"]}
    count = 0
    for subject in SUBJECTS:
        for option in subject.live & wrong.keys():
            for value in wrong[option]:
                module = _called(_made(subject), subject)
                text, attributes = repr(module), {name: each for name, each in vars(module).items() if not name.startswith("_")}
                with pytest.raises(FusibleError) as caught:
                    setattr(module, option, value)
                assert score(caught.value, {option, *option.split("_")}) == "clear", caught.value
                assert repr(module) == text and {n: e for n, e in vars(module).items() if not n.startswith("_")} == attributes
                count += 1
    assert count > 60


@pytest.mark.parametrize(
    ("made", "option", "value", "columns"),
    [
        (lambda: fusible.Dropout(0.5), "p", 0.0, WIDTH),
        (lambda: fusible.Dropout(0.0), "p", 0.5, WIDTH),  # which draws a seed, a part of the graph
        (lambda: fusible.RMSNorm(WIDTH), "eps", 0.5, WIDTH),
        (lambda: fusible.Linear(WIDTH, WIDTH), "high_precision", True, WIDTH),
        (lambda: fusible.MultiHeadedSelfAttention(WIDTH, 2), "causal", False, 3 * WIDTH),
        (lambda: fusible.MixtureOfExperts(WIDTH, WIDTH, 4), "scaling_factor", 2.0, WIDTH),
    ],
    ids=["Dropout off", "Dropout on", "RMSNorm", "Linear", "attention", "MixtureOfExperts"],
)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a Sequential"])
def test_what_is_compiled_follows(made: Callable[[], nn.Module], option: str, value: Any, columns: int, inside: bool) -> None:
    torch._dynamo.reset()
    module = made()
    model = fusible.Sequential(module) if inside else module
    compiled, x = torch.compile(model, backend="aot_eager"), tokens(columns=columns)
    with fusible.autocast(recipe=RECIPE):
        torch.manual_seed(1)
        former = compiled(x)
        setattr(module, option, value)
        torch.manual_seed(1)
        y = compiled(x)
        torch.manual_seed(1)
        assert torch.equal(y, model(x)) and not torch.equal(y, former)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.shape == x.shape


def test_scales_stay_where_an_option_is_set() -> None:
    norm, steps, x = fusible.RMSNorm(WIDTH), 3, tokens()
    model = fusible.Sequential(fusible.Linear(WIDTH, WIDTH), norm, fusible.Linear(WIDTH, WIDTH))
    recipe = fusible.DelayedScaling(amax_history_len=8)

    def step(model: nn.Module) -> None:
        with fusible.autocast(recipe=recipe):
            y = model(x)
        y.square().sum().backward()

    for _ in range(steps):
        step(model)
    other = copy.deepcopy(model)
    saved = {name: each.clone() for name, each in model.scaling_state.items()}
    norm.eps = 0.5
    assert saved and all(torch.equal(each, model.scaling_state[name]) for name, each in saved.items())
    other = fusible.Sequential(other[0], fusible.RMSNorm(WIDTH, eps=0.5), other[2])
    other.load_state_dict(model.state_dict())
    for each in (model, other):
        step(each)
    assert all(torch.equal(each, other.scaling_state[name]) for name, each in model.scaling_state.items())
    assert any(not torch.equal(each, saved[name]) for name, each in model.scaling_state.items())


def test_a_backward_is_that_of_its_forward() -> None:
    norm, x = fusible.RMSNorm(WIDTH), tokens()
    y = norm(x)
    norm.eps = 0.5
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    (want,) = torch.autograd.grad(fusible.RMSNorm(WIDTH)(x).square().sum(), x)
    assert torch.equal(dx, want)


def test_a_cache_goes_on_where_an_option_is_set() -> None:
    x = tokens(6, 3 * WIDTH, grad=False)
    for make in (lambda attention: attention, fusible.Sequential):
        attention = fusible.MultiHeadedSelfAttention(WIDTH, 2)
        model, cache = make(attention), fusible.KVCache(1, 8, dtype=torch.float32)
        with torch.no_grad():
            model(x[:5], torch.tensor([5]), cache)
            cache.advance([5])
            attention.scale = 0.5
            y = model(x[5:], torch.tensor([1]), cache)
            want = fusible.MultiHeadedSelfAttention(WIDTH, 2, scale=0.5)(x)[5:]
        assert torch.allclose(y, want, atol=1e-6)


def test_an_op_in_the_place_of_the_modules_own_keeps_what_is_not_set() -> None:
    dropout = fusible.Dropout(0.5)
    (bound,) = dropout.local_ops()
    vars(dropout).update(dropout.exchanged({bound.op: bound.op.with_(stream=3)}))
    dropout.p = 0.25
    (now,) = dropout.local_ops()
    assert (now.op.p, now.op.stream) == (0.25, 3)  # type: ignore[attr-defined]
    vars(dropout).update(dropout.exchanged({now.op: now.op.with_(p=0.1)}))
    with pytest.raises(ArgumentError, match=r"p of a Dropout that parallelize has laid out: expected 0\.25, got 0\.5; set it before\."):
        dropout.p = 0.5
    assert dropout.p == 0.25


def test_reset_parameters_follows_the_options() -> None:
    norm = fusible.LayerNorm(WIDTH)
    norm.zero_centered_gamma = True
    norm.reset_parameters()
    assert not norm.weight.any() and not norm.bias.any()


def test_a_users_subclass_may_have_attributes_of_these_names() -> None:
    class Own(fusible.Linear):
        def __init__(self, device: str) -> None:
            super().__init__(WIDTH, WIDTH)
            self.device = device

    own = Own("here")
    own.device = "there"
    own.high_precision = True
    assert own.device == "there" and "high_precision" in repr(own)
    with pytest.raises(ArgumentError, match="in_features of Own"):
        own.in_features = 3


def test_options_are_read_in_what_is_compiled() -> None:
    attention = fusible.MultiHeadedSelfAttention(WIDTH, 2)
    assert torch.compile(lambda x: x * attention.heads, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [2.0, 2.0]


def test_an_option_cannot_be_deleted() -> None:
    norm = fusible.RMSNorm(WIDTH)
    with pytest.raises(ArgumentError, match="eps of RMSNorm: expected a value, got none"):
        del norm.eps
    assert norm.eps == 1e-5
