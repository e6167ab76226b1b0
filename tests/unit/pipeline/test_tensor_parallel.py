"""Tensor parallelism as a rewriting of the op list: what each op becomes, what each process holds, and where rows are scattered and gathered."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fusible import ops
from fusible.compute_pipeline import Holding, Rewritten, between_rows, tensor_parallel
from fusible.errors import ArgumentError, ShapeError
from fusible.nvte import Tensor, make_nvte_tensor
from fusible.ops import Op
from fusible.ops.sharing import Part, Process

GROUP = None
"""All processes."""
H, HEADS, WIDTH = 16, 4, 4


def weight(rows: int, columns: int = 0) -> Tensor:
    return make_nvte_tensor(torch.empty((rows, columns) if columns else (rows,), device="meta"))


def linear(columns: int, rows: int) -> list[Op]:
    return [ops.MMT(weight(rows, columns)), ops.Add(weight(rows))]


def norm(columns: int = H) -> Op:
    return ops.LayerNorm(weight(columns), weight(columns))


def attention_block(groups: int = HEADS, **options: object) -> list[Op]:
    attention = ops.DotProductAttention(HEADS, WIDTH, groups=groups, **options)  # type: ignore[arg-type]
    return [ops.ResidualBegin(), norm(), *linear(H, (HEADS + 2 * groups) * WIDTH), attention, *linear(HEADS * WIDTH, H), ops.ResidualEnd()]


def gated_block() -> list[Op]:
    return [ops.ResidualBegin(), norm(), *linear(H, 64), ops.SwiGLU(), *linear(32, H), ops.ResidualEnd()]


def of(op_list: Sequence[Op], size: int = 2, rank: int = 1, **options: bool) -> list[Rewritten]:
    return tensor_parallel(op_list, Process(rank, size), GROUP, **options)


def names(rewritten: Sequence[Rewritten]) -> list[str]:
    return [type(r.op).__name__ for r in rewritten]


def test_a_block_is_shared_from_its_norm_to_its_residual() -> None:
    found = of(attention_block())
    assert names(found) == [
        "ResidualBegin", "LayerNorm", "ColumnParallelMMT", "Add", "DotProductAttention", "RowParallelMMT", "Add", "ResidualEnd"
    ]  # fmt: skip
    assert [r.shared for r in found] == [False, False, True, True, True, True, False, False]
    heads = (Part(4, 4, "query"), Part(4, 4, "key", repeats=True), Part(4, 4, "value", repeats=True))
    assert found[2].holdings == {"weight": Holding(0, heads)} and found[3].holdings == {"bias": Holding(0, heads)}
    assert found[5].holdings == {"weight": Holding(1, (Part(16),))}
    assert found[1].holdings == {"weight": Holding(), "bias": Holding()} and found[6].holdings == {"bias": Holding()}
    attention = found[4].op
    assert isinstance(attention, ops.DotProductAttention)
    assert (attention.heads, attention.groups, attention.stream) == (2, 2, 1)


def test_a_gate_and_what_it_multiplies_are_shared_each() -> None:
    found = of(gated_block())
    halves = (Part(32, 1, "gate"), Part(32, 1, "up"))
    assert found[2].holdings["weight"] == found[3].holdings["bias"] == Holding(0, halves)
    interleaved = of([ops.MMT(weight(64, H)), ops.SwiGLU(glu_interleave_size=8), ops.MMT(weight(H, 32))])
    assert interleaved[0].holdings["weight"].parts == (Part(4, 16),)


def test_keys_that_are_fewer_than_processes_are_held_by_several() -> None:
    found = of(attention_block(groups=2), size=4, rank=3)
    key = found[2].holdings["weight"].parts[1]
    assert found[2].holdings["weight"].partial and not key.shared(4)
    assert [list(key.of(Process(rank, 4))) for rank in range(4)] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
    attention = found[4].op
    assert isinstance(attention, ops.DotProductAttention) and (attention.heads, attention.groups) == (1, 1)


def test_slopes_go_with_their_heads() -> None:
    found = of(attention_block(alibi=[0.1, 0.2, 0.3, 0.4]))[4].op
    assert isinstance(found, ops.DotProductAttention) and found.scores.alibi_slopes == (0.3, 0.4)


def test_what_has_no_partner_stays_whole() -> None:
    """A product before a norm, or around a residual; attention with a mask of the caller's; the last product, unless its output may be shared out."""
    alone = [*linear(H, H), norm(), ops.MMT(weight(H, H)), ops.ResidualBegin(), ops.MMT(weight(H, H)), ops.ResidualEnd()]
    assert not any(r.shared for r in of(alone))
    assert not any(r.shared for r in of(attention_block(mask=True)))
    ends = [norm(), *linear(H, 24)]
    assert not any(r.shared for r in of(ends))
    shared = of(ends, shared_output=True)
    assert names(shared) == ["LayerNorm", "ColumnParallelMMT", "Add"] and shared[1].holdings["weight"].parts == (Part(24),)


