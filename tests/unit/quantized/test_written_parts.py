"""Writes to parts of quantized tensors, beside the same writes to a plain tensor of the dequantized values: they land, or raise; none is lost."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fusible
from fusible import tex
from fusible.errors import DTypeError, NotServedError, ShapeError, ValuesError
from fusible.pytorch.quantized_init import quantized_model_init
from fusible.quantized import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    GroupedTensor,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from fusible.tex import DType

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

ONE_SCALE: dict[str, tuple[Callable[[], Any], float]] = {
    "delayed": (lambda: Float8Quantizer(torch.tensor([16.0]), torch.zeros(1), E4M3), 2**-4),
    "current": (lambda: Float8CurrentScalingQuantizer(E4M3), 2**-4),
    "current-e5m2": (lambda: Float8CurrentScalingQuantizer(E5M2), 2**-3),
    "rowwise": (lambda: Float8CurrentScalingQuantizer(E4M3, columnwise=False), 2**-4),
    "columnwise": (lambda: Float8CurrentScalingQuantizer(E4M3, rowwise=False), 2**-4),
}
"""By name: a quantizer, and half a unit of its elements relative to the largest of a block, which bounds their rounding."""

BLOCKS: dict[str, tuple[Callable[[], Any], float]] = {
    "block-1d": (lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=1), 2**-4),
    "block-2d": (lambda: Float8BlockQuantizer(E4M3), 2**-4),
    "mxfp8": (lambda: MXFP8Quantizer(E4M3), 2**-4),
    "nvfp4": (NVFP4Quantizer, 2**-2 + 2**-4),  # elements, and the scales of their blocks
    "nvfp4-2d": (lambda: NVFP4Quantizer(with_2d_quantization=True), 2**-2 + 2**-4),
    "nvfp4-rows": (lambda: NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False), 2**-2 + 2**-4),
    "nvfp4-rht": (lambda: NVFP4Quantizer(with_rht=True, with_post_rht_amax=True), 2**-2 + 2**-4),
    "hybrid": (lambda: HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(E4M3), columnwise_quantizer=NVFP4Quantizer()), 2**-4),
}
EVERY = {**ONE_SCALE, **BLOCKS, "identity": (IdentityQuantizer, 0.0)}


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    return EVERY[name][0]()(normal(256, 256, dtype=dtype))


def plain(q: Any) -> torch.Tensor:
    return q.dequantize(dtype=torch.float32).clone()


V = normal(256, 256, seed=2) / 2

PARTS: dict[str, Callable[[Any], Any]] = {
    "a slice is zeroed": lambda t: t[:128].zero_(),
    "a slice is copied to": lambda t: t[3:130].copy_(V[:127]),
    "a slice with steps": lambda t: t[::2].copy_(V[::2]),
    "a slice of a slice": lambda t: t[16:200][8:40].fill_(0.5),
    "narrow": lambda t: t.narrow(0, 0, 128).fill_(0.25),
    "split": lambda t: torch.split(t, 128)[0].zero_(),
    "split in sizes": lambda t: t.split([100, 156])[1].mul_(0.5),
    "split of columns": lambda t: t.split(128, dim=1)[1].add_(0.5),
    "chunk": lambda t: t.chunk(2)[0].mul_(0),
    "select": lambda t: t[3].zero_(),
    "select of a column": lambda t: t.select(1, 7).fill_(0.5),
    "columns": lambda t: t[:, :128].zero_(),
    "both": lambda t: t[5:77, 9:200].copy_(V[:72, :191]),
    "unbind of a view": lambda t: t.view(2, 128, 256).unbind(0)[0].zero_(),
    "unbind": lambda t: t.unbind()[9].fill_(0.5),
    "a view of a part": lambda t: t[64:128].view(2, 32, 256).zero_(),
    "a part of a view": lambda t: t.view(4, 64, 256)[1].fill_(0.5),
    "as_strided": lambda t: t.as_strided((128, 256), (256, 1)).zero_(),
    "as_strided, further on": lambda t: t.as_strided((16, 8), (32, 2), 77).fill_(0.5),
    "index_put_ of a part": lambda t: t[:64].index_put_((torch.tensor([1, 3]),), V[:2].to(t.dtype)),
    "masked_fill_ of a part": lambda t: t[32:64].masked_fill_(V[:32] > 0, 0.5),
    "out= a part": lambda t: torch.neg(V[:32].to(t.dtype), out=t[32:64]),
    "foreach of parts": lambda t: torch.ops.aten._foreach_zero_([t[:32], t[64:96]]),
    "a part of what detach gives": lambda t: t.detach()[:16].zero_(),
    "a part of data": lambda t: t.data[:16].zero_(),
    "a part is a parameter": lambda t: torch.nn.Parameter(t[:16]).data.zero_(),
}
SETS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda t: t.__setitem__(slice(0, 128), 0.0),
    "halves": lambda t: (t.__setitem__(slice(None, 128), V[:128]), t.__setitem__(slice(128, None), V[128:])),
    "of data": lambda t: t.data.__setitem__(slice(5, 9), V[:4]),
    "one row": lambda t: t.__setitem__(5, V[5]),
    "columns": lambda t: t.__setitem__((slice(None), slice(30, 70)), 0.5),
    "an element": lambda t: t.__setitem__((3, 4), 0.5),
    "rows by a list": lambda t: t.__setitem__([1, 100], V[:2].to(t.dtype)),
    "a mask": lambda t: t.__setitem__(V > 0.5, 0.0),
    "with steps": lambda t: t.__setitem__((..., slice(None, None, 5)), 0.25),
    "a dimension more": lambda t: t.__setitem__((None, slice(1, 3)), 0.25),
    "all": lambda t: t.__setitem__(slice(None), V),
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([0, 9]), 0.5),
    "masked_fill_": lambda t: t.masked_fill_(V > 1, 0.0),
    "index_copy_": lambda t: t.index_copy_(0, torch.tensor([0, 9]), V[:2].to(t.dtype)),
}


def check(name: str, q: Any, before: torch.Tensor, write: Callable[[Any], Any]) -> None:
    """The values of ``q`` are those that ``write`` gives a plain tensor, rounded; to the bit where it wrote nothing to a block."""
    wanted, rounding = before.clone(), EVERY[name][1]
    nominal = wanted.to(q.dtype)
    write(nominal)
    changed = nominal != before.to(q.dtype)
    wanted[changed] = nominal[changed].float()
    got = plain(q)
    bound = rounding * wanted.abs() if name in ONE_SCALE else rounding * wanted.abs().amax()
    assert ((got - wanted).abs() <= bound + smallest(name, q)).all(), (got - wanted).abs().max()
    if name in ONE_SCALE or name == "identity":
        blocks = changed
    else:  # tiles hold every block of every format
        blocks = changed.view(2, 128, 2, 128).any(3).any(1).repeat_interleave(128, 0).repeat_interleave(128, 1)
        blocks = changed.any(1, keepdim=True).expand(256, 256) if name == "nvfp4-rows" else blocks  # a row has a scale, too
    assert torch.equal(got[~blocks], before[~blocks]), "what was not written has changed"
    assert changed.any() and (blocks.all() or (~blocks).any())
    copies_agree(name, q)


def copies_agree(name: str, q: Any) -> None:
    """The column-wise copy has the values of the row-wise one: the same bytes under one scale and of tiles, else rounded apart."""
    if name in ("rowwise", "columnwise", "nvfp4-rows", "identity", "nvfp4-rht"):
        return
    assert all(q.get_usages().values())
    rows, other = plain(q), q.detach()
    other.update_usage(rowwise_usage=False)
    columns, rounding = plain(other), 0.0 if name in ONE_SCALE or name in ("block-2d", "nvfp4-2d") else 2 * EVERY[name][1]
    rounding = 2 * (2**-2 + 2**-4) if name == "hybrid" else rounding
    assert ((rows - columns).abs() <= rounding * rows.abs().amax()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("write", PARTS)
@pytest.mark.parametrize("name", [*ONE_SCALE, "identity"])
def test_what_is_written_to_a_part_lands_in_its_tensor(name: str, write: str, dtype: torch.dtype) -> None:
    q = made(name, dtype)
    before, scale = plain(q), getattr(q, "_scale_inv", torch.zeros(1)).clone()
    if name == "columnwise" and "as_strided" in write:  # strides are those of rows
        with pytest.raises(ValuesError, match="of a part of a Float8Tensor"):
            PARTS[write](q)
        assert torch.equal(plain(q), before)
        return
    PARTS[write](q)
    check(name, q, before, PARTS[write])
    assert torch.equal(getattr(q, "_scale_inv", torch.zeros(1)), scale), "what had room under it has changed the scale"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("write", SETS)
@pytest.mark.parametrize("name", EVERY)
def test_what_is_assigned_by_an_index_lands_in_every_format(name: str, write: str, dtype: torch.dtype) -> None:
    q = made(name, dtype)
    before = plain(q)
    SETS[write](q)
    if write not in ("halves", "all"):
        check(name, q, before, SETS[write])
        return
    wanted = V.to(dtype).float()
    bound = EVERY[name][1] * (wanted.abs() if name in ONE_SCALE else wanted.abs().amax())
    assert ((plain(q) - wanted).abs() <= bound + smallest(name, q)).all()
    copies_agree(name, q)


def smallest(name: str, q: Any) -> float:
    """Of a tensor under one scale, half of the smallest magnitude, and what that is in the nominal dtype."""
    return q._scale_inv.item() * (2**-9 if name != "current-e5m2" else 2**-16) if name in ONE_SCALE else 0.0


@pytest.mark.parametrize("name", ["block-1d", "block-2d", "mxfp8", "nvfp4", "nvfp4-2d", "hybrid"])
def test_blocks_that_are_not_written_keep_their_bytes_in_both_copies(name: str) -> None:
    """The largest value is overwritten, too: by that of the rest, NVFP4 would scale every block anew; and a column-wise copy that was quantized of
    the tensor would be one of the row-wise values, rounded twice."""
    x = normal(256, 256, dtype=torch.bfloat16)
    x[3, 4] = 30.0
    q = BLOCKS[name][0]()(x)
    rows, columns = q.detach(), q.detach()
    rows.update_usage(columnwise_usage=False)
    columns.update_usage(rowwise_usage=False)
    before = plain(rows), plain(columns)
    q[:5, :5] = 0.25
    for copied, former in zip((rows, columns), before, strict=True):
        now = plain(copied)
        assert torch.equal(now[128:], former[128:]) and torch.equal(now[:, 128:], former[:, 128:]) and not torch.equal(now, former)
        assert ((now[:5, :5] - 0.25).abs() <= 0.25 * BLOCKS["nvfp4"][1] + now[:128, :128].abs().amax() * 2**-4).all()


@pytest.mark.parametrize("write", PARTS)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_copy_of_a_part_refuses_to_be_written_to(name: str, write: str) -> None:
    q = made(name)
    bytes_before = copy.deepcopy(q)
    with pytest.raises(ValuesError, match=r"^\w+ of a part of a \w+: expected a tensor that holds its values itself, got a part that is a copy; "):
        PARTS[write](q)
    assert torch.equal(plain(q), plain(bytes_before))


@pytest.mark.parametrize("name", [*ONE_SCALE, *BLOCKS])
def test_views_that_are_none_refuse_to_be_written_to(name: str) -> None:
    q = made(name)
    before = plain(q)
    views: list[Callable[[Any], Any]] = [lambda t: t.t(), lambda t: t.transpose(0, 1), lambda t: t[3, 5], lambda t: t.unsqueeze(0), lambda t: t[0:0]]
    views += [lambda t: t.t()[3], lambda t: t.t().view(256, 2, 128), lambda t: t.diagonal(), lambda t: t.t().detach()]
    for view in views:
        assert torch.equal(view(q) + 0, view(q.dequantize()))
        if view(q).numel():
            with pytest.raises(ValuesError, match="of a part of a "):
                view(q).zero_()
            with pytest.raises(ValuesError, match="of a part of a "):
                torch.add(view(q), 1, out=view(q))
    assert torch.equal(plain(q), before)


def test_a_refusing_part_is_read_as_a_plain_tensor() -> None:
    q = made("mxfp8", torch.float32)
    row, values = q[5], q.dequantize()[5].clone()
    assert np.array_equal(row.numpy(), values.numpy()) and row.tolist() == values.tolist() and repr(row) == repr(values)
    assert f"{row[0]:.2f}" == f"{values[0]:.2f}" and row[3].item() == values[3].item() and row.data_ptr()
    file = io.BytesIO()
    torch.save(row, file)
    file.seek(0)
    for own in (row.clone(), row + 0, copy.deepcopy(row), torch.load(file), torch.cat([row])):
        assert type(own) is torch.Tensor and torch.equal(own, values)
        own.zero_()
    q[7] = row
    assert torch.equal(q[7] + 0, values)
    assert torch.equal(torch.compile(lambda x: x * 2, backend="eager")(row), values * 2)
    q.requires_grad_()
    (q[5] * 2).sum().backward()
    assert torch.equal(q.grad.sum(1), 512.0 * torch.eye(256)[5]), "gradients pass through it"


@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "columnwise"])
def test_a_part_sees_what_is_written_to_its_tensor(name: str) -> None:
    q = made(name)
    part, other = q[16:48, 8:], q.view(4, 64, 256)[0]
    for write in (lambda: q.copy_(V * 3), lambda: q.mul_(0.5), lambda: q[20:30].fill_(1.0), lambda: q[20:30].fill_(900.0)):
        write()
        assert torch.equal(part.dequantize(), q.dequantize()[16:48, 8:]) and torch.equal(other.dequantize(), q.dequantize()[:64])


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_values_without_room_make_room(name: str) -> None:
    """The scale doubles, by which other values stay as they are; and it is the tensor's for all its parts and aliases."""
    q = made(name)
    before, scale, alias, part = plain(q), q._scale_inv.item(), q.detach(), q[100:]
    q[:2] = 1000.0
    assert torch.equal(plain(q)[2:].abs() > 2**-4, before[2:].abs() > 2**-4)
    kept = before[2:].abs() > 2**-4
    assert torch.equal(plain(q)[2:][kept], before[2:][kept]) and ((plain(q)[:2] - 1000).abs() <= 1000 * 2**-4).all()
    grown = q._scale_inv.item() / scale
    assert grown > 1 and np.log2(grown) == int(np.log2(grown)) and 1000 > 448 * scale * grown / 2
    assert torch.equal(plain(alias), plain(q)) and torch.equal(plain(part), plain(q)[100:])
    copies_agree(name, q)
    largest, former = plain(q).abs() > 2, plain(q)
    q[largest] = 0.0
    assert torch.equal(plain(q)[~largest], former[~largest]), "the scale has followed what is left"
    zeros = EVERY[name][0]()(torch.zeros(64, 64))
    zeros[:32] = 1e-3 * V[:32, :64]
    assert ((plain(zeros)[:32] - 1e-3 * V[:32, :64]).abs() <= 2**-4 * 1e-3 * V[:32, :64].abs() + 2**-18).all() and not plain(zeros)[32:].any()
    whole = plain(q)
    q[:2].fill_(float("nan"))
    assert plain(q)[:2].isnan().all() and torch.equal(plain(q)[2:], whole[2:])


