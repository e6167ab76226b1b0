"""Proof that a fused pass is interchangeable with the passes it replaces, for any registered fusion.

A fusion's pattern, each choice of its union types, is put into a pipeline: alone, and between two products, so that it is asked to take and to emit
8-bit tensors. The plan binds the types. Then the fused pass and the sequence run side by side on the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from ops_table import OUT, RECORD_OF
from ops_tolerance import assert_honest, assert_interchangeable

from fusible import tex
from fusible.compute_pipeline import ComputePipeline, PlanRequest
from fusible.fusions import Fusion, epoch, registered
from fusible.nvte import DType, Pass, Sequences, Tensor, Type, bgrad_cast, element, is_quantized_type, make_nvte_tensor, nvte_dtype, running
from fusible.ops import MMT, Add, Context, LayerNorm, Op, RMSNorm
from fusible.quantized import (
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    Format,
    HighPrecision,
    QuantizerRole,
    Recipe,
)

TOKENS = 13

Asks = tuple[tuple[int, str, Type | None], ...]
"""Types that ops of a pattern ask for in the place of their own: the op's place in it, the attribute, the type."""


@dataclass(frozen=True)
class Mode:
    """A recipe with the dtypes of activations and parameters."""

    name: str
    recipe: Recipe | None
    activation: torch.dtype
    parameters: torch.dtype


def _all_but(kept: str) -> CustomRecipe:
    """Current scaling, with the tensors of one role left as they are."""

    def quantizer(role: QuantizerRole) -> Float8CurrentScalingQuantizer | None:
        format = tex.DType.kFloat8E5M2 if role.tensor_type.startswith("grad") else tex.DType.kFloat8E4M3
        return None if role.tensor_type == kept else Float8CurrentScalingQuantizer(format)

    return CustomRecipe(quantizer)


PARTS = tuple(
    Mode(f"current but for the {kept}", _all_but(kept), torch.bfloat16, torch.float32) for kept in ("input", "weight", "grad_output")
) + tuple(
    Mode(f"current with a backward {how}", Float8CurrentScaling(backward_override=how), torch.bfloat16, torch.float32)
    for how in ("dequantized", "high_precision")
)
"""Some of a product's operands in 8 bits and others not: a fusion that is made for all of them is made of these by its ops."""

MODES = (
    Mode("fp32", None, torch.float32, torch.float32),
    Mode("bf16", None, torch.bfloat16, torch.bfloat16),
    Mode("fp16", None, torch.float16, torch.float16),
    Mode("bf16 on fp32 weights", None, torch.bfloat16, torch.float32),
    Mode("widened", HighPrecision(lowest="float32"), torch.bfloat16, torch.bfloat16),
    Mode("delayed", DelayedScaling(), torch.bfloat16, torch.float32),
    Mode("delayed E4M3 fp32", DelayedScaling(fp8_format=Format.E4M3), torch.float32, torch.float32),
    Mode("current", Float8CurrentScaling(), torch.bfloat16, torch.float32),
    Mode("current powers of 2 fp16", Float8CurrentScaling(use_power_2_scales=True), torch.float16, torch.float16),
    *PARTS,
)


@dataclass(frozen=True)
class Case:
    """A fusion with one choice of the types of its pattern."""

    fusion: Fusion
    types: tuple[type[Op], ...]

    @property
    def name(self) -> str:
        return f"{self.fusion.kind}:{self.fusion.name}:{'+'.join(t.__name__ for t in self.types)}"


def cases() -> Iterator[Case]:
    """Every choice of types of every fusion that is registered now."""
    for kind in ("inference", "forward", "backward"):
        for fusion in registered(kind):
            for types in product(*(sorted(allowed, key=lambda t: t.__name__) for allowed in fusion.pattern)):
                yield Case(fusion, types)


@dataclass(frozen=True)
class Bound:
    """The pattern's ops as a plan has bound them, with the tensors to run them on."""

    ops: tuple[Op, ...]
    x: Tensor
    dy: Tensor
    scales: dict[str, torch.Tensor]
    values: dict[str, Any]
    """Of every keyword that the ops take in forward (by name)."""
    residual_grads: dict[str, Tensor]
    activation: torch.dtype
    needed: bool


