"""What the pipeline makes of a list of ops: types, groups, segments, state, and that the ops themselves stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fusible import nvte, tex
from fusible.compute_pipeline import ComputePipeline, Plan, PlanRequest, StateLayout, describe_misses, quantize_args, run_backward, run_forward
from fusible.fusions import epoch, register_fusion_forward, register_fusion_inference, unregister_fusion
from fusible.nvte import DType, QuantizedType, make_nvte_tensor
from fusible.ops import (
    GELU,
    MMT,
    Add,
    AddExtra,
    ConstantScale,
    Context,
    DotProductAttention,
    Dropout,
    GeGLU,
    Identity,
    LayerNorm,
    MakeExtra,
    Op,
    Quantize,
    ReLU,
    Reshape,
    ResidualBegin,
    ResidualEnd,
    RMSNorm,
)
from fusible.quantized import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    Format,
    HighPrecision,
    HybridQuantizer,
    MXFP8Quantizer,
    QParams,
    QuantizerRole,
    Recipe,
)

WIDTH = 6
E4M3, E5M2, BF16, FP32 = DType.Float8E4M3, DType.Float8E5M2, DType.BFloat16, DType.Float32


def mmt(width: int = WIDTH, columns: int = WIDTH) -> MMT:
    return MMT(make_nvte_tensor(torch.zeros(columns, width)))


def add(width: int = WIDTH) -> Add:
    return Add(make_nvte_tensor(torch.zeros(width)))


def norm() -> LayerNorm:
    return LayerNorm(make_nvte_tensor(torch.zeros(WIDTH)), make_nvte_tensor(torch.zeros(WIDTH)))


def rmsnorm() -> RMSNorm:
    return RMSNorm(make_nvte_tensor(torch.zeros(WIDTH)))


def plan(
    *ops: Op,
    recipe: Recipe | None = None,
    activation: DType = BF16,
    x_grad: bool = True,
    wanted: bool = True,
    training: bool = True,
    whole: bool = False,
) -> Plan:
    args = tuple(tuple((arg.dtype, wanted) for arg in op.args) for op in ops)
    request = PlanRequest(recipe, activation, WIDTH, x_grad, args, (training,) * len(ops), whole, epoch())
    return ComputePipeline(ops).plan(request)


def delayed(dtype: DType, slot: str) -> QuantizedType:
    return QuantizedType(dtype, "delayed", slot)


def test_a_producer_writes_what_its_consumer_takes() -> None:
    p = plan(norm(), mmt(), add(), GELU(), mmt(), recipe=DelayedScaling())
    assert [op.y_dtype for op in p.ops] == [delayed(E4M3, "1.x"), BF16, BF16, delayed(E4M3, "4.x"), BF16]
    assert [op.dx_dtype for op in p.ops] == [BF16, BF16, delayed(E5M2, "1.dy"), BF16, BF16]
    assert p.ops[1].weight_dtype == delayed(E4M3, "1.weight") and p.ops[1].dweight_dtype is FP32  # type: ignore[attr-defined]
    assert p.state.forward == ("1.x", "1.weight", "4.x", "4.weight") and p.state.backward == ("1.dy", "4.dy")


def test_products_pass_8_bits_to_each_other() -> None:
    p = plan(mmt(), mmt(), recipe=DelayedScaling())
    assert p.ops[0].y_dtype == delayed(E4M3, "1.x") and p.ops[1].dx_dtype == delayed(E5M2, "0.dy") and len(p.segments) == 1


def test_who_cannot_write_8_bits_leaves_the_cast_to_the_consumer() -> None:
    p = plan(mmt(), add(), mmt(), recipe=DelayedScaling())
    assert p.ops[1].y_dtype is BF16 and p.ops[2].x_dtype == delayed(E4M3, "2.x")


def test_types_follow_the_recipe() -> None:
    (op,) = plan(mmt(), recipe=DelayedScaling(fp8_format=Format.E4M3)).ops
    assert op.dy_dtype == delayed(E4M3, "0.dy")
    (op,) = plan(mmt(), recipe=DelayedScaling(fp8_format=Format.E5M2)).ops
    assert op.x_dtype == delayed(E5M2, "0.x")
    options = QParams(power_2_scale=True, amax_epsilon=0.5)
    p = plan(mmt(), recipe=Float8CurrentScaling(fp8_quant_fwd_weight=options))
    assert p.ops[0].x_dtype == QuantizedType(E4M3, "current") and not p.state
    quantizer = Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=True, amax_epsilon=0.5)
    assert p.ops[0].weight_dtype == QuantizedType.of(quantizer)  # type: ignore[attr-defined]
    assert plan(mmt()).ops[0].x_dtype is BF16


def test_a_precision_that_is_asked_for_is_taken() -> None:
    assert plan(norm(), mmt(), recipe=HighPrecision(lowest="float32")).activation is FP32
    assert {op.y_dtype for op in plan(norm(), mmt(), recipe=HighPrecision(lowest="float32")).ops} == {FP32}
    assert plan(mmt(), recipe=HighPrecision(lowest="bfloat16"), activation=FP32).activation is BF16
    assert plan(mmt(), recipe=HighPrecision(), activation=DType.Float16).activation is DType.Float16
    assert plan(mmt(), recipe=HighPrecision(lowest="bfloat16"), activation=DType.Float16).activation is BF16
    assert plan(mmt(), recipe=HighPrecision(lowest="float16"), activation=BF16).activation is DType.Float16


def test_a_gelu_that_asks_for_a_type_is_handed_it_by_the_product_that_applies_it() -> None:
    weight, x = torch.randn(WIDTH, WIDTH), torch.randn(3, WIDTH).bfloat16()
    for asked in (None, BF16, FP32):
        for between in ([], [Add(make_nvte_tensor(torch.zeros(WIDTH)))]):
            members = [MMT(make_nvte_tensor(weight.bfloat16())), *between, GELU().with_(x_dtype=asked)]
            p = plan(*members)
            assert len(p.forward) == len(p.inference) == 1
            result = run_forward(p, p.segments[0].forward[0], make_nvte_tensor(x), [arg for op in members for arg in op.args], {}, {})
            assert result.contexts[-1]["x"].type is (asked or BF16) and result.y.type is BF16
            wanted = torch.nn.functional.gelu(x.double() @ weight.bfloat16().double().t(), approximate="tanh")
            # two roundings of bf16, or one; the slope of GELU is below 1.13
            assert (result.y.data - wanted).abs().max() <= 3 * 2.0**-9 * (wanted.abs().max() + 1)


@pytest.mark.parametrize("recipe", [None, HighPrecision(), DelayedScaling()], ids=str)
def test_a_type_that_an_op_asks_for_is_widened_to_the_activations_and_never_narrowed_for_a_neighbour(recipe: Recipe | None) -> None:
    for asked, given in ((FP32, FP32), (DType.Float16, BF16), (BF16, BF16)):
        p = plan(norm().with_(y_dtype=asked), Reshape((-1, WIDTH)), GELU(), add().with_(dx_dtype=asked), recipe=recipe)
        assert p.ops[0].y_dtype is given and p.ops[3].dx_dtype is given
    if not isinstance(recipe, DelayedScaling):
        assert plan(norm().with_(y_dtype=FP32), mmt(), recipe=recipe).ops[0].y_dtype is FP32


def test_there_is_state_where_any_pass_reads_some() -> None:
    for forward in ((), ("0.x",)):
        for backward in ((), ("0.dy",)):
            assert bool(StateLayout(forward, backward)) == bool(forward + backward)
    assert plan(Quantize(), recipe=DelayedScaling()).state and plan(Quantize(forward=False, backward=True), recipe=DelayedScaling()).state


def test_the_modules_ops_are_never_written_to() -> None:
    ops = [norm(), mmt(), add(), GELU()]
    before = [dict(vars(op)) for op in ops]
    p = plan(*ops, recipe=DelayedScaling())
    assert [vars(op) for op in ops] == before and all(bound is not op for bound, op in zip(p.ops, ops, strict=True))


def names(groups) -> list[str]:
    return [group.fusion.name if group.fusion else "" for group in groups]


def test_the_longest_fusion_wins_at_its_leftmost_place() -> None:
    p = plan(mmt(), add(), GELU(), add(), mmt(), add(), mmt())
    assert names(p.forward) == ["mmt_add_gelu_add_fwd_fused", "mmt_add_fwd_fused", ""]
    assert names(p.inference) == ["mmt_add_gelu_add_inf_fused", "mmt_add_inf_fused", ""]
    assert names(p.backward) == ["mmt_add_gelu_bwd_fused", "", "mmt_add_bwd_fused", ""]
    assert names(plan(mmt(columns=12), GeGLU()).backward) == ["mmt_geglu_bwd_fused"]


def test_a_fusion_takes_exact_types_only() -> None:
    class Mine(GELU):
        """A user's own variant of an op that has fusions."""

    assert names(plan(mmt(), add(), Mine()).forward) == ["mmt_add_fwd_fused", ""]