def test_delayed_scaling_records_what_is_written_to_parts() -> None:
    q = made("delayed", torch.float32)
    quantizer = q._quantizer
    for write, seen in ((lambda: q[:2].fill_(20.0), 20.0), (lambda: q[3:5].copy_(7 * torch.ones(2, 256)), 7.0), (lambda: q.view(-1)[:3], 0.0)):
        quantizer.amax.zero_()
        write()
        assert quantizer.amax.item() == seen
    quantizer.amax.zero_()
    q[1, 2] = -9.0
    assert quantizer.amax.item() == 9.0


@pytest.mark.parametrize("write", [lambda t: t[:64].fill_(0.5), lambda t: t[:, 3:9].zero_(), lambda t: t.zero_(), lambda t: t[5, 6:].fill_(1.0)])
def test_no_transposed_copy_goes_stale(write: Callable[[Any], Any]) -> None:
    """Whoever has the transposed copy, when it was made, and through whom is written."""

    def right(t: Any) -> bool:
        if not t.get_usages()["columnwise"]:
            return True
        return torch.equal(t._transpose.movedim(0, -1), q._data if t.shape == q.shape else q._data[:128])

    for usage in (True, False):
        q = made("current")
        alias, part, view = q.detach(), q[:128], q.view(2, 128, 256)
        for t in (alias, part, view):
            t.update_usage(columnwise_usage=usage)
        q.update_usage(columnwise_usage=not usage)
        for through in (alias, part, view.view(256, 256), q, q.data):
            write(through)
            assert all(map(right, (q, alias, part))), through
            q.update_usage(columnwise_usage=True)
            assert q.get_usages()["columnwise"] and right(q)


