"""Batches that are padded behind each sequence, by lengths or by a mask: padding takes no part, and gives zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fusible import (
    GELU,
    DelayedScaling,
    KVCache,
    LayerNorm,
    Linear,
    MultiHeadedSelfAttention,
    MXFP8BlockScaling,
    Recipe,
    Residual,
    RMSNorm,
    Sequential,
    autocast,
)
from fusible.pytorch.engine.batch import read_batch

WIDTH, LENGTHS = 8, (5, 0, 2, 4)
RECIPES = [
    pytest.param(None, id="none"),
    pytest.param(DelayedScaling(amax_history_len=3), id="delayed"),
    pytest.param(MXFP8BlockScaling(), id="mxfp8"),
]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def model_of(between: nn.Module | None = None, *, causal: bool = True) -> Sequential:
    torch.manual_seed(1)
    attention = MultiHeadedSelfAttention(WIDTH, 2, causal=causal, rope_base=10000.0)
    first = Residual(LayerNorm(WIDTH), Linear(WIDTH, 3 * WIDTH), attention, Linear(WIDTH, WIDTH))
    second = Residual(RMSNorm(WIDTH), Linear(WIDTH, 12), GELU(), *([between] if between is not None else []), Linear(12, WIDTH))
    return Sequential(first, second)


def padded(lengths: tuple[int, ...] = LENGTHS, longest: int = 5) -> tuple[Tensor, Tensor]:
    """Sequences with what is no number behind them, and True for their tokens."""
    mask = torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)
    x = torch.randn(len(lengths), longest, WIDTH, generator=torch.Generator().manual_seed(2))
    return torch.where(mask.unsqueeze(2), x, float("nan")), mask


def run(model: nn.Module, x: Tensor, lens: Tensor, recipe: Recipe | None, of: Callable[[Tensor], Tensor] = lambda y: y) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = model(leaf, lens)
    of(y).square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    return [y.detach(), leaf.grad, *grads]  # type: ignore[list-item]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_padding_takes_no_part(causal: bool, recipe: Recipe | None) -> None:
    """Exactly what the concatenated tokens give, whatever stands in the padding, in three calls one after another; zeros elsewhere."""
    model, packed = model_of(causal=causal), model_of(causal=causal)
    x, mask = padded()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    for _ in range(3):
        y, dx, *grads = run(model, x, lengths, recipe)
        wanted_y, wanted_dx, *wanted = run(packed, x[mask], lengths, recipe)
        assert torch.equal(y[mask], wanted_y) and torch.equal(dx[mask], wanted_dx)
        assert not y[~mask].any() and not dx[~mask].any() and y.shape == dx.shape == x.shape
        assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))
    with torch.no_grad(), autocast(enabled=recipe is not None, recipe=recipe):
        assert torch.equal(model(x, lengths)[mask], packed(x[mask], lengths))


def test_sequences_are_those_of_one_call_each() -> None:
    model = model_of(causal=False)
    x, _mask = padded()
    y = model(x, torch.tensor(LENGTHS))
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(y[row, :length], model(x[row, :length]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_lengths_of_any_integer_dtype(dtype: torch.dtype) -> None:
    model = model_of()
    x, mask = padded()
    wanted = model(x, torch.tensor(LENGTHS, dtype=torch.int32))
    assert torch.equal(model(x, torch.tensor(LENGTHS, dtype=dtype)), wanted)
    assert torch.equal(model(x[mask], torch.tensor(LENGTHS, dtype=dtype)), wanted[mask])


@pytest.mark.parametrize("lengths", [(5, 1, 3), (5, 5), (1,)], ids=str)
def test_a_mask_is_its_lengths(lengths: tuple[int, ...]) -> None:
    model = model_of()
    x, mask = padded(lengths)
    assert torch.equal(model(x, mask), model(x, torch.tensor(lengths)))


def test_a_container_of_nothing_clears_padding_too() -> None:
    x = torch.ones(2, 3, 4)
    assert Sequential()(x, torch.tensor([3, 1])).sum(-1).tolist() == [[4, 4, 4], [4, 0, 0]] and torch.equal(Sequential()(x), x)


def test_lengths_are_read_where_they_are_whatever_the_default_device_is() -> None:
    x, mask = padded()
    for given in (torch.tensor(LENGTHS), torch.tensor((5, 1, 2, 4)), mask[[0, 2, 3]], torch.tensor([5, 5])):
        of_x = x[: len(given)]
        wanted = read_batch(of_x, given)
        with torch.device("meta"):
            found = read_batch(of_x, given)
        assert found.x.device == x.device and torch.equal(found.x.nan_to_num(), wanted.x.nan_to_num())
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in ((found.index, wanted.index), (found.seq_lens, wanted.seq_lens)))


class Shifted(nn.Module):
    """A module of others that makes something of zeros, and that wants its input as it came."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.ndim == 3
        return x + 1