def test_a_fusion_that_is_registered_later_is_found() -> None:
    def mmt_relu(mmt: MMT, relu: ReLU, x: nvte.Tensor) -> nvte.Tensor:
        return relu.inference(mmt.inference(x))

    before = epoch()
    register_fusion_inference(mmt_relu)
    try:
        assert epoch() > before and names(plan(mmt(), ReLU()).inference) == ["mmt_relu"]
    finally:
        unregister_fusion(mmt_relu)
    assert names(plan(mmt(), ReLU()).inference) == ["", ""]


def test_of_one_length_a_fusion_from_outside_is_taken() -> None:
    def mine(mmt: MMT, add: Add, x: nvte.Tensor) -> nvte.Tensor:
        return add.inference(mmt.inference(x))

    register_fusion_inference(mine)
    try:
        assert names(plan(mmt(), add()).inference) == ["mine"]
    finally:
        unregister_fusion(mine)


@pytest.mark.parametrize("types", [("input",), ("weight",), ("grad_output",), ("input", "grad_output"), ()])
def test_a_plan_is_under_the_delayed_scaling_of_any_of_its_tensors(types: tuple[str, ...]) -> None:
    def quantizer(role: QuantizerRole) -> Any:
        return DelayedScalingRequest(amax_history_len=4) if role.tensor_type in types else None

    found = plan(mmt(), recipe=CustomRecipe(qfactory=quantizer)).delayed
    assert (found is not None and found.amax_history_len == 4) if types else found is None


