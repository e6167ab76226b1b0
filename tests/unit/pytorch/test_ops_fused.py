"""The fused operations of ``fusible.pytorch.ops.fused``: placed in a Sequential, registered, and called from a user's own code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusible
from fusible import fusions, nvte, tex
from fusible.errors import ArgumentError, NotServedError
from fusible.ops import MMT, Add
from fusible.pytorch import ops
from fusible.pytorch.export import export
from fusible.pytorch.ops import fused
from fusible.pytorch.ops.fused.base import Adapted, AdaptedForward, Part

ROWS, WIDTH = 32, 64  # whole blocks of MXFP8 either way
RECIPES = {
    "none": None,
    "delayed": fusible.DelayedScaling(amax_history_len=4),
    "current": fusible.Float8CurrentScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
}


def _linear(out: int = WIDTH) -> ops.BasicLinear:
    return ops.BasicLinear(WIDTH, out)


def _bias(size: int = WIDTH) -> ops.Bias:
    bias = ops.Bias(size)
    torch.nn.init.normal_(bias.bias)
    return bias


@dataclass(frozen=True)
class Case:
    cls: type[Adapted]
    parts: dict[str, Callable[[], Any]]
    """The basic operations by the constructor's names; None for what is left out."""
    extra: int = 0
    name: str = ""

    def __str__(self) -> str:
        return self.cls.__name__ + (f"-{self.name}" if self.name else "")

    @property
    def forward(self) -> bool:
        return issubclass(self.cls, AdaptedForward)

    def make(self) -> dict[str, Any]:
        return {name: None if part is None else part() for name, part in self.parts.items()}


NOTHING: Any = None
CASES = [
    Case(fused.ForwardLinearBiasAdd, {"linear": _linear, "bias": _bias, "add": ops.AddExtraInput}, 1),
    Case(fused.ForwardLinearBiasAdd, {"linear": _linear, "bias": NOTHING, "add": lambda: ops.AddExtraInput(in_place=True)}, 1, "no_bias"),
    Case(fused.ForwardLinearScaleAdd, {"linear": _linear, "scale": lambda: ops.ConstantScale(0.75), "add": ops.AddExtraInput}, 1),
    Case(fused.ForwardLinearBiasActivation, {"linear": _linear, "bias": _bias, "activation": NOTHING}, 0, "bias"),
    Case(fused.ForwardLinearBiasActivation, {"linear": _linear, "bias": NOTHING, "activation": ops.GELU}, 0, "gelu"),
    *(
        Case(fused.ForwardLinearBiasActivation, {"linear": _linear, "bias": _bias, "activation": act}, 0, f"bias_{act.__name__}")
        for act in (ops.GELU, ops.SiLU, ops.SReLU)
    ),
    Case(
        fused.ForwardLinearBiasActivation,
        {"linear": lambda: _linear(2 * WIDTH), "bias": lambda: _bias(2 * WIDTH), "activation": ops.SwiGLU},
        0,
        "bias_SwiGLU",
    ),
    Case(fused.BackwardLinearAdd, {"backward_add": ops.MakeExtraOutput, "linear": _linear}),
    Case(fused.BackwardLinearScale, {"linear": _linear, "scale": lambda: ops.ConstantScale(0.75)}),
    *(
        Case(fused.BackwardActivationBias, {"bias": _bias, "activation": act}, 0, act.__name__)
        for act in (ops.GELU, ops.ErfGELU, ops.QGELU, ops.ReLU, ops.SiLU, ops.SReLU)
    ),
    Case(fused.BackwardAddRMSNorm, {"add": ops.MakeExtraOutput, "rmsnorm": lambda: ops.RMSNorm(WIDTH)}),
    Case(fused.BackwardAddLayerNorm, {"add": lambda: ops.MakeExtraOutput(in_place=True), "layernorm": lambda: ops.LayerNorm(WIDTH)}),
]


def _overriding(cls: type[Adapted]) -> type[Adapted]:
    """A subclass with passes of its own, so that a plan calls ``fuser_forward`` and ``fuser_backward``."""

    class Own(cls):  # type: ignore[misc, valid-type]
        called = 0

        def _count(self) -> None:
            Own.called += 1

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._count()
        return super(Own, self).fuser_forward(*args, **kwargs)

    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._count()
        return super(Own, self).fuser_backward(*args, **kwargs)

    if issubclass(cls, AdaptedForward):
        Own.fuser_forward = forward  # type: ignore[method-assign]
    else:
        Own.fuser_backward = backward  # type: ignore[method-assign]
    return Own