@pytest.mark.parametrize("kind", ["current", "mxfp8"])
def test_writes_that_go_around_torch_are_kept_too(kind: str) -> None:
    q = made(kind)
    before, part = plain(q), q[:128]
    for call in (lambda: part.quantize_(V[:128]), lambda: part.copy_from_storage(made(kind)[128:])):
        if kind == "mxfp8":
            with pytest.raises(ValuesError, match="quantize_ of a part"):
                call()
        else:
            call()
            assert torch.equal(plain(q)[128:], before[128:]) and torch.equal(plain(part), plain(q)[:128]) and not torch.equal(plain(q), before)
    same = plain(q)
    part.clone().zero_()
    if kind == "current":
        part.quantize_(V[:128] * 9, noop_flag=torch.ones(1))
    assert torch.equal(plain(q), same)


def test_a_stack_takes_what_is_assigned_and_refuses_writes_to_its_parts() -> None:
    g = GroupedTensor.of_stack(normal(4, 64, 64), MXFP8Quantizer(E4M3))
    before = plain(g)
    with pytest.raises(ValuesError, match="^zero_ of a part of a GroupedTensor"):
        g[1:3].zero_()
    assert torch.equal(plain(g), before)
    g[1:3] = 0.5
    assert torch.equal(plain(g)[1:3], torch.full((2, 64, 64), 0.5)) and torch.equal(plain(g)[0], before[0]) and torch.equal(plain(g)[3], before[3])