def test_backward_stops_where_nobody_wants_a_gradient() -> None:
    p = plan(ReLU(), GELU(), mmt(), add(), x_grad=False)
    assert [group.start for group in p.backward] == [2] and not p.ops[2].wants("x") and p.ops[3].wants("x")
    assert plan(mmt(), add(), x_grad=False, wanted=False).backward == ()
    assert [group.start for group in plan(mmt(), x_grad=True, wanted=False).backward] == [0]


def test_segments_cover_the_ops_and_cut_no_group_residual_or_8_bit_edge() -> None:
    block = [ResidualBegin(), norm(), mmt(), add(), GELU(), mmt(), add(), ResidualEnd()]
    for recipe in (None, DelayedScaling(), Float8CurrentScaling()):
        p = plan(*block * 3, recipe=recipe)
        assert [(s.start, s.stop) for s in p.segments] == [(0, 8), (8, 16), (16, 24)]
        assert [g for s in p.segments for g in s.forward[0].groups] == list(p.forward)
        assert [g for s in p.segments for g in s.backward[0].groups] == list(p.backward)
        assert tuple(slot for s in p.segments for slot in s.state.forward) == p.state.forward
        assert len(plan(*block * 3, recipe=recipe, whole=True).segments) == 1
    assert len(plan(*[mmt() for _ in range(30)], recipe=DelayedScaling()).segments) == 1
    assert len(plan(ResidualBegin(), *[ReLU()] * 30, ResidualEnd()).segments) == 1


EIGHT: dict[str, Callable[[], list[Op]]] = {
    "a block": lambda: [ResidualBegin(), norm(), mmt(), add(), GELU(), mmt(), add(), ResidualEnd()],
    "fused groups at both ends": lambda: [mmt(), add(), GELU(), mmt(), add(), ReLU(), mmt(), add()],
}


