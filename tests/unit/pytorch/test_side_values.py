"""Side values, one rule for every container: generated lists against an interpreter of the rule in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from side_values import BLOCKS, WIDTH, Interpreter, Node, Refused, built, generated, leaves
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusible
from fusible import autocast, nvte
from fusible.errors import ArgumentError
from fusible.ops import Op
from fusible.pytorch import ops

LARGEST = 2**22
"""Below it integers and their sums are exact in fp32."""


def _integers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


class Case:
    """A list, its inputs, and what plain torch gives for it: ``wanted``, or None where it has no meaning."""

    def __init__(self, root: Node) -> None:
        self.root, self.made = root, dict[int, Any]()
        self.model = built(root, self.made)
        count = sum(node.kind in ("add", "times") and node.name is None for node in leaves(root))
        self.x, self.extra = _integers(1, 3, WIDTH), [_integers(2 + i, 3, WIDTH) for i in range(count)]
        self.linears = {id(node): node for node in leaves(root) if node.kind == "linear"}
        try:
            self.wanted: list[Tensor] | None = self.interpreted()
        except Refused:
            self.wanted = None

    @property
    def exact(self) -> bool:
        return self.wanted is not None and all(value.abs().max() < LARGEST for value in self.wanted)

    def interpreted(self) -> list[Tensor]:
        x, *extra = [value.clone().requires_grad_() for value in (self.x, *self.extra)]
        weights = {key: self.made[key].weight.detach().clone().requires_grad_() for key in self.linears}
        interpreter = Interpreter(extra, weights)
        y = interpreter.run(self.root, x, [])
        outputs = [y, *interpreter.outputs]
        self.parameters = [(self.made[key].weight, weight) for key, weight in weights.items()]
        return [*outputs, *_gradients(outputs, [x, *extra, *weights.values()])]

    def call(self, x: Tensor, *extra: Tensor) -> Any:
        """The model as its kind takes extra inputs."""
        return self.through(self.model)(x, *extra)

    def through(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """What is called as the model is, as a function of its inputs one after another."""
        return call if self.root.kind == "ops" else lambda x, *extra: call(x, extra_inputs=extra)

    def called(self, call: Callable[..., Any]) -> list[Tensor]:
        x, *extra = [value.clone().requires_grad_() for value in (self.x, *self.extra)]
        result = call(x, *extra)
        outputs = list(result) if isinstance(result, tuple) else [result]
        return [*outputs, *_gradients(outputs, [x, *extra, *(own for own, _ in self.parameters)])]


def _gradients(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    dys = [_integers(50 + i, *y.shape) for i, y in enumerate(outputs)]
    found = torch.autograd.grad([y for y in outputs if y.requires_grad], inputs, [dy for dy, y in zip(dys, outputs, strict=True) if y.requires_grad],
                                allow_unused=True)  # fmt: skip
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(found, inputs, strict=True)]


def _check(case: Case, call: Callable[..., Any]) -> None:
    assert case.wanted is not None
    for got, wanted in zip(case.called(call), case.wanted, strict=True):
        assert torch.equal(got, wanted), (got, wanted)


def _sweep(seeds: range) -> tuple[int, int]:
    """Every list alone: trained, inferred, checkpointed, explained, trained again (a replay). How many were served, and how many refused."""
    served = refused = 0
    for seed in seeds:
        case = Case(generated(seed, wild=seed % 3 == 0))
        if case.wanted is None:
            with pytest.raises(ArgumentError, match=r"^[^\n]*: expected [^\n]*; [^\n]*\.$"):
                case.call(case.x, *case.extra)
            refused += 1
        elif case.exact:
            _check(case, case.call)
            with torch.no_grad():
                result = case.call(case.x, *case.extra)
            for got, wanted in zip(result if isinstance(result, tuple) else (result,), case.wanted, strict=False):
                assert torch.equal(got, wanted)
            _check(case, lambda *inputs, call=case.call: checkpoint(call, *inputs, use_reentrant=False))
            assert case.model.explain(case.x)
            _check(case, case.call)
            served += 1
    return served, refused


def test_generated_lists_mean_what_the_rule_says() -> None:
    served, refused = _sweep(range(90))
    assert served > 40 and refused > 15


@pytest.mark.slow
def test_many_generated_lists_mean_what_the_rule_says() -> None:
    served, refused = _sweep(range(1000, 4000))
    assert served > 1400 and refused > 500


def test_under_every_container_the_same_list_means_the_same() -> None:
    """What a container inside gives it gives outside, but for what a residual adds."""
    for seed in range(200, 220):
        root = generated(seed, outer="ops", torch_ops=False)
        if any(node.name is None and node.kind != "scale" and node.kind != "linear" for node in leaves(root)):
            continue
        for wrap in (lambda m: m, fusible.Sequential, ops.Sequential, lambda m: fusible.Sequential(ops.Sequential(m)), nn.Sequential):
            case = Case(root)
            if case.exact:
                _check(case, case.through(wrap(case.model)))


@pytest.mark.parametrize("recipe", [fusible.DelayedScaling(), fusible.Float8CurrentScaling()], ids=["delayed", "current"])
def test_generated_lists_in_8_bits(recipe: Any) -> None:
    """A signed permutation of integers up to 16 is exact in E4M3 and E5M2 holds the signs of gradients, so the values are still the rule's; larger
    ones are rounded, to 4 significant bits and once for each of up to some ten layers."""
    compared = 0
    for seed in range(300, 330):
        case = Case(generated(seed, torch_ops=False))
        if not case.exact or not case.linears:
            continue
        with autocast(recipe=recipe):
            y = case.called(case.call)[0]
        wanted = case.wanted[0]  # type: ignore[index]
        assert (y - wanted).abs().max() <= len(leaves(case.root)) * 2.0**-4 * wanted.abs().max()
        compared += 1
    assert compared >= 5


def test_generated_lists_compiled() -> None:
    """By the whole-program executor, and by ``torch.compile``, which takes no extra outputs."""
    compared = 0
    for seed in range(400, 440):
        case = Case(generated(seed, torch_ops=False))
        if case.exact and compared < 3:
            torch._dynamo.reset()
            _check(case, case.through(torch.compile(case.model, fullgraph=True, backend="aot_eager")))
            _check(case, case.through(case.model.compile("xla")))
            compared += 1
    assert compared == 3


def _gives(channel: str | None, *, to_caller: bool = False) -> ops.BasicOperation:
    return ops.MakeExtraOutput().set_extra_output_channel(0, channel, output_to_caller=to_caller)


def _takes(channel: str | None) -> ops.BasicOperation:
    return ops.AddExtraInput().set_extra_input_channel(0, channel)


def _crossed() -> list[ops.BasicOperation]:
    return [_gives("a"), ops.ConstantScale(2.0), _gives("b"), ops.ConstantScale(3.0), _takes("a"), ops.ConstantScale(5.0), _takes("b")]


def test_crossed_channels_give_the_same_everywhere() -> None:
    x = torch.ones(2, 4)
    for make in (ops.Sequential, fusible.Sequential, lambda *m: fusible.Sequential(ops.Sequential(*m)), lambda *m: fusible.Residual(*m)):
        assert torch.equal(make(*_crossed())(x), torch.full((2, 4), 38.0 if make(*_crossed()).__class__ is fusible.Residual else 37.0))
    assert torch.equal(ops.Sequential(fusible.Residual(*_crossed()), fusible.Residual(*_crossed()))(x), torch.full((2, 4), 38.0**2))


def test_a_channel_that_changes_takes_effect_at_the_next_call() -> None:
    for make in (ops.Sequential, fusible.Sequential):
        model, x = make(*_crossed()), torch.ones(2, 4)
        assert torch.equal(model(x), torch.full((2, 4), 37.0))
        model[4].set_extra_input_channel(0, "b")
        assert torch.equal(model(x), torch.full((2, 4), 42.0))
        model[4].set_extra_input_channel(0, "c")
        for _ in range(2):
            with pytest.raises(
                ArgumentError, match="the channel 'c' that AddExtraInput reads: expected an earlier operation that gives it, got none"
            ):
                model(x)
        model[4].set_extra_input_channel(0, "a")
        assert torch.equal(model(x), torch.full((2, 4), 37.0))


READS = "the channel 'a' that AddExtraInput reads: expected an earlier operation that gives it, got"
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: fusible.Sequential(ops.Sequential(_gives("a")), _takes("a")), f"{READS} one in a block that does not hold it"),
    (lambda: fusible.Residual(_takes("a"), _gives("a")), f"{READS} a later one"),
    (lambda: fusible.Sequential(_gives("a"), ops.Sequential(_takes("a"), _gives("a"))), f"{READS} a later one"),
    (lambda: fusible.Residual(_gives("a"), _gives("a")), "the channel 'a': expected one producer, got several"),
    (lambda: fusible.Sequential(ops.AddExtraInput()), "a call of AddExtraInput: expected 1 extra inputs, got 0; give one for each"),
    (lambda: fusible.Residual(nn.Identity(), ops.AddExtraInput()), "a call of Residual: expected 1 extra inputs, got 0; give one for each"),
    (lambda: fusible.Sequential(_gives("a"), nn.Identity(), _takes("a")), f"{READS} none"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_has_no_meaning_is_refused_in_one_sentence(make: Callable[[], Any], message: str) -> None:
    model = make()
    for _ in range(2):
        with pytest.raises(ArgumentError, match=message) as caught:
            model(torch.ones(2, 4))
        assert "\n" not in str(caught.value)


def test_what_is_called_on_its_own_has_its_extra_tensors_still() -> None:
    """A hooked container or operation, and one with a plain module in it, is called between two pipelines."""
    x, seen = torch.ones(2, 4), list[str]()
    hook = lambda module, *_: seen.append(type(module).__name__)  # noqa: E731
    inner = ops.Sequential(ops.AddExtraInput(), ops.ConstantScale(3.0), ops.MakeExtraOutput())
    model = ops.Sequential(ops.ConstantScale(2.0), inner, ops.AddExtraInput())
    inner.register_forward_hook(hook)
    y, extra = model(x, 10 * x, 100 * x)
    assert torch.equal(y, torch.full((2, 4), 136.0)) and torch.equal(extra, torch.full((2, 4), 36.0))
    for wrap in (fusible.Sequential, lambda m: fusible.Sequential(nn.Identity(), fusible.Sequential(m)), fusible.Residual):
        y, extra = wrap(model)(x, extra_inputs=[10 * x, 100 * x])
        assert torch.equal(y, torch.full((2, 4), 137.0 if wrap is fusible.Residual else 136.0)) and torch.equal(extra, torch.full((2, 4), 36.0))
    hooked = ops.ConstantScale(2.0)
    hooked.register_forward_hook(hook)
    for each in (hooked, ops.Sequential(ops.ConstantScale(2.0), nn.Identity())):
        for make in (fusible.Sequential, fusible.Residual):
            added = 3.0 if make is fusible.Residual else 2.0
            assert torch.equal(make(each)(x), torch.full((2, 4), added))
    assert seen == ["Sequential"] * 4 + ["ConstantScale"] * 2


@pytest.mark.parametrize("make", [ops.Sequential, fusible.Sequential, fusible.Residual], ids=lambda make: f"{make.__module__}.{make.__name__}")
def test_extra_tensors_of_a_padded_batch_have_its_form(make: Callable[..., Any]) -> None:
    """What stands for padding in an extra input takes no part, and is 0 in an extra output; each sequence is as if it were alone."""
    torch.manual_seed(3)
    attention = ops.Linear(32, 96), fusible.MultiHeadedSelfAttention(32, 2)
    model = make(ops.AddExtraInput(), *attention, ops.MakeExtraOutput(), nn.Identity())
    x, other, lengths = torch.randn(2, 5, 32), torch.randn(2, 5, 32), torch.tensor([5, 3])

    def call(x: Tensor, other: Tensor, **batch: Any) -> Any:
        return model(x, other, **batch) if make is ops.Sequential else model(x, extra_inputs=[other], **batch)

    y, extra = call(x, other, seq_lens=lengths)
    for row, length in enumerate(lengths.tolist()):
        for got, alone in zip((y, extra), call(x[row, :length], other[row, :length], seq_lens=torch.tensor([length])), strict=True):
            torch.testing.assert_close(got[row, :length], alone, rtol=1e-5, atol=1e-5)
            assert not got[row, length:].any()


class _Begin(Op):
    """``y = x``; the side output "mark" is x."""

    side_outputs = ("mark",)

    def forward(self, x: Any) -> Any:
        return x, {}, {"mark": x}

    def backward(self, ctx: Any, dy: Any, mark: Any = None) -> Any:
        return dy if mark is None else nvte.add(dy, mark, self.dx_dtype), []


class _End(Op):
    """``y = x + mark``, or with ``deaf`` ``y = x``: the mark then has no gradient."""

    side_inputs = ("mark",)

    def __init__(self, deaf: bool) -> None:
        super().__init__()
        self.deaf = deaf

    def forward(self, x: Any, mark: Any) -> Any:
        return (x if self.deaf else nvte.add(x, mark, self.y_dtype)), {}

    def backward(self, ctx: Any, dy: Any) -> Any:
        return dy, [], {"mark": None if self.deaf else dy}


class _Module(fusible.BaseModule):
    def __init__(self, op: Op) -> None:
        nn.Module.__init__(self)
        super().__init__(op)


def test_a_missing_gradient_of_an_inner_bracket_is_not_the_outer_ones() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    inner = [_Module(_Begin()), ops.ConstantScale(3.0), _Module(_End(deaf=True))]
    model = fusible.Sequential(_Module(_Begin()), ops.ConstantScale(2.0), *inner, _Module(_End(deaf=False)))
    y = model(x)
    y.sum().backward()
    assert torch.equal(y, torch.full((2, 4), 7.0)) and torch.equal(x.grad, torch.full((2, 4), 7.0))  # type: ignore[arg-type]


def test_every_block_is_a_scope() -> None:
    x = torch.ones(2, 4)
    for make in BLOCKS.values():
        block = make(_gives("a"), ops.ConstantScale(2.0), _takes("a"))
        once = block(x)
        assert torch.equal(ops.Sequential(block, block, make(*block))(x), once * once * once)