def _train(model: Any, extra: int, recipe: Any, dtype: torch.dtype, steps: int = 2) -> list[torch.Tensor]:
    """Everything that training steps on the same tensors give: outputs, gradients of inputs and of parameters."""
    generator = torch.Generator().manual_seed(0)
    results: list[torch.Tensor] = []
    for _ in range(steps):
        tensors = [torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_() for _ in range(1 + extra)]
        with fusible.autocast(enabled=recipe is not None, recipe=recipe):
            out = model(*tensors)
        outs = out if isinstance(out, tuple) else (out,)
        torch.autograd.backward(outs, [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outs])
        results += [*(o.detach() for o in outs), *(t.grad for t in tensors)]  # type: ignore[misc]
    return results + [p.grad for p in model.parameters()]


def _basics(case: Case, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    torch.manual_seed(1)
    made = case.make()
    for op in made.values():
        if op is not None:
            op.to(dtype)
    return made


def _around(inner: list[Any]) -> ops.Sequential:
    """Between an identity and a linear layer, which asks for quantized inputs."""
    torch.manual_seed(2)
    return ops.Sequential(ops.Identity(), *inner, ops.BasicLinear(WIDTH, WIDTH, dtype=torch.bfloat16))


def _register(cls: Any) -> Any:
    if issubclass(cls, AdaptedForward):
        return ops.register_forward_fusion(cls.fuse_forward_ops)
    return ops.register_backward_fusion(cls.fuse_backward_ops)


def _assert_same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_unfused_sequential_bit_for_bit(case: Case, recipe: Any) -> None:
    # The engine picks the same fused passes for the plain operations, so that nothing may differ.
    basics = _basics(case)
    present = [op for op in basics.values() if op is not None]
    wanted = _train(_around(copy.deepcopy(present)), case.extra, recipe, torch.bfloat16)
    placed = case.cls(**copy.deepcopy(basics))
    _assert_same(_train(_around([placed]), case.extra, recipe, torch.bfloat16), wanted)
    with _register(case.cls):
        _assert_same(_train(_around(copy.deepcopy(present)), case.extra, recipe, torch.bfloat16), wanted)
    own = _overriding(case.cls)
    _assert_same(_train(_around([own(**copy.deepcopy(basics))]), case.extra, recipe, torch.bfloat16), wanted)
    assert own.called == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_operations_called_one_by_one(case: Case) -> None:
    basics = _basics(case, torch.float32)
    own = _overriding(case.cls)(**copy.deepcopy(basics))
    alone = torch.nn.ModuleList(op for op in basics.values() if op is not None)

    def one_by_one(x: torch.Tensor, *extra: torch.Tensor) -> Any:
        left, outputs = list(extra), []
        for op in alone:
            out = op(x, *(left.pop(0) for _ in range(op.num_extra_inputs)))  # type: ignore[operator, union-attr, arg-type]
            x, *more = out if isinstance(out, tuple) else (out,)
            outputs += more
        return (x, *outputs) if outputs else x

    one_by_one.parameters = alone.parameters  # type: ignore[attr-defined]
    got, wanted = (_train(model, case.extra, None, torch.float32, steps=1) for model in (own, one_by_one))
    for one, other in zip(got, wanted, strict=True):
        # Sums of at most 2 * WIDTH products of magnitude about 1, taken in another order, and a few roundings between the operations.
        torch.testing.assert_close(one, other, rtol=0, atol=2 * WIDTH * torch.finfo(torch.float32).eps * float(other.abs().max()))


def _kernels(model: Any, extra: int) -> list[str]:
    with tex.record() as calls:
        _train(model, extra, None, torch.bfloat16, steps=1)
    return [call.function for call in calls]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_plan_calls_the_kernels_of_the_engine(case: Case) -> None:
    basics = _basics(case)
    present = [op for op in basics.values() if op is not None]
    plain = _kernels(ops.Sequential(*copy.deepcopy(present)), case.extra)
    assert _kernels(ops.Sequential(case.cls(**copy.deepcopy(basics))), case.extra) == plain
    assert _kernels(ops.Sequential(_overriding(case.cls)(**copy.deepcopy(basics))), case.extra) == plain


@pytest.mark.parametrize("case", CASES, ids=str)
def test_inference_equals_that_of_the_unfused_sequential(case: Case) -> None:
    basics = _basics(case)
    plain, placed, own = ([op for op in basics.values() if op is not None], [case.cls(**basics)], [_overriding(case.cls)(**basics)])
    tensors = [torch.randn(ROWS, WIDTH, dtype=torch.bfloat16) for _ in range(1 + case.extra)]
    results = []
    with torch.no_grad(), fusible.autocast(recipe=fusible.MXFP8BlockScaling()):
        for inner in (plain, placed, own):
            out = _around(inner)(*tensors)
            results.append(list(out) if isinstance(out, tuple) else [out])
    _assert_same(results[1], results[0])
    _assert_same(results[2], results[0])


def test_explain_names_the_fused_pass_of_a_placed_one() -> None:
    case = CASES[0]
    plain, placed = (ops.Sequential(*inner).explain() for inner in (list(_basics(case).values()), [case.cls(**_basics(case))]))
    assert "mmt_add_residual_fwd_fused" in placed
    assert placed == plain


def test_a_placed_one_can_be_compiled_and_replayed() -> None:
    pytest.importorskip("jaxlib")
    case = CASES[0]
    model = ops.Sequential(case.cls(**_basics(case, torch.float32)))
    tensors = [torch.randn(ROWS, WIDTH) for _ in range(2)]
    eager = [model(*tensors).detach() for _ in range(3)]
    _assert_same(eager[1:], eager[:1] * 2)
    # Two programs that add up WIDTH products of magnitude about 1 in their own orders.
    compiled = model.compile("xla")(*tensors).detach()
    torch.testing.assert_close(compiled, eager[0], rtol=0, atol=WIDTH * torch.finfo(torch.float32).eps * float(eager[0].abs().max()))


class Halved(ops.BasicOperation):
    def op_forward(self, ctx: Any, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        return input_ / 2

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return grad_output / 2, ()


def test_a_placed_one_runs_by_a_pass_that_is_registered_later() -> None:
    ran: list[nvte.Tensor] = []

    def mine(mmt: MMT, add: Add, x: nvte.Tensor) -> nvte.Tensor:
        ran.append(x)
        return add.inference(mmt.inference(x))

    bias = next(case for case in CASES if case.name == "bias")
    model, x = ops.Sequential(bias.cls(**_basics(bias, torch.float32))), torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        y = model(x)
        fusions.register_fusion_inference(mine)
        try:
            torch.testing.assert_close(model(x), y)
        finally:
            fusions.unregister_fusion(mine)
    assert len(ran) == 1


class InDouble(ops.FusedOperation):
    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **_: Any) -> Any:
        return 2 * input_.double(), [()] * len(self.basic_ops)

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: torch.Tensor, **_: Any) -> Any:
        return (2 * grad_output).float(), [()] * len(self.basic_ops), [()] * len(self.basic_ops)