@pytest.mark.parametrize("recipe", [None, DelayedScaling(), Float8CurrentScaling()], ids=str)
@pytest.mark.parametrize("made", EIGHT)
def test_in_segments_and_as_a_whole_a_plan_computes_the_same(made: str, recipe: Recipe | None) -> None:
    torch.manual_seed(0)
    ones = EIGHT[made]()
    ops = [op.with_(**{name: make_nvte_tensor(torch.randn(getattr(op, name).shape)) for name in op.arg_names}) for op in ones * 3]
    args, x, dy = [arg for op in ops for arg in op.args], torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    results = []
    for whole, count in ((False, 3), (True, 1)):
        p = plan(*ops, recipe=recipe, activation=FP32, whole=whole)
        assert len(p.segments) == count
        scales = {slot: torch.tensor([16.0]) for slot in (*p.state.forward, *p.state.backward)}
        given = list(args)
        quantized, amaxes = quantize_args([args[arg.place] for arg in p.quantized_args], p.quantized_args, scales)
        for arg, value in zip(p.quantized_args, quantized, strict=True):
            given[arg.place] = value
        y, contexts, seen = make_nvte_tensor(x), [], dict(amaxes)
        for segment in p.segments:
            result = run_forward(p, segment.forward[0], y, given[segment.args], {}, scales)
            y = result.y
            contexts.append(result.contexts)
            seen |= result.amaxes
        d, grads = make_nvte_tensor(dy), []
        for segment in reversed(p.segments):
            back = run_backward(p, segment.backward[0], contexts.pop(), d, {}, scales)
            assert back.dx is not None
            d, grads = back.dx, [*back.grads, *grads]
            seen |= back.amaxes
        of_args = [grad.data for of_op in grads for grad in of_op if grad is not None]
        results.append([y.data, d.data, *of_args, *(seen[slot] for slot in sorted(seen))])
    assert len(results[0]) == len(results[1]) >= 2 + len(args)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_mode_of_a_module_is_part_of_its_plan() -> None:
    assert plan(Dropout(0.5)).call_inputs == ("seed",)
    assert plan(Dropout(0.5), training=False).call_inputs == plan(Dropout(0.0)).call_inputs == ()
    assert plan(DotProductAttention(1, 2)).call_inputs == ("sequences",)


def test_a_plan_is_made_once_per_request() -> None:
    pipeline = ComputePipeline([mmt(), add()])
    args = (((FP32, True),), ((FP32, True),))
    requests = [
        PlanRequest(recipe, dtype, WIDTH, grad, args, (True, True), False, epoch())
        for recipe in (None, DelayedScaling(), DelayedScaling(margin=1))
        for dtype in (BF16, FP32)
        for grad in (True, False)
    ]
    made = [pipeline.plan(request) for request in requests]
    assert pipeline.plans_built == len(requests) == len(set(map(id, made)))
    equal = [request._replace(recipe=DelayedScaling(margin=request.recipe.margin) if request.recipe else None) for request in requests]
    again = [pipeline.plan(request) for request in equal]
    assert all(a is b for a, b in zip(again, made, strict=True)) and pipeline.plans_built == len(requests)


def test_a_quantize_has_a_type_of_its_own_where_nobody_asks_for_8_bits() -> None:
    p = plan(GELU(), Quantize(backward=True), add(), recipe=DelayedScaling())
    assert [op.y_dtype for op in p.ops] == [delayed(E4M3, "1.x"), delayed(E4M3, "1.x"), BF16]
    assert [op.dx_dtype for op in p.ops] == [BF16, delayed(E5M2, "1.dy"), delayed(E5M2, "1.dy")]
    assert p.state.forward == ("1.x",) and p.state.backward == ("1.dy",)
    alone = plan(Quantize(), recipe=Float8CurrentScaling()).ops[0]
    assert alone.y_dtype == QuantizedType(E4M3, "current") and alone.dx_dtype is BF16
    off = plan(Quantize(forward=False), GELU(), recipe=DelayedScaling()).ops[0]
    assert off.y_dtype is BF16 and off.x_dtype is None and plan(Quantize(backward=True)).ops[0].y_dtype is BF16