def modes_of(case: Case) -> Iterator[Mode]:
    """All modes, but those in which backward computes otherwise than forward where the case has a product that cannot."""
    can = all(issubclass(type_, MMT) <= type_.overridable for type_ in case.types)
    yield from (mode for mode in MODES if can or mode.recipe is None or mode.recipe.backward_override is None)


def prove(case: Case, mode: Mode) -> int:
    """Raises ``AssertionError`` with what differs; gives the number of comparisons that were made."""
    count = 0
    for between, tokens in ((False, TOKENS), (True, TOKENS), (False, 0)):
        choices = [()] if case.fusion.kind == "inference" or not tokens else list(_frozen(case))
        for frozen in choices:
            bound = _bind(case, mode, between, tokens, frozen)
            where = f"{case.name}, {mode.name}{', between products' if between else ''}, {tokens} tokens, frozen {list(frozen) or 'none'}"
            count += 1
            if case.fusion.kind == "inference":
                _prove_inference(case.fusion, bound, where)
            elif case.fusion.kind == "forward":
                _prove_forward(case.fusion, bound, where)
            elif bound.needed:
                _prove_backward(case.fusion, bound, where)
    return count


def prove_asked(case: Case, mode: Mode, between: bool) -> int:
    """As ``prove``, of a pattern of which one op asks for one type other than its own; of a choice of types that the fusion does not take, no plan
    has it. Gives the number of those that it takes."""
    count = 0
    for place, type_ in enumerate(case.types):
        for name in ("x", "dy", *(RECORD_OF[type_].parameters if issubclass(type_, MMT | Add) else ())):
            for asked in (None, DType.Float32, DType.BFloat16, DType.Float8E4M3):
                if asked is DType.Float8E4M3 and name == "x" and type_ in (LayerNorm, RMSNorm):
                    continue  # a norm takes no 8 bits, fused or not
                bound = _bind(case, mode, between, TOKENS, (), ((place, f"{name}_dtype", asked),))
                inside = place < len(case.types) - 1 if name == "dy" else place > 0
                kept_apart = (
                    is_quantized_type(bound.ops[place].type_of(name))
                    and inside
                    and not issubclass(type_, MMT)
                    and (name == "dy") == (case.fusion.kind == "backward")
                )
                takes = case.fusion.matches(bound.ops)
                assert takes is not kept_apart, f"{case.name}, {mode.name}: {name} of op {place} asked for in {asked}, and it is taken: {takes}"
                if not takes:
                    continue
                count += 1
                where = f"{case.name}, {mode.name}{', between products' if between else ''}, {name} of op {place} asked for in {asked}"
                if case.fusion.kind == "inference":
                    _prove_inference(case.fusion, bound, where)
                elif case.fusion.kind == "forward":
                    _prove_forward(case.fusion, bound, where, backward=False)
                else:
                    _prove_backward(case.fusion, bound, where)
    return count


def calls_of(case: Case, mode: Mode, between: bool) -> list[str]:
    """The functions of tex that the fused pass calls, in their order. Raises ``AssertionError`` where a plan would not take the fusion."""
    bound = _bind(case, mode, between, TOKENS, ())
    assert case.fusion.matches(bound.ops), f"{case.name}, {mode.name}: it is not taken"
    return _calls_of(case, bound)[0]


def prove_calls(case: Case, mode: Mode) -> int:
    """Raises ``AssertionError`` where the fused pass computes more than its ops do, whichever gradients are wanted. Gives how often it does less."""
    fewer = 0
    for between in (False, True):
        for frozen in _frozen(case) if case.fusion.kind == "backward" else [()]:
            bound = _bind(case, mode, between, TOKENS, frozen)
            if case.fusion.kind == "backward" and not bound.needed:
                continue
            fused, unfused = ([name for name in calls if name not in ("prim_cast", "prim_copy")] for calls in _calls_of(case, bound))
            assert len(fused) <= len(unfused), f"{case.name}, {mode.name}, frozen {list(frozen)}: {fused} for {unfused}"
            fewer += len(fused) < len(unfused)
    return fewer


def _calls_of(case: Case, bound: Bound) -> tuple[list[str], list[str]]:
    """The calls of the fused pass, and those of its ops."""
    fused: list[str] = []
    unfused: list[str] = []
    kind = case.fusion.kind
    contexts = _sequence_forward(bound)[1]
    with tex.listening(lambda call: unfused.append(call.method.__name__)):
        if kind == "backward":
            _sequence_backward(bound, [dict(ctx) for ctx in contexts])
        elif kind == "forward":
            _sequence_forward(bound)
        else:
            _sequence_inference(bound)
    given = (*contexts, bound.dy) if kind == "backward" else (bound.x,)
    with running(Pass(kind, bound.scales)), tex.listening(lambda call: fused.append(call.method.__name__)):
        case.fusion.function(*bound.ops, *given, **_fused_keywords(bound, case.fusion))
    return fused, unfused


