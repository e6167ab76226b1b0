"""``prim.attention_step``: what the three functions that it is made of give in turn, to the bit, and theirs where a device's library has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusible import cpp_extensions, tex
from fusible.errors import FusibleError, ShapeError
from fusible.tex.calls.kv_cache import attention_of_step, copy_of_step
from fusible.tex.interface.declare import CallArguments
from fusible.tex.selection.registry import registry

BACKENDS = ["torch", *(["cpu"] if cpp_extensions.available else [])]


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _step(**more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    qkv = torch.randn(4, 8, 16, generator=generator).bfloat16()
    q, k, v = qkv.split([4, 2, 2], 1)
    caches = [torch.randn(6, 4, 2, 16, generator=generator).bfloat16() for _ in range(2)]
    return {
        "q": q, "k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1], "page_table": torch.stack((_ints(5, 1, 0), _ints(2, 3, 4))),
        "cu_new_lens": _ints(0, 3, 4), "cu_cached_lens": _ints(0, 9, 14), "angles": torch.rand(12, 1, 1, 16, generator=generator) * 6,
        "start_positions": _ints(6, 4), "interleaved": False, "max_new_len": 3, "window_size": (-1, -1), "scale": 0.25, **more,
    }  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("more", [{}, {"angles": None, "start_positions": None}, {"interleaved": True, "window_size": (2, 0)}], ids=repr)
def test_a_step_is_its_three_calls_to_the_bit(backend: str, more: dict[str, Any]) -> None:
    at_once, apart = (_step(**more) for _ in range(2))
    with tex.set_backend(backend):
        o = tex.prim.attention_step(**at_once)
        call = CallArguments(**apart)
        q, k = call.q, call.k
        if call.angles is not None:
            rope = call.start_positions, tex.NVTE_QKV_Format.NVTE_THD, call.interleaved, call.cu_new_lens, 1, 0
            q, k = (tex.fused_rope_forward(x, call.angles, *rope) for x in (q, k))
        tex.copy_to_kv_cache(**copy_of_step(call, k))
        wanted = tex.fused_attn_fwd(**attention_of_step(call, q))[0]
    assert torch.equal(o, wanted) and o.dtype is torch.bfloat16
    assert all(torch.equal(at_once[name], apart[name]) for name in ("k_cache", "v_cache"))
    assert not torch.equal(at_once["k_cache"], _step()["k_cache"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_of_no_sequence_give_nothing(backend: str) -> None:
    given = _step(cu_new_lens=_ints(0, 2, 3))
    torch.full((4, 4, 16), torch.nan, dtype=torch.bfloat16)  # what freed memory may hold
    with tex.set_backend(backend):
        o = tex.prim.attention_step(**given)
    assert o[:3].all() and not o[3].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_cache_that_an_operand_lies_in_is_refused(backend: str, name: str) -> None:
    given = _step()
    rows = given["k_cache"].view(-1, 2, 16)
    given[name] = rows[:8].view(4, 4, 16) if name == "q" else rows[:4]
    before = given["v_cache"].clone()
    with tex.set_backend(backend), pytest.raises(FusibleError, match="k_cache of .*attention_step: expected memory of its own"):
        tex.prim.attention_step(**given)
    assert torch.equal(given["v_cache"], before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_fit_is_refused_before_anything_is_written(backend: str) -> None:
    x = torch.randn(4, 3, 16).bfloat16()
    wrong: dict[str, dict[str, Any]] = {
        "q": {"q": x}, "k": {"k": x[:3, :2]}, "v": {"v": x[:, :2].float()}, "k_cache": {"k_cache": torch.zeros(6, 4, 2, 8).bfloat16()},
        "v_cache": {"v_cache": torch.zeros(6, 4, 2, 16)}, "page_table": {"page_table": _ints(5, 1, 0)}, "cu_new_lens": {"cu_new_lens": _ints(0, 4)},
        "angles": {"angles": torch.rand(5, 1, 1, 16)}, "window_size": {"window_size": (1, 2, 3)},
    }  # fmt: skip
    for name, change in wrong.items():
        given = _step(**change)
        before = [given[cache].clone() for cache in ("k_cache", "v_cache")]
        with tex.set_backend(backend), pytest.raises(FusibleError, match="attention") as error:
            tex.prim.attention_step(**given)
        assert name in str(error.value) or name == "angles", (name, error.value)
        assert all(torch.equal(given[cache], kept) for cache, kept in zip(("k_cache", "v_cache"), before, strict=True)), name
    with pytest.raises(ShapeError, match=r"q of .*attention_step: expected heads that are a multiple of the 2 of k, got 3; share"):
        tex.prim.attention_step(**_step(q=x))


@pytest.fixture
def library() -> Iterator[list[str]]:
    """A library of a device that has the three functions, and no step."""
    called: list[str] = []

    @tex.register_backend
    class Library(tex.TEXBackendBase):
        NAME, PRIORITY, DEVICES = "a_library", 400, frozenset({"meta"})

        def fused_rope_forward(self, input, *others):
            called.append("fused_rope_forward")
            return torch.empty_like(input)

        def copy_to_kv_cache(self, *others):
            called.append("copy_to_kv_cache")

        def fused_attn_fwd(self, *others):
            called.append("fused_attn_fwd")
            return [torch.empty(4, 4, 16, device="meta")]

    yield called
    registry.unregister_backend("a_library")


def test_a_step_on_a_device_is_made_of_the_functions_of_its_library(library: list[str]) -> None:
    given: dict[str, Any] = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in _step().items()}
    assert tex.prim.attention_step(**given).shape == (4, 4, 16)
    assert library == ["fused_rope_forward", "fused_rope_forward", "copy_to_kv_cache", "fused_attn_fwd"]
