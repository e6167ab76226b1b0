"""What generation needs: filling a KV cache, and attention of a few new tokens to a long one, dense or in pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tex_attention import F, L, M, Problem, S, Tensors, cumulative, cut, forward, reference, tensors
from tex_backends import Runner, on_backends
from torch import Tensor

from fusible.conformance.table import close
from fusible.errors import ArgumentError, ShapeError

pytestmark = on_backends("copy_to_kv_cache", "fused_attn_fwd")

NEW, CACHED = (3, 0, 1, 5), (3, 4, 11, 9)
GROUPS, WIDTH, PAGE, PAGES_EACH = 2, 6, 4, 3


def new_tokens(generator: torch.Generator, name: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """The new tokens of each sequence, and the tensor that they make; its other tokens are large."""
    each = [torch.randn(n, GROUPS, WIDTH, generator=generator).to(dtype) for n in NEW]
    if name == "THD":
        return each, torch.cat([*each, torch.full((2, GROUPS, WIDTH), 77.0, dtype=dtype)])
    dense = torch.full((len(NEW), max(NEW), GROUPS, WIDTH), 77.0, dtype=dtype)
    for row, tokens in zip(dense, each, strict=True):
        row[: len(tokens)] = tokens
    return each, dense if name == "BSHD" else dense.transpose(0, 1).contiguous()


def copy(runner: Runner, name: str, news: tuple[Tensor, Tensor], caches: tuple[Tensor, Tensor], table: Tensor | None, dense: bool) -> None:
    runner(
        "copy_to_kv_cache",
        new_k=news[0],
        new_v=news[1],
        k_cache=caches[0],
        v_cache=caches[1],
        page_table=table,
        cu_new_lens=cumulative(NEW),
        cu_cached_lens=cumulative(CACHED),
        kv_format=F[f"NVTE_{name}"],
        b=len(NEW),
        max_ctx_len=max(NEW),
        max_seq_len=PAGE * PAGES_EACH,
        max_pages_per_seq=1 if dense else PAGES_EACH,
        is_non_paged=dense,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["THD", "BSHD", "SBHD"])
def test_new_tokens_go_to_the_pages_of_their_positions_and_nothing_else_changes(runner: Runner, name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    (k, new_k), (v, new_v) = (new_tokens(generator, name, dtype) for _ in range(2))
    pages = len(NEW) * PAGES_EACH + 1
    caches = tuple(torch.randn(pages, PAGE, GROUPS, WIDTH, generator=generator).to(dtype) for _ in range(2))
    table = torch.randperm(pages, generator=generator)[: pages - 1].view(len(NEW), PAGES_EACH).int()
    expected = [cache.clone() for cache in caches]
    for cache, news in zip(expected, (k, v), strict=True):
        for i, tokens in enumerate(news):
            for t, token in enumerate(tokens):
                position = CACHED[i] - NEW[i] + t
                cache[table[i, position // PAGE], position % PAGE] = token
    copy(runner, name, (new_k, new_v), (caches[0], caches[1]), table, dense=False)
    assert all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True))


@pytest.mark.parametrize("rows", [None, (0, 1, 2, 3), (0, 2, 4, 5), (3, 0, 1, 2)])
def test_a_dense_cache_moves_its_sequences_to_their_rows_at_once(runner: Runner, rows: tuple[int, ...] | None) -> None:
    generator = torch.Generator().manual_seed(5)
    each, new = new_tokens(generator, "THD", torch.float32)
    cache = torch.randn(6, PAGE * PAGES_EACH, GROUPS, WIDTH, generator=generator)
    before = cache.clone()
    copy(runner, "THD", (new, new), (cache, cache.clone()), None if rows is None else torch.tensor(rows, dtype=torch.int32), dense=True)
    for i, tokens in enumerate(each):
        former = CACHED[i] - NEW[i]
        assert torch.equal(cache[i, :former], before[i if rows is None else rows[i], :former])
        assert torch.equal(cache[i, former : CACHED[i]], tokens)


def test_rows_of_a_cache_are_its_pages_by_a_flat_table(runner: Runner) -> None:
    """A dense cache whose sequences stay in their rows: one page for each, and a table without a second dimension."""
    generator = torch.Generator().manual_seed(6)
    each, new = new_tokens(generator, "BSHD", torch.float32)
    cache = torch.randn(6, PAGE * PAGES_EACH, GROUPS, WIDTH, generator=generator)
    expected = cache.clone()
    for i, tokens in enumerate(each):
        expected[i, CACHED[i] - NEW[i] : CACHED[i]] = tokens
    table = torch.arange(6, dtype=torch.int32)
    common = {"cu_new_lens": cumulative(NEW), "cu_cached_lens": cumulative(CACHED), "kv_format": F.NVTE_BSHD, "b": len(NEW)}
    sizes = {"max_ctx_len": max(NEW), "max_seq_len": PAGE * PAGES_EACH, "max_pages_per_seq": 1, "is_non_paged": False}
    runner("copy_to_kv_cache", new_k=new, new_v=new, k_cache=cache, v_cache=cache.clone(), page_table=table, **common, **sizes)
    assert torch.equal(cache, expected)
    for changes, error, message in (
        ({"cu_new_lens": cumulative(NEW)[:-1]}, ShapeError, "cu_new_lens.*: expected"),
        ({"page_table": None}, ArgumentError, "page_table .*: expected a table"),
        ({"page_table": table[:2]}, ShapeError, "page_table.*: expected"),
        ({"new_k": new[..., :2]}, ShapeError, "new_k and k_cache.*: expected"),
    ):
        arguments = {"new_k": new, "new_v": new, "k_cache": cache, "v_cache": cache, "page_table": table, **common, **sizes, **changes}
        with pytest.raises(error, match=message):
            runner("copy_to_kv_cache", **arguments)
    assert torch.equal(cache, expected)


GENERATION = {
    "one token each": Problem(lengths_q=(1, 1, 1), lengths_kv=(700, 1, 513), heads=8, groups=2),
    "bf16": Problem(lengths_q=(1, 1, 1), lengths_kv=(700, 1, 1030), heads=8, groups=2, dtype=torch.bfloat16, width=64, width_v=64),
    "fp16": Problem(lengths_q=(1, 2), lengths_kv=(300, 257), heads=6, groups=2, dtype=torch.float16, width=40, width_v=24),
    "no group": Problem(lengths_q=(1, 1), lengths_kv=(129, 640)),
    "one kv head": Problem(lengths_q=(1,), lengths_kv=(4200,), heads=8, groups=1, dtype=torch.bfloat16, width=32, width_v=32),
    "a few tokens each, and none": Problem(lengths_q=(3, 0, 7), lengths_kv=(300, 20, 7), groups=2),
    "a prompt beside single tokens": Problem(lengths_q=(150, 1, 1), lengths_kv=(150, 40, 600), groups=1),
    "window": Problem(lengths_q=(2, 1), lengths_kv=(900, 300), groups=2, window=(130, 0), bottom_right_diagonal=True),
    "learnable": Problem(lengths_q=(1, 1), lengths_kv=(700, 512), groups=2, softmax=S.NVTE_LEARNABLE_SOFTMAX),
}


def generation(name: str) -> tuple[Problem, Tensors]:
    problem = replace(GENERATION[name], layout=L.NVTE_THD_BSHD_BSHD, mask=M.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK)
    return problem, tensors(problem)


@pytest.mark.parametrize("name", GENERATION)
def test_new_tokens_attend_to_a_long_cache(runner: Runner, name: str) -> None:
    problem, given = generation(name)
    o, stats, *_ = forward(runner, problem, given, is_training=False)
    offset = None if given.offset is None else given.offset.double().flatten()
    length = problem.width + problem.max_kv
    eps, largest = torch.finfo(problem.dtype).eps, max(x.abs().max().item() for x in given.v)
    rounding = 0.5 * eps * largest / torch.finfo(torch.float32).eps / (length + 16)  # of probabilities, which sum to at most 1
    found = zip(cut(o, "THD", problem.lengths_q, 0), cut(stats, "THD", problem.lengths_q, 0), strict=True)
    for i, (row, row_stats) in enumerate(found):
        expected, lse = reference(problem, given.q[i].double(), given.k[i].double(), given.v[i].double(), None, offset, None)
        close(row, expected, problem.dtype, length, 8.0 + rounding)
        close(row_stats[..., 0].t(), lse, torch.float32, length, 8.0)


def paged(x: Tensor, page: int, generator: torch.Generator, sequence_first: bool) -> tuple[Tensor, Tensor]:
    """A dense cache cut into pages in random order, some unused, and its table."""
    b, s, g, d = x.shape
    each = -(-s // page)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, each * page - s), value=77.0)
    table = torch.randperm(b * each + 2, generator=generator)[: b * each]
    pages = torch.full((b * each + 2, page, g, d), 77.0, dtype=x.dtype)
    pages[table] = padded.reshape(b * each, page, g, d)
    return pages.transpose(0, 1).contiguous() if sequence_first else pages, table.view(b, each).int()


@pytest.mark.parametrize("layout", [L.NVTE_Paged_KV_THD_BSHD_BSHD, L.NVTE_Paged_KV_THD_SBHD_SBHD])
@pytest.mark.parametrize("page", [1, 16, 48, 256])
@pytest.mark.parametrize("name", ["bf16", "a few tokens each, and none", "a prompt beside single tokens", "window"])
def test_a_paged_cache_reads_as_the_dense_one_of_its_pages(runner: Runner, name: str, page: int, layout: Any) -> None:
    problem, given = generation(name)
    expected = forward(runner, problem, given)
    generator = torch.Generator().manual_seed(page)
    (k, table_k), (v, table_v) = (paged(x, page, generator, "SBHD" in layout.name) for x in given.packed[1:])
    if problem.lengths_kv[1] <= page:
        table_k[1, 1:] = table_v[1, 1:] = -1  # stands for no page, and is not read
    changes = {"K": k, "V": v, "qkv_layout": layout, "page_table_k": table_k, "page_table_v": table_v}
    got = forward(runner, problem, given, **changes)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("layout", ["BSHD_BSHD_BSHD", "BSHD_SBHD_SBHD", "SBHD_BSHD_BSHD", "SBHD_SBHD_SBHD"])
def test_a_paged_cache_of_dense_queries(runner: Runner, layout: str) -> None:
    dense = L.NVTE_SBHD_BSHD_BSHD if layout.startswith("SBHD") else L.NVTE_BSHD_BSHD_BSHD
    problem = Problem(layout=dense, mask=M.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK, lengths_q=(2, 1), lengths_kv=(9, 5))
    given = tensors(problem)
    (k, table_k), (v, table_v) = (paged(x, 4, torch.Generator().manual_seed(1), layout.endswith("SBHD_SBHD")) for x in given.packed[1:])
    changes = {"K": k, "V": v, "qkv_layout": L[f"NVTE_Paged_KV_{layout}"], "page_table_k": table_k, "page_table_v": table_v}
    for got, expected in zip(forward(runner, problem, given, **changes)[:2], forward(runner, problem, given)[:2], strict=True):
        close(got, expected.double(), torch.float32, 20, 8.0)