def contexts_after(case: Case, mode: Mode) -> list[Context]:
    """What a fused backward leaves of its contexts."""
    bound = _bind(case, mode, False, TOKENS, ())
    contexts = _sequence_forward(bound)[1]
    with running(Pass("backward", bound.scales)):
        case.fusion.function(*bound.ops, *contexts, bound.dy, **_fused_keywords(bound, case.fusion))
    return contexts


def _frozen(case: Case) -> Iterator[tuple[str, ...]]:
    """Every set of gradients that nobody wants: of the input, and of parameters by ``<place>.<name>``."""
    names = ["x", *(f"{i}.{name}" for i, type_ in enumerate(case.types) for name in RECORD_OF[type_].parameters)]
    for wanted in product((True, False), repeat=len(names)):
        yield tuple(name for name, is_wanted in zip(names, wanted, strict=True) if not is_wanted)


def _bind(case: Case, mode: Mode, between: bool, tokens: int, frozen: Sequence[str], asks: Asks = ()) -> Bound:
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def weight(columns: int, width: int) -> MMT:
        return MMT(make_nvte_tensor(random(columns, width, dtype=mode.parameters) / width**0.5))

    width = 11 if case.types[0] is MMT else OUT
    # The plan is asked about side values that an op outside of the pattern gives or takes; the pattern itself is bound all the same.
    inside: list[Op] = []
    at = width
    for type_ in case.types:
        assert type_ in RECORD_OF, f"{type_.__name__} has no record in ops_table: enter one, and its fusions are proven"
        record = RECORD_OF[type_]
        values = {name: random(*shape, dtype=mode.parameters) / shape[-1] ** (len(shape) / 2 - 0.5) for name, shape in record.shapes(at).items()}
        made = record.make({name: make_nvte_tensor(value) for name, value in values.items()}, at)
        inside += made
        at = made[0].width(at)
    for place, name, type in asks:
        inside[place] = inside[place].with_(**{name: type})
    opened = [name for op in inside for name in op.side_outputs]
    taken = [name for op in inside for name in op.side_inputs]
    before: list[Op] = [_Gives(name) for name in reversed(taken) if name not in opened]
    after: list[Op] = [_Takes(name) for name in opened if name not in taken]
    if between:
        before, after = [*before, weight(width, 9)], [weight(9, at), *after]
    ops = [*before, *inside, *after]
    start = len(before)
    args = tuple(
        tuple((arg.dtype, f"{i - start}.{name}" not in frozen) for name, arg in zip(op.arg_names, op.args, strict=True)) for i, op in enumerate(ops)
    )
    x_grad = "x" not in frozen or between
    request = PlanRequest(mode.recipe, nvte_dtype(mode.activation), 9 if between else width, x_grad, args, (True,) * len(ops), False, epoch())
    plan = ComputePipeline(ops).plan(request)
    bound = plan.ops[start : start + len(inside)]
    scales = {slot: torch.tensor([12.5 if ".dy" in slot else 37.0]) for slot in (*plan.state.forward, *plan.state.backward)}
    activation = _torch(plan.activation)
    with running(Pass("forward", scales)):
        x = _as_given(Tensor(random(tokens, width, dtype=activation), plan.activation), plan.ops[start - 1].y_dtype if start else plan.activation)
    with running(Pass("backward", scales)):
        last = start + len(inside)
        dy = _as_given(Tensor(random(tokens, at, dtype=activation), plan.activation), plan.ops[last].dx_dtype if last < len(ops) else plan.activation)
    values_, widths = {}, _widths(bound, width)
    for op, columns in zip(bound, widths, strict=True):
        for name in op.side_inputs:
            values_[name] = Tensor(random(tokens, columns, dtype=activation), plan.activation)
        for name in op.call_inputs:
            values_[name] = _given(name, tokens)
    residual_grads = {name: Tensor(random(tokens, width, dtype=activation), plan.activation) for op in bound for name in op.side_outputs}
    needed = bound[0].wants("x") or any(grad for _, grad in args[start])
    return Bound(bound, x, dy, scales, values_, residual_grads, activation, needed)