RECIPES = [fusible.DelayedScaling(), fusible.Float8CurrentScaling(), fusible.MXFP8BlockScaling(), fusible.Float8BlockScaling()]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_a_weight_that_is_filled_part_by_part_is_what_passes_gradients_and_checkpoints_see(recipe: Any) -> None:
    """As NVIDIA's tutorial fills ``fc1_weight``: by halves, through ``state_dict`` and ``data``; between passes, which must not use former copies."""
    with quantized_model_init(recipe=recipe):
        filled = fusible.Linear(128, 256, bias=False, param_dtype=torch.bfloat16)
    x, g, halves = normal(128, 128, seed=3).bfloat16(), normal(128, 256, seed=5).bfloat16(), normal(256, 128, seed=4).bfloat16() / 8

    def check_pass() -> None:
        given, weight = x.clone().requires_grad_(), filled.weight.dequantize().float().detach()
        with fusible.autocast(recipe=recipe):
            y = filled(given)
        y.backward(g)
        for got, wanted in ((y, x.float() @ weight.t()), (given.grad, g.float() @ weight)):
            assert (got - wanted).abs().max() <= 2**-3 * wanted.abs().max()

    check_pass()
    weight = filled.state_dict()["weight"]
    weight.data[:128] = halves[:128]
    weight.data[128:] = halves[128:]
    assert ((filled.weight.dequantize().float() - halves.float()).abs() <= 2**-4 * halves.float().abs().amax()).all()
    file = io.BytesIO()
    torch.save(filled.state_dict(), file)
    file.seek(0)
    assert torch.equal(torch.load(file)["weight"].dequantize(), filled.weight.dequantize())
    check_pass()
    for frozen in (True, False):
        with torch.no_grad():
            filled.weight[:128] = 0.0 if frozen else halves[128:]
        with fusible.frozen_weights() if frozen else torch.no_grad(), torch.no_grad(), fusible.autocast(recipe=recipe):
            assert bool(filled(x)[:, :128].any()) is not frozen