def test_types_that_a_product_was_made_with_stay() -> None:
    high = ops.MMT(weight(H, H), x_dtype=ops.MMT.y_dtype, weight_dtype=ops.MMT.y_dtype)
    for made in of([high, ops.GELU(), high]):
        assert made.op.type_of("x") in (ops.MMT.y_dtype, ops.GELU.x_dtype)


def test_rows_are_shared_where_columns_are_not() -> None:
    found = of([*attention_block(), *gated_block(), norm(), *linear(H, 24)], sequence_parallel=True)
    assert [r.op.row_share is not None and (r.op.row_share.x, r.op.row_share.y) for r in found[:8]] == [
        (True, True), (True, True), (True, False), False, False, (False, True), (True, True), (True, True)
    ]  # fmt: skip
    assert all(holding.partial for r in (found[1], found[6], found[-1]) for holding in r.holdings.values())
    put = between_rows([r.op for r in found])
    assert [type(op).__name__ for op in put if op is not None] == ["ScatterRows", "GatherRows"]
    assert put[0] is not None and put[-1] is not None
    shared = of([*attention_block(), norm(), *linear(H, 24)], sequence_parallel=True, shared_output=True)
    assert [type(op).__name__ for op in between_rows([r.op for r in shared]) if op is not None] == ["ScatterRows"]


@pytest.mark.parametrize("cut", range(1, 16))
def test_wherever_a_list_is_cut_its_pieces_take_and_give_all_rows(cut: int) -> None:
    """As hooks on a module cut a pipeline: the first piece gathers what it scattered, and the second scatters anew."""
    whole = [r.op for r in of([*attention_block(), *gated_block()], sequence_parallel=True)]
    for piece in (whole[:cut], whole[cut:]):
        rows = False
        for op, before in zip([*piece, None], between_rows(piece), strict=True):
            rows = rows != (before is not None)
            share = op.row_share if op is not None else None
            assert rows == (share is not None and share.x)
            rows = share is not None and share.y
        assert not rows


def test_lists_that_share_no_rows_get_nothing_between() -> None:
    assert between_rows(attention_block()) == [None] * 9


@pytest.mark.parametrize(
    ("op_list", "size", "message"),
    [
        (attention_block(), 3, "the query heads that are shared out: expected a multiple of 3, .*, got 4"),
        (attention_block(groups=1), 8, "the query heads that are shared out: expected a multiple of 8, .*, got 4"),
        (gated_block(), 5, "the gate.*: expected a multiple of 5"),
        ([ops.MMT(weight(6, H)), ops.MMT(weight(H, 6))], 4, "the columns that are shared out: expected a multiple of 4, .*, got 6"),
    ],
)
def test_what_cannot_be_shared_out_equally_is_refused(op_list: list[Op], size: int, message: str) -> None:
    with pytest.raises(ShapeError, match=message) as caught:
        of(op_list, size, 0)
    assert "\n" not in str(caught.value) and "choose another number of processes" in str(caught.value)


def test_keys_that_do_not_divide_the_processes_are_refused() -> None:
    attention = ops.DotProductAttention(12, WIDTH, groups=4)
    with pytest.raises(
        ShapeError, match="the key heads that are shared out: expected a multiple of 6, the processes that share them, or a divisor of it"
    ):
        of([ops.MMT(weight(80, H)), attention, ops.MMT(weight(H, 48))], 6, 0)


def test_an_op_that_looks_at_whole_sequences_is_refused_where_rows_are_shared() -> None:
    with pytest.raises(ArgumentError, match="that computes each row from that row alone, got DotProductAttention"):
        of([norm(48), ops.DotProductAttention(HEADS, WIDTH), norm()], sequence_parallel=True)
