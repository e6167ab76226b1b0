"""What the pipeline makes of a list of ops: types, groups, segments, state, and that the ops themselves stay as they are."""

from __future__ import annotations

import torch

from fusible import nvte
from fusible.compute_pipeline import ComputePipeline, Plan, PlanRequest
from fusible.fusions import epoch, register_fusion_inference, unregister_fusion
from fusible.nvte import DType, QuantizedType, make_nvte_tensor
from fusible.ops import GELU, MMT, Add, DotProductAttention, Dropout, GeGLU, LayerNorm, Op, ReLU, ResidualBegin, ResidualEnd
from fusible.quantized import DelayedScaling, Float8CurrentScaling, Format, HighPrecision, QParams, Recipe

WIDTH = 6
E4M3, E5M2, BF16, FP32 = DType.Float8E4M3, DType.Float8E5M2, DType.BFloat16, DType.Float32


def mmt(width: int = WIDTH, columns: int = WIDTH) -> MMT:
    return MMT(make_nvte_tensor(torch.zeros(columns, width)))


def add(width: int = WIDTH) -> Add:
    return Add(make_nvte_tensor(torch.zeros(width)))


def norm() -> LayerNorm:
    return LayerNorm(make_nvte_tensor(torch.zeros(WIDTH)), make_nvte_tensor(torch.zeros(WIDTH)))


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
    assert p.ops[0].weight_dtype == QuantizedType(E4M3, "current", power_2_scale=True, amax_epsilon=0.5)  # type: ignore[attr-defined]
    assert plan(mmt()).ops[0].x_dtype is BF16


def test_the_lowest_precision_widens_and_never_narrows() -> None:
    assert plan(norm(), mmt(), recipe=HighPrecision(lowest="float32")).activation is FP32
    assert {op.y_dtype for op in plan(norm(), mmt(), recipe=HighPrecision(lowest="float32")).ops} == {FP32}
    assert plan(mmt(), recipe=HighPrecision(lowest="bfloat16"), activation=FP32).activation is FP32
    assert plan(mmt(), recipe=HighPrecision(), activation=DType.Float16).activation is DType.Float16


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
        assert [g for s in p.segments for g in s.forward] == list(p.forward) and [g for s in p.segments for g in s.backward] == list(p.backward)
        assert tuple(slot for s in p.segments for slot in s.state.forward) == p.state.forward
        assert len(plan(*block * 3, recipe=recipe, whole=True).segments) == 1
    assert len(plan(*[mmt() for _ in range(30)], recipe=DelayedScaling()).segments) == 1
    assert len(plan(ResidualBegin(), *[ReLU()] * 30, ResidualEnd()).segments) == 1


def test_the_mode_of_a_module_is_part_of_its_plan() -> None:
    assert plan(Dropout(0.5)).given == ("seed",) and plan(Dropout(0.5), training=False).given == () and plan(Dropout(0.0)).given == ()
    assert plan(DotProductAttention(1, 2)).given == ("sequences",)


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