CUTS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda t: t[128:],
    "columns": lambda t: t[:, :128],
    "split": lambda t: t.split([128, 128])[0],
    "steps": lambda t: t[::2],
    "a view": lambda t: t.view(2, 128, 256)[1],
}
INTO: dict[str, Callable[[Any, torch.Tensor, Any], Any]] = {
    "tex.quantize": lambda quantizer, x, out: tex.quantize(x, quantizer, out),
    "tex.rmsnorm_fwd": lambda quantizer, x, out: tex.rmsnorm_fwd(x, torch.ones(x.shape[-1]), 1e-5, out, quantizer, tex.DType.kFloat32, 0, False),
    "quantize": lambda quantizer, x, out: quantizer.quantize(x, out=out),
    "update_quantized": lambda quantizer, x, out: quantizer.update_quantized(x, out),
}


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("into", INTO)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", [*ONE_SCALE, *BLOCKS])
def test_what_a_quantizer_writes_to_a_part_lands_in_its_tensor_or_is_refused(name: str, cut: str, into: str, backend: str) -> None:
    """A scale of its own would be that of the whole tensor, whose other values it would change."""
    q = made(name)
    before, quantizer = plain(q), EVERY[name][0]()
    part, wanted = CUTS[cut](q), before.clone()
    x = 3 * normal(*part.shape, seed=2)
    CUTS[cut](wanted).copy_(x)
    others = wanted == before
    with tex.set_backend(backend):
        if name in ONE_SCALE and "tex" not in into:
            INTO[into](quantizer, x, part)
            assert ((plain(q) - wanted).abs() <= EVERY[name][1] * wanted.abs() + smallest(name, q)).all()
            assert ((plain(q) - before)[others].abs() <= smallest(name, q)).all()
            with pytest.raises(ShapeError):
                INTO[into](quantizer, x[:1], part)
        else:
            with pytest.raises((ValuesError, DTypeError, NotServedError)):
                INTO[into](quantizer, x, part)
            assert torch.equal(plain(q), before)