def test_a_callers_own_passes_may_return_another_dtype_than_a_plan_would() -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    y = ops.Sequential(InDouble([ops.Identity(), ops.ReLU()]))(x)
    assert y.dtype is torch.float64 and torch.equal(y, 2 * x.double())
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 2.0))


def test_what_cannot_be_exported_is_named_by_the_callers_own_code_alone(tmp_path: Path) -> None:
    """A placed one of the package's is no code of the caller's."""
    bias = next(case for case in CASES if case.name == "bias")
    model = ops.Sequential(bias.cls(**_basics(bias)), _overriding(bias.cls)(**_basics(bias)), Halved())
    with pytest.raises(ArgumentError, match="to export: expected operations of ours alone, got Halved, Own; "):
        export(model, tmp_path / "model", torch.randn(ROWS, WIDTH, dtype=torch.bfloat16))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matching_puts_every_window_together_and_leaves_the_rest(case: Case) -> None:
    fuse = getattr(case.cls, "fuse_forward_ops" if case.forward else "fuse_backward_ops")
    window = [op for op in _basics(case).values() if op is not None]
    others = [ops.Identity(), ops.Dropout(0.1), ops.Identity()]
    again = [op for op in _basics(case).values() if op is not None]
    result = fuse([others[0], *window, others[1], *again, others[2]], recipe=None)
    assert [type(op) for op in result] == [ops.Identity, case.cls, ops.Dropout, case.cls, ops.Identity]
    assert [id(op) for op in result[1].basic_ops] == [id(op) for op in window]
    assert result[0] is others[0]
    # Half a window is none.
    assert fuse(window[1:], recipe=None) == window[1:]


def test_matching_takes_the_longest_window() -> None:
    linear, bias, activation = _linear(), _bias(), ops.SiLU()
    (whole,) = fused.ForwardLinearBiasActivation.fuse_forward_ops([linear, bias, activation])
    assert len(whole.basic_ops) == 3  # type: ignore[arg-type]
    # The product can do nothing for this activation.
    assert fused.ForwardLinearBiasActivation.fuse_forward_ops([linear, activation]) == [linear, activation]


