"""Fingerprints of bytes: the same at every level and on any number of threads, and another after each kind of write that a weight sees."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusible import cpp_extensions
from fusible.errors import ArgumentError, DTypeError
from fusible.tex.backends.cpu import fingerprints

CHUNK, BLOCK = 128 * 1024, 256
"""Bytes that one thread reads, and that one step of the kernel takes."""
SIZES = [0, 1, 3, 4, 5, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]


def random_bytes(size: int, seed: int = 0) -> Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def of(x: Tensor) -> tuple[int, int]:
    return cpp_extensions.fingerprints([x])[0]


@pytest.mark.parametrize("size", SIZES)
def test_neither_level_nor_threads_nor_the_tensors_beside_it_matter(size: int) -> None:
    x, other = random_bytes(size), random_bytes(77)
    wanted = of(x)
    for level in cpp_extensions.usable_levels():
        cpp_extensions.set_level(level)
        assert all(cpp_extensions.fingerprints([x], threads) == [wanted] for threads in (1, 2, 3))
        assert cpp_extensions.fingerprints([other, x, other, x])[1::2] == [wanted, wanted]
    assert all(0 <= part < 2**64 for part in wanted)


def test_it_does_not_depend_on_where_the_bytes_lie() -> None:
    x = random_bytes(1000)
    for offset in range(8):
        moved = torch.cat([random_bytes(offset, 1), x])[offset:]
        assert of(moved) == of(x)


@pytest.mark.parametrize("size", [size for size in SIZES if size])
def test_one_changed_byte_changes_both_halves(size: int) -> None:
    x = random_bytes(size)
    before = of(x)
    for place in sorted({0, size // 3, size // 2, max(size - 5, 0), size - 1}):
        for bit in range(8):
            changed = x.clone()
            changed[place] ^= 1 << bit
            after = of(changed)
            assert before[0] != after[0] and before[1] != after[1]


def test_a_length_is_told_from_zeros_at_the_end() -> None:
    assert len({of(torch.zeros(size, dtype=torch.uint8)) for size in SIZES}) == len(SIZES)


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": lambda w: -w,
    "neg of two rows": lambda w: torch.cat([-w[:2], w[2:]]),
    "sign of every second": lambda w: w * torch.tensor([1.0, -1.0]).repeat(w.shape[1] // 2).to(w.dtype),
    "double": lambda w: w * 2,
    "add": lambda w: w + 1,
    "rows swapped": lambda w: w.flip(0),
    "columns swapped": lambda w: w.flip(1),
    "neighbours swapped": lambda w: w.view(-1, 2).flip(1).reshape(w.shape),
    "rolled by a block": lambda w: w.view(-1).roll(64).view(w.shape),
    "rolled by a row": lambda w: w.roll(1, 0),
    "zeros": torch.zeros_like,
    "one ulp up": lambda w: torch.nextafter(w.float(), torch.tensor(9.0)).to(w.dtype) if w.dtype is torch.float32 else w * (1 + 2**-7),
    "small update": lambda w: w - 0.01 * w.sign(),
    "clamped": lambda w: w.clamp(-0.5, 0.5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 64), (64, 64), (128, 512)])
def test_what_is_done_to_weights_is_seen(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Changes of the sign bit alone come in pairs in every word's column here: a hash that only multiplies would lose them."""
    torch.manual_seed(0)
    for w in (torch.randn(shape).to(dtype), torch.ones(shape, dtype=dtype)):
        found = {name: of(write(w).contiguous()) for name, write in WRITES.items() if not torch.equal(write(w), w)}
        assert of(w) not in found.values()
    assert len(found) > 8


def test_a_thousand_random_pairs_of_changes_are_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64 * 64, generator=generator)
    before = of(x)
    for _ in range(1000):
        one, other = torch.randint(len(x), (2,), generator=generator).tolist()
        changed = x.clone()
        changed[one], changed[other] = changed[other] + 1, -changed[one]
        assert of(changed) != before


def test_what_it_does_not_read_is_refused() -> None:
    with pytest.raises(ArgumentError, match="contiguous"):
        cpp_extensions.fingerprints([torch.ones(4, 4).t()])
    with pytest.raises(DTypeError):
        cpp_extensions.fingerprints([3])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it lies": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "between gaps": lambda x: torch.stack([x, -x], -1)[..., 0],
    "by a lazy negation": lambda x: torch._neg_view(-x),
    "transposed, by a lazy negation": lambda x: torch._neg_view((-x).t().contiguous()).t(),
    "a parameter": lambda x: torch.nn.Parameter(x.t().contiguous().t()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_count_and_not_how_they_lie(layout: str) -> None:
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(3))
    assert fingerprints([LAYOUTS[layout](x), x + 1]) == [of(x), of(x + 1)]


def test_what_lies_well_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Tensor] = []
    monkeypatch.setattr(cpp_extensions, "fingerprints", read.extend)
    x = torch.randn(7, 12)
    fingerprints([x])
    assert read[0] is x