def test_a_producer_writes_8_bits_through_transparent_ops() -> None:
    for between in ([Identity()], [Quantize(backward=True)], [Identity(), Quantize(), Identity()]):
        p = plan(norm(), *between, mmt(), recipe=DelayedScaling())
        slot = f"{len(between) + 1}.x"
        assert {op.y_dtype for op in p.ops[:-1]} == {delayed(E4M3, slot)}
        p = plan(mmt(), *between, add(), recipe=DelayedScaling())
        assert {op.dx_dtype for op in p.ops[1:]} == {delayed(E5M2, "0.dy")}


def test_what_a_transparent_op_passes_is_quantized_once() -> None:
    """By the scale of whom it is for; the amax is observed there alone."""
    x = make_nvte_tensor(torch.randn(3, WIDTH))
    ops = [LayerNorm(*(make_nvte_tensor(torch.randn(WIDTH)) for _ in range(2))), MMT(make_nvte_tensor(torch.randn(WIDTH, WIDTH)))]
    results = []
    for members, slots in ((ops, ("1.x", "1.weight")), ([ops[0], Identity(), Quantize(), ops[1]], ("3.x", "3.weight"))):
        p = plan(*members, recipe=DelayedScaling(), activation=FP32)
        scales = dict.fromkeys(p.state.forward, torch.tensor([20.0]))
        result = run_forward(p, p.segments[0].forward[0], x, [arg for op in members for arg in op.args], {}, scales)
        assert set(result.amaxes) == set(slots)
        results.append((result.y.data, *(result.amaxes[slot] for slot in slots)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("rescaled", [True, False])
def test_a_factor_takes_8_bits_whose_scales_it_can_multiply(rescaled: bool) -> None:
    def quantizer(role: QuantizerRole) -> Any:
        rows, columns = (MXFP8Quantizer(tex.DType.kFloat8E4M3) for _ in range(2))
        return rows if rescaled else HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=columns)

    p = plan(norm(), ConstantScale(2.0), mmt(), recipe=CustomRecipe(qfactory=quantizer))
    (scale,) = [op for op in p.ops if isinstance(op, ConstantScale)]
    assert isinstance(scale.x_dtype, QuantizedType) is rescaled and isinstance(p.ops[-1].x_dtype, QuantizedType)


def test_a_width_may_be_unknown_before_the_call() -> None:
    assert plan(mmt(), Reshape((2, -1)), GELU(), add(), mmt(), ConstantScale(2.0)).out_width == WIDTH
    assert plan(Reshape((2, -1)), GELU(), Identity()).out_width is None


def test_extras_of_several_names_do_not_mix() -> None:
    members = [MakeExtra("a"), MakeExtra("b"), ReLU(), AddExtra("a"), ConstantScale(3.0), AddExtra("b")]
    p = plan(*members, activation=FP32)
    x = make_nvte_tensor(torch.tensor([[1.0, -2.0]]))
    result = run_forward(p, p.segments[0].forward[0], x, [], {}, {})
    assert result.y.data.tolist() == [[7.0, -8.0]]
    back = run_backward(p, p.segments[0].backward[0], result.contexts, make_nvte_tensor(torch.ones(1, 2)), {}, {})
    assert back.dx is not None and back.dx.data.tolist() == [[7.0, 4.0]]


def test_extras_and_factors_are_fused_with_products_and_norms() -> None:
    p = plan(MakeExtra("a"), mmt(), add(), ConstantScale(2.0), AddExtra("a"))
    assert names(p.forward) == ["", "mmt_add_scale_extra_fwd_fused"]
    assert names(p.inference) == ["", "mmt_add_scale_extra_inf_fused"]
    assert names(p.backward) == ["make_extra_mmt_add_bwd_fused", "", ""]
    p = plan(MakeExtra("a"), norm(), mmt(), ConstantScale(2.0), AddExtra("a"))
    assert names(p.backward) == ["make_extra_layernorm_bwd_fused", "mmt_scale_bwd_fused", ""]
    assert names(plan(ResidualBegin(), mmt(), ResidualEnd()).backward) == ["make_extra_mmt_bwd_fused", ""]


def test_a_scaled_gradient_is_added_to_what_there_is_of_it() -> None:
    weight, so_far = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    members = MMT(make_nvte_tensor(weight)), ConstantScale(-0.5)
    p = plan(*members, activation=FP32)
    assert names(p.backward) == ["mmt_scale_bwd_fused"]
    x, dy = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    result = run_forward(p, p.segments[0].forward[0], make_nvte_tensor(x), members[0].args, {}, {})
    wanted = so_far - 0.5 * dy.T @ x
    back = run_backward(p, p.segments[0].backward[0], result.contexts, make_nvte_tensor(dy), {}, {}, {"0.weight": make_nvte_tensor(so_far.clone())})
    # Sums of 3 products and two more terms, all below 2^4.
    (found,) = (grad for grads in back.grads for grad in grads)
    assert found is not None and (found.data - wanted).abs().max() < 16 * 5 * torch.finfo(torch.float32).eps


def test_an_extra_that_nobody_differentiates_leaves_the_gradient_as_it_is() -> None:
    for follows in ([norm()], [RMSNorm(make_nvte_tensor(torch.zeros(WIDTH)))], [mmt()], [mmt(), add()]):
        members = [op.with_(**{name: make_nvte_tensor(torch.randn(getattr(op, name).shape)) for name in op.arg_names}) for op in follows]
        x, dy, args = make_nvte_tensor(torch.randn(3, WIDTH)), make_nvte_tensor(torch.randn(3, WIDTH)), [arg for op in members for arg in op.args]
        alone, begun = plan(*members, activation=FP32), plan(MakeExtra("a"), *members, AddExtra("a"), activation=FP32)
        result = run_forward(alone, alone.segments[0].forward[0], x, args, {}, {})
        contexts = [dict(ctx) for ctx in result.contexts]
        wanted = run_backward(alone, alone.segments[0].backward[0], result.contexts, dy, {}, {})
        fusion = begun.backward[0].fusion
        assert fusion is not None and len(fusion.pattern) == len(members) + 1
        dx, grads = fusion.function(*begun.ops[:-1], {}, *contexts, dy, a=None)
        assert wanted.dx is not None and torch.equal(dx.data, wanted.dx.data) and list(map(len, grads)) == [0, *(len(op.args) for op in members)]
        with_extra, _ = fusion.function(*begun.ops[:-1], {}, *contexts, dy, a=x)
        assert (with_extra.data - (wanted.dx.data + x.data)).abs().max() < 16 * WIDTH * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("begin", [MakeExtra("a"), ResidualBegin()], ids=repr)
@pytest.mark.parametrize("follows", [(mmt,), (mmt, add), (norm,), (rmsnorm,)], ids=["mmt", "mmt, add", "norm", "rmsnorm"])
def test_a_gradient_that_is_added_on_the_way_out_has_the_type_that_was_asked_of_it(begin: Op, follows: tuple[Callable[[], Op], ...]) -> None:
    end = AddExtra("a") if isinstance(begin, MakeExtra) and not isinstance(begin, ResidualBegin) else ResidualEnd()
    for asked, given in ((FP32, FP32), (None, BF16)):
        members = [begin if asked is None else begin.with_(dx_dtype=asked), *(make() for make in follows), end]
        p = plan(*members)
        assert p.backward[0].fusion is not None and p.backward[0].stop == len(follows) + 1
        x = make_nvte_tensor(torch.ones(3, WIDTH).bfloat16())
        result = run_forward(p, p.segments[0].forward[0], x, [arg for op in members for arg in op.args], {}, {})
        back = run_backward(p, p.segments[0].backward[0], result.contexts, x, {}, {})
        assert back.dx is not None and back.dx.type is given


def test_a_fusion_in_which_two_side_values_of_one_name_meet_is_told_as_one_that_did_not_match() -> None:
    def both(first: AddExtra, second: AddExtra, x: nvte.Tensor, **sides: nvte.Tensor) -> tuple[nvte.Tensor, tuple[Context, Context]]:
        raise AssertionError("it cannot tell them apart")

    register_fusion_forward(both)
    try:
        for second, told in (("a", "both at 2-3: side values of one name meet in it"), ("b", "")):
            p = plan(MakeExtra("a"), MakeExtra(second), AddExtra(second), AddExtra("a"))
            assert names(p.forward)[2:] == (["both"] if not told else ["", ""])
            assert [line.strip() for line in describe_misses(p).splitlines() if "both at 2-3" in line] == ([f"forward: {told}"] if told else [])
    finally:
        unregister_fusion(both)


def test_a_fusion_whose_one_op_gives_what_its_other_takes_is_told_as_one_that_did_not_match() -> None:
    def both(first: MakeExtra, second: AddExtra, x: nvte.Tensor, **sides: nvte.Tensor) -> tuple[nvte.Tensor, tuple[Context, Context]]:
        raise AssertionError("nobody gives it what passes inside")

    register_fusion_forward(both)
    try:
        p = plan(MakeExtra("a"), MakeExtra("b"), AddExtra("b"), AddExtra("a"))
        assert "both" not in names(p.forward) and "both at 1-2: side values of one name meet in it" in describe_misses(p)
    finally:
        unregister_fusion(both)


ASKED = {
    "GELU": lambda: [mmt(), GELU().with_(x_dtype=E4M3)],
    "a bias": lambda: [mmt(), add().with_(x_dtype=E4M3)],
    "the values of a bias": lambda: [mmt(), add().with_(bias_dtype=E4M3)],
    "an addition": lambda: [ResidualBegin(), mmt(), ResidualEnd().with_(x_dtype=E4M3)],
    "GELU behind a bias": lambda: [mmt(), add(), GELU().with_(x_dtype=E4M3)],
}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("recipe", [None, DelayedScaling(), Float8CurrentScaling()], ids=str)
def test_what_is_asked_for_in_8_bits_is_written_so_and_observed(name: str, recipe: Recipe | None) -> None:
    """No product hands it on unseen: the op that asks stands apart from it, unless the recipe widens what it asks for."""
    ops = ASKED[name]()
    p = plan(*ops, recipe=recipe)
    last = len(ops) - 1
    alone = next(group for group in p.forward if group.stop == len(ops)).start == last
    assert alone == (recipe is not None) == (next(group for group in p.inference if group.stop == len(ops)).start == last)
    scales = {slot: torch.ones(1) for slot in p.state.forward}
    values = [arg for op in ops for arg in op.args]
    quantized = quantize_args([values[arg.place] for arg in p.quantized_args], p.quantized_args, scales)[0]
    for arg, value in zip(p.quantized_args, quantized, strict=True):
        values[arg.place] = value
    x = make_nvte_tensor(torch.randn(3, WIDTH).bfloat16())
    result = run_forward(p, p.segments[0].forward[0], x, values, {}, scales)
    if isinstance(recipe, DelayedScaling) and "values" not in name:
        assert f"{last}.x" in result.amaxes
    assert result.y.shape == (3, WIDTH)


def test_a_fusion_is_taken_where_its_condition_holds_and_told_where_not() -> None:
    def both(one: Identity, other: Identity, x: nvte.Tensor) -> nvte.Tensor:
        return x

    def both_forward(one: Identity, other: Identity, x: nvte.Tensor) -> tuple[nvte.Tensor, tuple[Context, Context]]:
        return x, ({}, {})

    seen: list[tuple[str, ...]] = []

    def when(ops: Sequence[Op]) -> bool:
        seen.append(tuple(type(op).__name__ for op in ops))
        return ops[1].dy_dtype is None

    for register, function, kind in ((register_fusion_inference, both, "inference"), (register_fusion_forward, both_forward, "forward")):
        register(function, when=when)
        try:
            for asked in (None, FP32):
                p = plan(Identity(), Identity().with_(dy_dtype=asked))
                groups = getattr(p, kind)
                assert [group.fusion is not None for group in groups] == ([True] if asked is None else [False, False])
                told = "forward: both_forward at 0-1: its types are others" in describe_misses(p)
                assert told == (kind == "forward" and asked is not None)
        finally:
            unregister_fusion(function)
    assert seen and set(seen) == {("Identity", "Identity")}