@pytest.mark.parametrize("place", ["inside a residual", "last", "hooked"])
def test_modules_of_others_see_the_batch_as_it_came(place: str) -> None:
    if place == "inside a residual":
        model, plain = model_of(Shifted()), model_of(Shifted())
    else:
        model, plain = (model_of().append(Shifted() if place == "last" else Linear(WIDTH, WIDTH)) for _ in range(2))
        plain.load_state_dict(model.state_dict())
    x, mask = padded((5, 3))
    if place == "hooked":
        for made in (model, plain):
            made[2].register_forward_hook(lambda module, args, output: output + 1)
    y, dx, *grads = run(model, x, torch.tensor([5, 3]), None, lambda y: y)
    assert not y[~mask].any() and not dx[~mask].any() and all(g.isfinite().all() for g in grads)
    alone = [plain(x[row : row + 1, :length]) for row, length in enumerate((5, 3))]
    torch.testing.assert_close(y[mask], torch.cat([part[0] for part in alone]), rtol=1e-5, atol=1e-5)
    sum(part.square().sum() for part in alone).backward()  # type: ignore[union-attr]
    for a, b in zip(grads, plain.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad, rtol=1e-4, atol=1e-4)


def test_prompts_of_several_lengths_fill_a_cache() -> None:
    model = model_of()
    x, mask = padded((5, 3))
    more = torch.randn(2, 1, WIDTH)
    cache = KVCache(2, 8, dtype=torch.float32)
    with torch.no_grad():
        first = model(x, mask, cache)
        cache.advance([5, 3])
        second = model(more, cache=cache)
        for row, length in enumerate((5, 3)):
            whole = model(torch.cat([x[row, :length], more[row]]))
            torch.testing.assert_close(torch.cat([first[row, :length], second[row]]), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["traced", "xla"])
def test_compiled_models_take_them(way: str) -> None:
    model: Any = model_of()
    x, _mask = padded()
    for lens in (torch.tensor(LENGTHS), torch.tensor([5, 1, 2, 3])):
        wanted = run(model_of(), x.nan_to_num(), lens, None)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True) if way == "traced" else model.compile("xla")
        for a, b in zip(run(compiled, x.nan_to_num(), lens, None), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [None, torch.tensor([3, 4])], ids=["whole", "padded"])
@pytest.mark.usefixtures("alone")
def test_what_a_sharded_module_gives_is_no_view_and_may_be_changed_in_place(lengths: Tensor | None) -> None:
    """FSDP hangs the gathering before backward on the output, and warns (which fails a test here) where that is a view: it would be dropped."""
    torch.manual_seed(0)
    model = Sequential(LayerNorm(WIDTH), Linear(WIDTH, WIDTH))
    x = torch.randn(2, 4, WIDTH)
    call = (x,) if lengths is None else (x, lengths)
    wanted = model(*call) + 1
    wanted.square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",)))
    y = model(*call)
    y += 1
    y.square().sum().backward()
    assert torch.equal(y, wanted)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert parameter.grad is not None and grad is not None
        assert torch.equal(parameter.grad.to_local(), grad)


def test_a_sequence_may_be_empty() -> None:
    model = Sequential(Linear(16, 48), MultiHeadedSelfAttention(16, 2))
    x = torch.randn(3, 5, 16)
    y = model(x, seq_lens=torch.tensor([0, 5, 3]))
    assert not y[0].any() and not y[2, 3:].any()
    torch.testing.assert_close(y[1:2], model(x[1:2]))
    torch.testing.assert_close(y[2:, :3], model(x[2:, :3]))