class _Gives(Op):
    """Gives a side value that the pattern takes."""

    def __init__(self, name: str) -> None:
        self.__dict__["side_outputs"] = (name,)

    def forward(self, x: Tensor) -> Any:
        raise NotImplementedError

    def backward(self, ctx: Context, dy: Tensor) -> Any:
        raise NotImplementedError


class _Takes(_Gives):
    """Takes a side value that the pattern gives."""

    def __init__(self, name: str) -> None:
        self.__dict__["side_inputs"] = (name,)


def _torch(dtype: DType) -> torch.dtype:
    return {DType.Float32: torch.float32, DType.BFloat16: torch.bfloat16, DType.Float16: torch.float16}[dtype]


def _as_given(tensor: Tensor, type_: Any) -> Tensor:
    """The tensor as its producer would write it."""
    return bgrad_cast(tensor, type_, DType.Float32)[0] if is_quantized_type(type_) else tensor


def _widths(ops: Sequence[Op], width: int) -> list[int]:
    widths = []
    for op in ops:
        widths.append(width)
        width = op.width(width)
    return widths


def _given(name: str, tokens: int) -> Any:
    if name == "sequences":
        return Sequences(Tensor(torch.tensor([0, tokens], dtype=torch.int32), DType.Int32), 1, tokens, True)
    return Tensor(torch.tensor([7]), DType.Int64)


def _keywords(op: Op, values_: dict[str, Any], *names: tuple[str, ...]) -> dict[str, Any]:
    return {name: values_[name] for group in (op.call_inputs, *names) for name in group}


def _sequence_forward(bound: Bound) -> tuple[Tensor, list[Context], dict[str, Any], dict[str, Any]]:
    """The ops' own forwards: y, contexts, what goes around, and the amaxes seen."""
    with running(Pass("forward", bound.scales)) as state:
        x, contexts, sides = bound.x, [], {}
        for op in bound.ops:
            result = op.forward(x, **_keywords(op, {**bound.values, **sides}, op.side_inputs))
            x = result[0]
            contexts.append(result[1])
            if op.side_outputs:
                sides.update(result[2])
    return x, contexts, sides, state.amaxes


def _sequence_backward(bound: Bound, contexts: Sequence[Context]) -> tuple[Tensor | None, list[list[Tensor | None]], dict[str, Any], dict[str, Any]]:
    with running(Pass("backward", bound.scales)) as state:
        d: Tensor | None = bound.dy
        grads: list[list[Tensor | None]] = []
        sides: dict[str, Any] = {}
        for op, ctx in zip(reversed(bound.ops), reversed(contexts), strict=True):
            assert d is not None
            result = op.backward(ctx, d, **_keywords(op, {**bound.values, **bound.residual_grads, **sides}, op.side_outputs))
            d = result[0]
            grads.append(list(result[1]))
            if op.side_inputs:
                sides.update(result[2])
            if d is None:
                break
    grads += [[None] * len(op.args) for op in bound.ops[: len(bound.ops) - len(grads)]][::-1]
    return d, grads[::-1], sides, state.amaxes


def _fused_keywords(bound: Bound, fusion: Fusion) -> dict[str, Any]:
    backward = fusion.kind == "backward"
    names = {name for op in bound.ops for name in (*op.call_inputs, *(op.side_outputs if backward else op.side_inputs))}
    available = {**bound.values, **(bound.residual_grads if backward else {})}
    return {name: available[name] for name in names}


def _same(what: str, fused: Tensor | None, unfused: Tensor | None, bound: Bound, after_fp8: DType | None = None) -> None:
    if unfused is None:
        return
    assert fused is not None, f"{what}: missing"
    assert fused.type == unfused.type, f"{what}: {fused.type} instead of {unfused.type}"
    assert fused.shape == unfused.shape, f"{what}: shape {list(fused.shape)} instead of {list(unfused.shape)}"
    assert_honest(what, fused)
    assert_honest(what, unfused)
    length = 11 + max(TOKENS, OUT)
    assert_interchangeable(what, fused, unfused, bound.activation, length, len(bound.ops), after_fp8)


