"""What every quantized tensor does as a ``torch.Tensor``: against plain torch on the dequantized values, and exactly where bytes are copied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusible import tex
from fusible.errors import ArgumentError, FusibleError, ShapeError
from fusible.quantized import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    HybridQuantizedTensor,
    HybridQuantizer,
    IdentityQuantizer,
    IdentityTensor,
    MXFP8Quantizer,
    MXFP8Tensor,
    NVFP4Quantizer,
    NVFP4Tensor,
    QuantizedTensor,
    Quantizer,
)
from fusible.quantized.parts import PartOfValues
from fusible.tex import DType
from fusible.tex.operands import kind

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


def hybrid() -> HybridQuantizer:
    return HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(E4M3), columnwise_quantizer=NVFP4Quantizer())


MAKERS: dict[str, tuple[type, Callable[[], Quantizer]]] = {
    "delayed": (Float8Tensor, lambda: Float8Quantizer(torch.tensor([16.0]), torch.zeros(1), E4M3)),
    "current": (Float8Tensor, lambda: Float8CurrentScalingQuantizer(E5M2)),
    "block-1d": (Float8BlockwiseQTensor, lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=1)),
    "block-2d": (Float8BlockwiseQTensor, lambda: Float8BlockQuantizer(E4M3)),
    "mxfp8": (MXFP8Tensor, lambda: MXFP8Quantizer(E4M3)),
    "nvfp4": (NVFP4Tensor, NVFP4Quantizer),
    "nvfp4-2d": (NVFP4Tensor, lambda: NVFP4Quantizer(with_2d_quantization=True)),
    "nvfp4-rows": (NVFP4Tensor, lambda: NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False)),
    "nvfp4-4over6": (NVFP4Tensor, lambda: NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256)),
    "hybrid": (HybridQuantizedTensor, hybrid),
    "identity": (IdentityTensor, IdentityQuantizer),
}
EVERY = pytest.mark.parametrize("name", MAKERS)


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(name: str, *shape: int, seed: int = 1) -> Any:
    return MAKERS[name][1]()(normal(*(shape or (256, 64)), seed=seed))


def buffers(q: Any) -> dict[str, torch.Tensor]:
    """Every tensor within, by name."""
    found = {name: getattr(q, attribute) for name, attribute in q._TENSORS.items() if getattr(q, attribute) is not None}
    for name, attribute in q._PARTS.items():
        part = getattr(q, attribute)
        found |= {f"{name}.{inner}": tensor for inner, tensor in (buffers(part) if part is not None else {}).items()}
    return found


def same_bytes(a: Any, b: Any) -> bool:
    mine, theirs = buffers(a), buffers(b)
    return mine.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


@EVERY
def test_a_quantizer_gives_the_tensor_of_its_format_and_internally_the_storage(name: str) -> None:
    cls, make = MAKERS[name]
    q = make()(normal(64, 32))
    assert type(q) is cls and isinstance(q, (QuantizedTensor, torch.Tensor)) and isinstance(q, cls._STORAGE) and q.shape == (64, 32)
    assert q.dtype is torch.bfloat16 and q.device.type == "cpu" and not q.requires_grad and q.is_contiguous()
    internal = make()
    internal.internal = True
    bare = internal(normal(64, 32))
    assert type(bare) is cls._STORAGE and not isinstance(bare, torch.Tensor) and same_bytes(bare, q)
    assert tuple(bare.shape) == tuple(bare.size()) == (64, 32) and bare.dtype is torch.bfloat16 and bare.device.type == "cpu"
    assert torch.equal(bare.dequantize(), q.dequantize()) and kind(bare) == kind(q) and kind(q)[1] == "cpu" and repr(bare)
    empty = make().make_empty([64, 32], dtype=torch.float32, requires_grad=True)
    assert type(empty) is cls and empty.dtype is torch.float32 and empty.requires_grad and buffers(empty).keys() == buffers(q).keys()


@EVERY
def test_operations_see_the_values(name: str) -> None:
    q, other = made(name), normal(256, 64, seed=2)
    values = q.dequantize()
    assert type(values) is torch.Tensor and values.dtype is torch.bfloat16 and q.dequantize(dtype=torch.float32).dtype is torch.float32
    assert torch.equal(q + other, values + other) and torch.equal(other - q, other - values) and torch.equal(q.t() @ other, values.t() @ other)
    assert torch.equal(torch.cat([q, q]), torch.cat([values, values])) and torch.equal(q[3:7, ::2], values[3:7, ::2]) and q.sum() == values.sum()
    assert type(q * 2) is torch.Tensor and torch.equal(torch.stack([q, other]), torch.stack([values, other]))
    assert torch.equal(torch.nn.functional.linear(other, q), torch.nn.functional.linear(other, values)) and "data=tensor" in repr(q)


@EVERY
def test_detach_clone_and_copies_keep_the_bytes(name: str) -> None:
    q = made(name)
    values = q.dequantize().clone()
    detached, shallow = q.detach(), copy.copy(q)
    for shared in (detached, shallow, q.data, type(q).make_like(q)):
        assert type(shared) is type(q) and all(a is b for a, b in zip(buffers(shared).values(), buffers(q).values(), strict=True))
    for apart in (q.clone(), copy.deepcopy(q)):
        assert type(apart) is type(q) and same_bytes(apart, q)
        apart.zero_()
        assert not apart.dequantize().any() and torch.equal(q.dequantize(), values)
    assert copy.deepcopy(q)._quantizer is not q._quantizer and q.clone()._quantizer is q._quantizer


@EVERY
def test_copy_takes_bytes_where_the_format_is_the_same_and_quantizes_elsewhere(name: str) -> None:
    q, other, values = made(name), made(name, seed=2), normal(256, 64, seed=3)
    held = list(buffers(q).values())
    other._quantizer = q._quantizer  # of delayed scaling, every quantizer is its own kind
    assert q.copy_(other) is q and same_bytes(q, other) and all(a is b for a, b in zip(buffers(q).values(), held, strict=True))
    assert q.copy_(values) is q and same_bytes(q, MAKERS[name][1]()(values))
    q.copy_(values[:1])
    assert same_bytes(q, MAKERS[name][1]()(values[:1].expand(256, 64).contiguous()))
    q.copy_(torch.eye(256, 64, dtype=torch.int32))
    assert same_bytes(q, MAKERS[name][1]()(torch.eye(256, 64).bfloat16()))
    plain = torch.empty(256, 64)
    plain.copy_(other)
    assert torch.equal(plain, other.dequantize(dtype=torch.float32))
    foreign = Float8CurrentScalingQuantizer(E4M3, amax_epsilon=1e-3)(values)
    q.copy_(foreign)
    assert same_bytes(q, MAKERS[name][1]()(foreign.dequantize()))


def test_bytes_are_copied_only_between_quantizers_of_equal_options() -> None:
    """A coarser source, whose bytes differ from those of quantizing its values."""
    coarse, fine = Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=True), Float8CurrentScalingQuantizer(E4M3)
    source, x = coarse(normal(8, 8)), fine(normal(8, 8, seed=2))
    x.copy_(source)
    assert same_bytes(x, fine(source.dequantize())) and not torch.equal(x._scale_inv, source._scale_inv)
    rowwise = MXFP8Quantizer(E4M3, columnwise=False)(normal(32, 32))
    both = MXFP8Quantizer(E4M3)(normal(32, 32, seed=2))
    rowwise.copy_(both)
    assert torch.equal(rowwise._rowwise_data, both._rowwise_data) and rowwise._columnwise_data is None
    both.copy_(MXFP8Quantizer(E4M3, columnwise=False)(normal(32, 32, seed=3)))
    assert same_bytes(both, MXFP8Quantizer(E4M3)(MXFP8Quantizer(E4M3)(normal(32, 32, seed=3)).dequantize()))


@EVERY
def test_moving_keeps_the_bytes_and_another_dtype_is_dequantized(name: str) -> None:
    q = made(name)
    moved = q.to("meta")
    assert type(moved) is type(q) and moved.device.type == "meta" and all(tensor.device.type == "meta" for tensor in buffers(moved).values())
    assert q.to("cpu") is q and q.cpu() is q and same_bytes(q.to("cpu", copy=True), q) and q.to(torch.bfloat16) is q
    for dtype, plain in ((torch.float32, q.float()), (torch.float16, q.half()), (torch.float32, q.to(torch.float32))):
        assert type(plain) is torch.Tensor and torch.equal(plain, q.dequantize(dtype=dtype))
    assert torch.equal(q.double(), q.dequantize().double())


@EVERY
def test_empty_ones_have_the_format_and_moments_have_not(name: str) -> None:
    q = made(name)
    for empty in (torch.empty_like(q), q.new_empty(64, 128), q.new_zeros(64, 128)):
        assert type(empty) is type(q) and empty._quantizer is q._quantizer and buffers(empty).keys() == buffers(q).keys()
    assert q.new_zeros(64, 128).shape == (64, 128) and not q.new_zeros(64, 128).dequantize().any()
    assert torch.empty_like(q, dtype=torch.float32).dtype is torch.float32 and type(torch.empty_like(q, dtype=torch.int32)) is torch.Tensor
    for moment in (torch.zeros_like(q), torch.ones_like(q), torch.zeros_like(q, dtype=torch.float32)):
        assert type(moment) is torch.Tensor and moment.shape == q.shape
    if name.startswith(("mxfp8", "nvfp4", "hybrid")):
        assert type(q.new_empty(3, 5)) is torch.Tensor


@EVERY
@pytest.mark.parametrize("shape", [(4, 64, 64), (2, 2, 64, 64), (-1, 128, 64)])
def test_views_that_keep_the_last_dimension_are_quantized_and_share_the_data(name: str, shape: tuple[int, ...]) -> None:
    q = made(name)
    values = q.dequantize().clone()
    for v in (q.view(shape), q.reshape(shape)):
        assert type(v) is type(q) and torch.equal(v.dequantize(), values.view(shape))
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(buffers(v).values(), buffers(q).values(), strict=True))
    v = q.view(shape)
    v.mul_(2)
    assert same_bytes(q, v.view(256, 64)) and torch.equal(q.dequantize(), MAKERS[name][1]()(values * 2).dequantize())


@EVERY
def test_other_views_are_values(name: str) -> None:
    q = made(name)
    flat = q.view(-1)
    assert type(flat) is (IdentityTensor if name == "identity" else PartOfValues) and torch.equal(flat + 0, q.dequantize().view(-1))
    for call in (lambda t: t.transpose(0, 1), lambda t: t.unsqueeze(0), lambda t: t[5], lambda t: t.expand(2, 256, 64)):
        assert torch.equal(call(q), call(q.dequantize()))
    assert type(q.expand_as(q)) is type(q) and type(q.view_as(q)) is type(q)


def test_one_scale_serves_every_shape() -> None:
    q = Float8CurrentScalingQuantizer(E4M3, columnwise=False)(normal(4, 6))
    assert type(q.view(-1)) is Float8Tensor and torch.equal(q.view(3, 8).dequantize(), q.dequantize().view(3, 8))
    assert q.view(24)._data.data_ptr() == q._data.data_ptr()
    with pytest.raises(ShapeError, match="a view of a tensor of Float8Tensor"):
        Float8CurrentScalingQuantizer(E4M3, internal=True)(normal(4, 6)).view(3, 8)


@EVERY
def test_writing_dequantizes_computes_and_quantizes_every_copy(name: str) -> None:
    q, x = made(name), normal(256, 64, seed=2)
    wanted = q.dequantize() + x
    assert q.add_(x) is q and same_bytes(q, MAKERS[name][1]()(wanted))
    q.update_usage(rowwise_usage=True, columnwise_usage=False)
    wanted = (q.dequantize() * 3).clone()
    q.mul_(3)
    rowwise = MAKERS[name][1]()(wanted)
    rowwise.update_usage(rowwise_usage=True, columnwise_usage=False)
    assert same_bytes(q, rowwise)
    torch.add(x, x, out=q)
    assert torch.equal(q.dequantize(), MAKERS[name][1]()(x + x).dequantize())
    doubled = MAKERS[name][1]()(q.dequantize() * 2).dequantize()
    torch._foreach_mul_([q, x], 2.0)
    assert torch.equal(q.dequantize(), doubled) and torch.equal(x, normal(256, 64, seed=2) * 2)
    before = {key: tensor.clone() for key, tensor in buffers(q).items()}
    q.quantize_(x * 5, noop_flag=torch.ones(1))
    assert all(torch.equal(tensor, before[key]) for key, tensor in buffers(q).items())


@EVERY
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_step_on_the_values(name: str, optimizer: Any, foreach: bool) -> None:
    """A step on a quantized parameter is a step on its values, quantized."""
    q = torch.nn.Parameter(made(name))
    assert type(q) is MAKERS[name][0] and isinstance(q, torch.nn.Parameter) and q.requires_grad
    plain = torch.nn.Parameter(q.dequantize().detach().clone())
    rate = 2.0**-5
    for parameter in (q, plain):
        parameter.grad = normal(256, 64, seed=10)
    ours, theirs = optimizer([q], lr=rate, foreach=foreach), optimizer([plain], lr=rate, foreach=False)
    ours.step()
    theirs.step()
    # AdamW writes twice (decay, then the step), and quantizes twice.
    assert (q.dequantize().float() - plain.float()).abs().max() <= 2.0**-2 * plain.abs().max()
    if optimizer is torch.optim.SGD:
        assert same_bytes(q, MAKERS[name][1]()(plain.detach()))
    else:
        assert type(ours.state[q]["exp_avg"]) is torch.Tensor and torch.equal(ours.state[q]["exp_avg_sq"], theirs.state[plain]["exp_avg_sq"])


@EVERY
def test_gradients_pass_straight_through(name: str) -> None:
    x = normal(64, 32).requires_grad_()
    q = MAKERS[name][1]()(x)
    assert q.requires_grad and type(q) is MAKERS[name][0]
    g = normal(64, 32, seed=2)
    (q.dequantize() * g).sum().backward()
    assert torch.equal(x.grad, g)
    leaf = q.detach().requires_grad_()
    leaf.dequantize()
    assert not any(tensor.requires_grad for tensor in buffers(leaf).values())
    (leaf.dequantize(dtype=torch.float32) * 2).sum().backward()
    assert leaf.grad.dtype is torch.bfloat16 and (leaf.grad == 2).all()
    (leaf.view(2, 32, 32) * g.view(2, 32, 32)).sum().backward()
    assert torch.equal(leaf.grad, 2 + g)
    leaf.grad = None
    (leaf.float() * leaf).sum().backward()
    assert leaf.grad is not None and torch.allclose(leaf.grad, 2 * leaf.dequantize(), rtol=2.0**-7)
    with pytest.raises(ArgumentError, match="deepcopy .*: expected a leaf"):
        copy.deepcopy(q)


@EVERY
def test_parameters_of_modules_are_copied_loaded_and_moved(name: str) -> None:
    def module(seed: int) -> torch.nn.Module:
        held = torch.nn.Module()
        held.weight = torch.nn.Parameter(made(name, seed=seed))
        return held

    first, second = module(1), module(2)
    twin = copy.deepcopy(first)
    assert same_bytes(twin.weight, first.weight) and isinstance(twin.weight, torch.nn.Parameter) and twin.weight.requires_grad
    quantizer = first.weight._quantizer
    second.weight._quantizer = quantizer
    second.load_state_dict(first.state_dict())
    assert same_bytes(second.weight, first.weight) and buffers(second.weight).popitem()[1].data_ptr() != buffers(first.weight).popitem()[1].data_ptr()
    second.weight.data = made(name, seed=3)
    assert same_bytes(second.weight, made(name, seed=3)) and isinstance(second.weight, torch.nn.Parameter)
    second.weight.data = normal(256, 64, seed=4)
    assert same_bytes(second.weight, made(name, seed=4)) and type(second.weight) is MAKERS[name][0]
    with pytest.raises(ShapeError):
        second.weight.data = normal(4, 4)
    second.to("meta")
    assert second.weight.device.type == "meta" and type(second.weight) is MAKERS[name][0]


@EVERY
def test_flattening_gives_the_tensors_and_the_rest(name: str) -> None:
    q = made(name).requires_grad_()
    attributes, context = q.__tensor_flatten__()
    again = type(q).__tensor_unflatten__({key: getattr(q, key) for key in attributes}, context, q.shape, q.stride())
    assert type(again) is type(q) and again.requires_grad and same_bytes(again, q) and all(torch.is_tensor(getattr(q, key)) for key in attributes)
    bare = q.storage_without_autograd()
    if name != "hybrid":
        attributes, context = bare.__tensor_flatten__()
        again = type(bare).__tensor_unflatten__({key: getattr(bare, key) for key in attributes}, context, None, None)
        assert type(again) is type(bare) and same_bytes(again, q)


@EVERY
def test_saving_takes_the_tensors_out_and_puts_them_back(name: str) -> None:
    q = made(name)
    values, held = q.dequantize().clone(), buffers(q)
    tensors, same = q.prepare_for_saving()
    assert same is q and not buffers(q) and {id(t) for t in tensors if t is not None} == {id(t) for t in held.values()} and q.shape == (256, 64)
    assert q.restore_from_saved([*tensors, "rest"]) == ["rest"] and torch.equal(q.dequantize(), values) and buffers(q).keys() == held.keys()


@EVERY
def test_rows_are_cut_and_joined_without_loss(name: str) -> None:
    q = made(name)
    parts = q.split(128)
    if name == "nvfp4-rows":
        assert all(type(part) is PartOfValues for part in parts)
        with pytest.raises(ArgumentError, match="one amax per row"):
            q.fsdp_extract_buffers()
        return
    for part, values in zip(parts, q.dequantize().split(128), strict=True):
        assert type(part) is type(q) and part.get_usages() == q.get_usages() and torch.equal(part.dequantize(), values)
        shared = {tensor.untyped_storage().data_ptr() for tensor in buffers(part).values()}
        shared &= {tensor.untyped_storage().data_ptr() for tensor in buffers(q).values()}
        assert bool(shared) == (name in ("delayed", "current", "identity"))  # under one scale, or none, parts are views; others copies
    both = [part.fsdp_pre_all_gather(None, q.shape, q.stride(), None, None) for part in parts]
    joined = tuple(torch.cat(pieces) for pieces in zip(*(pieces for pieces, _ in both), strict=True))
    whole, inner = parts[0].fsdp_post_all_gather(joined, both[0][1], torch.bfloat16)
    assert type(whole) is type(q) and same_bytes(whole, q) and inner[: len(joined)] == joined and whole._quantizer is not q._quantizer
    read_by = {tensor.data_ptr() for tensor in buffers(parts[0]).values()}  # a scale of all shards is each one's own
    own = {name: tensor for name, tensor in buffers(whole).items() if not {tensor.data_ptr()} & (read_by | {piece.data_ptr() for piece in joined})}
    assert {tensor.data_ptr() for tensor in own.values()} == {tensor.data_ptr() for tensor in inner[len(joined) :]}
    again = tuple(piece.clone() for piece in joined)
    for tensor in inner[len(joined) :]:  # as FSDP2 frees what it was given, and gives it memory again
        tensor.fill_(1)
    parts[0].fsdp_post_all_gather(again, both[0][1], torch.bfloat16, out=whole)
    assert same_bytes(whole, q) and whole.get_usages() == q.get_usages()
    assert all(buffers(whole)[name].data_ptr() == tensor.data_ptr() for name, tensor in own.items())
    assert type(q[0:256]) is type(q) and type(q.as_strided((256, 64), (64, 1))) is type(q) and type(q.narrow(0, 128, 128)) is type(q)
    assert torch.equal(q[100:101] + 0, q.dequantize()[100:101])


@EVERY
def test_usages_are_refused_before_anything_is_dropped(name: str) -> None:
    q = made(name)
    held = buffers(q).keys()
    if name != "identity":
        with pytest.raises(ArgumentError, match="at least one usage"):
            q.update_usage(rowwise_usage=False, columnwise_usage=False)
    assert buffers(q).keys() == held


def test_kinds_that_tex_does_not_know_are_refused_with_a_reason() -> None:
    for name in ("hybrid", "identity"):
        with pytest.raises(FusibleError, match=f"is {name}"):
            tex.dequantize(made(name), torch.float32)
        with pytest.raises(FusibleError, match=f"is {name}"):
            tex.quantize(normal(64, 64), MAKERS[name][1](), None, None)


@EVERY
def test_a_usage_of_zero_is_one_of_false(name: str) -> None:
    """C++ and configuration files know no other bool: each copy is dropped, or refused to be dropped, alike."""
    for usage in ("rowwise_usage", "columnwise_usage"):
        outcomes = []
        for off in (False, 0):
            q = made(name)
            try:
                q.update_usage(**{usage: off})
                outcomes.append(tuple(q.get_usages().values()))
            except ArgumentError as error:
                outcomes.append((str(error),))
        assert outcomes[0] == outcomes[1], usage