def test_what_fuses_one_pass_leaves_its_operations_to_the_fusions_of_the_other() -> None:
    placed = fused.BackwardLinearAdd(backward_add=ops.MakeExtraOutput(), linear=_linear())
    seen: list[list[str]] = []

    def look(chain: list[Any], **unused: Any) -> list[Any]:
        seen.append([type(op).__name__ for op in chain])
        return chain

    def look_too(chain: list[Any], **unused: Any) -> list[Any]:
        return look(chain)

    with ops.register_forward_fusion(look), ops.register_backward_fusion(look_too):
        ops.Sequential(placed, _bias()).explain()
    assert seen[:2] == [["MakeExtraOutput", "BasicLinear", "Bias"], ["BackwardLinearAdd", "Bias"]] == seen[2:]  # explain asks them again, to tell


def test_nothing_is_registered() -> None:
    explained = ops.Sequential(*_basics(CASES[0]).values()).explain()
    assert "ForwardLinearBiasAdd" not in explained


def test_a_wrong_operation_is_refused_in_one_sentence() -> None:
    with pytest.raises(ArgumentError, match=r"^linear of ForwardLinearBiasAdd: expected BasicLinear, got Bias; give .*\.$"):
        fused.ForwardLinearBiasAdd(linear=_bias(), bias=None, add=ops.AddExtraInput())  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^bias of ForwardLinearBiasAdd: expected Bias or None, got int; "):
        fused.ForwardLinearBiasAdd(linear=_linear(), bias=3, add=ops.AddExtraInput())  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^rmsnorm of BackwardAddRMSNorm: expected RMSNorm, got NoneType; "):
        fused.BackwardAddRMSNorm(add=ops.MakeExtraOutput(), rmsnorm=None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^activation of BackwardActivationBias: expected GELU or ErfGELU or .*, got SwiGLU; "):
        fused.BackwardActivationBias(bias=_bias(), activation=ops.SwiGLU())  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [fused.UserbuffersForwardLinear, fused.UserbuffersBackwardLinear])
def test_userbuffers_say_what_they_need_and_match_nothing(cls: Any) -> None:
    with pytest.raises(NotServedError, match=rf"^{cls.__name__}: expected a backend that overlaps communication buffers with products, got none; "):
        cls(linear=_linear(), bias=None, reduce_scatter=None)
    chain = [_linear(), _bias()]
    fuse = getattr(cls, "fuse_forward_ops" if "Forward" in cls.__name__ else "fuse_backward_ops")
    assert fuse(chain, recipe=None) == chain


class Behind(AdaptedForward):
    """A linear layer with a bias, behind operations that no fused pass takes together with them."""

    parts = (Part("first", (ops.Identity,)), Part("second", (ops.LayerNorm,)), Part("linear", (ops.BasicLinear,)), Part("bias", (ops.Bias,)))


@pytest.mark.parametrize("before", range(3))
def test_the_fused_passes_inside_of_an_operation_are_where_its_parts_are(before: int) -> None:
    """Wherever it stands, and wherever in it they begin."""
    parts = [ops.Identity(), ops.LayerNorm(WIDTH), _linear(), _bias()]
    others = [ops.ReLU() for _ in range(before)]
    groups, results = [], []
    for inner in (parts, [Behind(**dict(zip(("first", "second", "linear", "bias"), parts, strict=True)))]):
        model, x = ops.Sequential(*others, *inner, ops.ReLU()), torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).requires_grad_()
        y = model(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *(p for part in parts for p in part.parameters())])))
        (fuser,) = model._arranged()
        (plan,) = fuser._plans.values()
        groups.append([(group.start, group.stop, group.fusion and group.fusion.name) for group in (*plan.forward, *plan.inference)])
    assert groups[0] == groups[1] and (before + 2, before + 4, "mmt_add_fwd_fused") in groups[0]
    _assert_same(list(results[1]), list(results[0]))


def test_what_is_put_together_is_seen_by_nvidias_private_names() -> None:
    model = ops.Sequential(ops.Linear(8, 8), ops.AddExtraInput(), nn.Identity(), ops.MakeExtraOutput(), ops.RMSNorm(8), ops.Bias(8))
    model(torch.randn(4, 8), torch.randn(4, 8))
    first, plain, last = model._module_groups
    assert isinstance(plain, nn.Identity)
    (forward,) = first._forward_ops
    assert isinstance(forward[0], fused.ForwardLinearBiasAdd) and forward[1] == [0, 1, 2]
    assert [(type(op), places) for op, places in last._backward_ops] == [(fused.BackwardAddRMSNorm, [0, 1]), (ops.Bias, [2])]
    assert [places for _, places in last._forward_ops] == [[0], [1], [2]]