def _same_amaxes(where: str, fused: dict[str, Any], unfused: dict[str, Any], bound: Bound) -> None:
    assert set(fused) == set(unfused), f"{where}: observed {sorted(fused)} instead of {sorted(unfused)}"
    for slot, amax in fused.items():
        wanted = Tensor(unfused[slot], DType.Float32)
        assert_interchangeable(f"{where}: amax of {slot}", Tensor(amax, DType.Float32), wanted, bound.activation, 24, len(bound.ops), None)


def _fp8_inside(bound: Bound) -> DType | None:
    """The format that gradients pass inside the sequence or enter it by a cast, or None."""
    formats = [element(t) for op in bound.ops for t in (op.dy_dtype, op.dx_dtype) if t is not None and is_quantized_type(t)]
    return formats[0] if formats else None


def _sequence_inference(bound: Bound) -> tuple[Tensor, dict[str, Any]]:
    with running(Pass("inference", bound.scales)) as state:
        x = bound.x
        for op in bound.ops:
            x = op.inference(x, **_keywords(op, bound.values, op.side_inputs))
    return x, state.amaxes


def _prove_inference(fusion: Fusion, bound: Bound, where: str) -> None:
    x, amaxes = _sequence_inference(bound)
    with running(Pass("inference", bound.scales)) as fused_state:
        y = fusion.function(*bound.ops, bound.x, **_fused_keywords(bound, fusion))
    _same_amaxes(where, fused_state.amaxes, amaxes, bound)
    _same(f"{where}: y", y, x, bound)


def _prove_forward(fusion: Fusion, bound: Bound, where: str, *, backward: bool = True) -> None:
    """``backward``: and that the contexts serve the ops' own backwards."""
    y, contexts, sides, amaxes = _sequence_forward(bound)
    with running(Pass("forward", bound.scales)) as state:
        result = fusion.function(*bound.ops, bound.x, **_fused_keywords(bound, fusion))
    _same_amaxes(where, state.amaxes, amaxes, bound)
    _same(f"{where}: y", result[0], y, bound)
    assert len(result[1]) == len(bound.ops), f"{where}: {len(result[1])} contexts"
    for i, (fused, unfused) in enumerate(zip(result[1], contexts, strict=True)):
        assert set(unfused) <= set(fused), f"{where}: context {i} lacks {sorted(set(unfused) - set(fused))}"
        for name in unfused:
            _same(f"{where}: context {i} {name}", fused[name], unfused[name], bound)
    for name, value in sides.items():
        _same(f"{where}: side output {name}", result[2][name], value, bound)
    if bound.needed and backward:
        dx, grads, _, _ = _sequence_backward(bound, contexts)
        fused_dx, fused_grads, _, _ = _sequence_backward(bound, result[1])
        _same_gradients(where, bound, (fused_dx, fused_grads), (dx, grads))


def _prove_backward(fusion: Fusion, bound: Bound, where: str) -> None:
    _, contexts, _, _ = _sequence_forward(bound)
    dx, grads, sides, amaxes = _sequence_backward(bound, contexts)
    with running(Pass("backward", bound.scales)) as state:
        result = fusion.function(*bound.ops, *contexts, bound.dy, **_fused_keywords(bound, fusion))
    _same_amaxes(where, state.amaxes, amaxes, bound)
    _same_gradients(where, bound, (result[0], result[1]), (dx, grads))
    for name, value in sides.items():
        _same(f"{where}: gradient of {name}", result[2][name], value, bound)


def _same_gradients(where: str, bound: Bound, fused: tuple[Any, Any], unfused: tuple[Any, Any]) -> None:
    """Of all gradients that anybody wants."""
    after = _fp8_inside(bound)
    if bound.ops[0].wants("x"):
        assert unfused[0] is not None
        _same(f"{where}: dx", fused[0], unfused[0], bound, None if is_quantized_type(unfused[0].type) else after)
    assert len(fused[1]) == len(bound.ops), f"{where}: gradients for {len(fused[1])} ops"
    for i, (op, mine, theirs) in enumerate(zip(bound.ops, fused[1], unfused[1], strict=True)):
        assert len(mine) == len(op.args), f"{where}: {len(mine)} gradients of {type(op).__name__}"
        for name, one, other in zip(op.arg_names, mine, theirs, strict=True):
            if op.wants(name):
                assert other is not None
                assert element(other.type) is getattr(op, f"d{name}_dtype"), f"{where}: d{name} of op {i}"
                _same(f"{where}: d{name} of op {i}", one, other, bound, after)
