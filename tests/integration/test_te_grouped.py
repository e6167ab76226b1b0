"""Grouped tensors of NVIDIA's Python package, made and multiplied by ``fusible.tex``: each member is to the bit what it is when quantized alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from te_client import EPSILON_OF_QUANTIZER, QUANTIZERS, package, package_on, recipe_for, relative_error

from fusible import tex

BF16 = torch.bfloat16
ROWS, COLUMNS = 384, 128
SPLITS = {"equal": None, "equal, told": [192, 192], "different": [128, 256], "an empty one": [384, 0]}
EACH = pytest.mark.parametrize("name", QUANTIZERS)


@pytest.fixture
def te() -> Iterator[Any]:
    with package() as te:
        yield te


def values(rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(BF16)


def dims(splits: list[int] | None) -> torch.Tensor | None:
    return None if splits is None else torch.tensor(splits, device="cuda")


def pieces(x: torch.Tensor, splits: list[int] | None) -> tuple[torch.Tensor, ...]:
    return x.split(splits or [len(x) // 2] * 2)


def buffers(tensor: Any) -> dict[str, torch.Tensor]:
    """What a quantized tensor holds, by attribute."""
    found = {name: getattr(tensor, name, None) for name in ("_data", "_transpose", "_scale_inv", "_amax_rowwise", "_amax_columnwise")}
    found |= {f"_{way}_{part}": getattr(tensor, f"_{way}_{part}", None) for way in ("rowwise", "columnwise") for part in ("data", "scale_inv")}
    return {name: value for name, value in found.items() if value is not None}


def same(found: Any, expected: Any) -> None:
    ours, wanted = buffers(found), buffers(expected)
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(ours[name], value), name


@EACH
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "storage"])
def test_a_group_is_split_into_what_each_member_is_alone(te: Any, name: str, splits: list[int] | None, internal: bool) -> None:
    quantizer, x = QUANTIZERS[name](te), values()
    quantizer.internal = internal
    grouped = tex.group_quantize(x, quantizer, 2, dims(splits))
    assert type(grouped).__name__ == ("GroupedTensorStorage" if internal else "GroupedTensor")
    rows = [0, *torch.tensor(splits).cumsum(0).tolist()] if splits else None
    assert (None if grouped.tensor_offsets is None else grouped.tensor_offsets.tolist()) == (rows and [row * COLUMNS for row in rows])
    for member, piece in zip(grouped.split_into_quantized_tensors(), pieces(x, splits), strict=True):
        assert tuple(member.size()) == tuple(piece.shape)
        same(member, quantizer(piece))


@EACH
def test_a_group_is_dequantized_within_its_format(te: Any, name: str) -> None:
    x, splits = values(), [128, 256]
    grouped = tex.group_quantize(x, QUANTIZERS[name](te), 2, dims(splits))
    plain = tex.group_dequantize(grouped, tex.DType.kFloat32)
    for member, piece in zip(plain.split_into_quantized_tensors(), pieces(x, splits), strict=True):
        assert 0 < relative_error(member, piece) <= EPSILON_OF_QUANTIZER[name]


def test_a_group_of_current_scaling_keeps_the_amax_and_the_scale_of_each_member(te: Any) -> None:
    x, splits = values(), [128, 256]
    grouped = tex.group_quantize(x, QUANTIZERS["current"](te), 2, dims(splits))
    amax = torch.stack([piece.float().abs().max() for piece in pieces(x, splits)])
    assert torch.equal(grouped.amax, amax) and torch.equal(grouped.scale, torch.tensor(448.0) / amax)
    assert torch.equal(grouped.scale_inv, grouped.scale.reciprocal())


@EACH
@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "for a GEMM"])
def test_a_group_is_written_again_in_the_order_that_it_has(te: Any, name: str, swizzled: bool) -> None:
    quantizer, first, second = QUANTIZERS[name](te), values(), 4 * values(seed=1)
    quantizer.optimize_for_gemm = swizzled
    expected = tex.group_quantize(second, QUANTIZERS[name](te), 2, None)
    for flag in (None, torch.zeros(1)):
        grouped = tex.group_quantize(first, quantizer, 2, None)
        before = tex.group_dequantize(grouped, tex.DType.kFloat32).rowwise_data
        assert tex.group_quantize(second, quantizer, 2, None, noop_flag=torch.ones(1), output=grouped) is grouped
        assert torch.equal(tex.group_dequantize(grouped, tex.DType.kFloat32).rowwise_data, before)
        tex.group_quantize(second, quantizer, 2, None, noop_flag=flag, output=grouped)
        found, wanted = (tex.group_dequantize(group, tex.DType.kFloat32).rowwise_data for group in (grouped, expected))
        assert torch.equal(found, wanted)


@EACH
@pytest.mark.parametrize("for_gemm", [False, True], ids=["plain", "for a GEMM"])
def test_a_group_that_arrives_by_rows_is_made_ready_for_the_quantizer(te: Any, name: str, for_gemm: bool) -> None:
    """Scales of MXFP8 and NVFP4 are swizzled where the quantizer asks for it, those that arrived too, and the mark says so."""
    x, quantizer, splits = values(), QUANTIZERS[name](te), [128, 256]
    quantizer.set_usage(columnwise=False)
    arrived = tex.group_quantize(x, quantizer, 2, dims(splits))
    held, expected = arrived.scale_inv, tex.group_dequantize(arrived, tex.DType.kFloat32).rowwise_data
    quantizer = quantizer.copy()
    quantizer.set_usage(rowwise=True, columnwise=True)
    quantizer.optimize_for_gemm = for_gemm
    mine = arrived.copy()
    tex.group_requantize_inplace(mine, quantizer, 2, dims(splits), tex.DType.kBFloat16)
    assert mine._with_gemm_swizzled_scales == (for_gemm and name in ("mxfp8", "nvfp4")) and mine.columnwise_data is not None
    assert mine.tensor_offsets.tolist() == [0, 128 * COLUMNS, ROWS * COLUMNS]
    assert torch.equal(tex.group_dequantize(mine, tex.DType.kFloat32).rowwise_data, expected)
    assert arrived.scale_inv is held and not arrived._with_gemm_swizzled_scales  # whoever shares the buffers reads them as before


@EACH
def test_products_of_groups_are_those_of_their_members(te: Any, name: str) -> None:
    """All three layouts of a linear layer, against float64 products of the very values that the operands hold."""
    gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_grouped_gemm_for_grouped_tensor
    tensors, splits = importlib.import_module("transformer_engine.pytorch.tensor.grouped_tensor"), [128, 256]
    x, dy, weights = values(), values(columns=256, seed=1), values(512, COLUMNS, seed=2)
    gx, gdy = (tex.group_quantize(each, QUANTIZERS[name](te), 2, dims(splits)) for each in (x, dy))
    gw = tex.group_quantize(weights, QUANTIZERS[name](te), 2, None)

    def read(grouped: Any) -> list[torch.Tensor]:
        return [member.dequantize(dtype=torch.float32).double() for member in grouped.split_into_quantized_tensors()]

    def output(rows: int, columns: int) -> tuple[torch.Tensor, Any]:
        out = torch.full((rows, columns), torch.nan)
        offsets = torch.tensor([0, 128 * columns, rows * columns], device="cuda")
        options = {"quantizer": None, "data": out.view(-1), "first_dims": dims(splits), "tensor_offsets": offsets}
        return out, tensors.GroupedTensorStorage((rows, columns), torch.float32, num_tensors=2, **options)

    (y, gy), (dx, gdx) = output(ROWS, 256), output(ROWS, COLUMNS)
    dw = [torch.full((256, COLUMNS), torch.nan) for _ in splits]
    gemm(gw, gx, gy, layout="TN")
    gemm(gw, gdy, gdx, layout="NN")
    gemm(gx, gdy, dw, layout="NT")
    xs, dys, ws = read(gx), read(gdy), read(gw)
    # The columns' copies of blocks are rounded by themselves: two operands, each off by at most eps twice.
    close, apart = COLUMNS * 2.0**-23, 4 * EPSILON_OF_QUANTIZER[name] if name in ("block", "mxfp8", "nvfp4") else 256 * 2.0**-23
    assert relative_error(y, torch.cat([a @ w.T for a, w in zip(xs, ws, strict=True)])) <= close
    assert relative_error(dx, torch.cat([d @ w for d, w in zip(dys, ws, strict=True)])) <= apart
    for found, d, a in zip(dw, dys, xs, strict=True):
        assert relative_error(found, d.T @ a) <= apart


@EACH
def test_bias_gradients_come_with_a_group(te: Any, name: str) -> None:
    dy, splits = values(), [128, 256]
    grouped, sums = tex.bgrad_group_quantize(dy, QUANTIZERS[name](te), 2, dims(splits))
    expected = torch.stack([piece.double().sum(0) for piece in pieces(dy, splits)])
    assert type(grouped).__name__ == "GroupedTensor" and relative_error(sums, expected) <= 2.0**-9 + 256 * 2.0**-24


def layer(te: Any, owner: str, grouped: bool, single: bool, bias: bool) -> torch.nn.Module:
    """A layer of two products, ``[128 -> 256]``, as a module or an operation; ``single``: with one weight, and one bias, for both."""
    one = {"single_grouped_weight": single, "single_grouped_bias": single and bias}
    if owner == "module":
        return te.GroupedLinear(2, COLUMNS, 256, bias=bias, params_dtype=BF16, use_grouped_tensor=grouped, **one)
    return te.ops.Sequential(te.ops.GroupedLinear(2, COLUMNS, 256, bias=bias, dtype=BF16, **one))


def step(made: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor, splits: list[int]) -> tuple[torch.Tensor, ...]:
    """The output of a step whose parameters are ``values``, the gradient of the input, and those of the weights and biases in rows."""
    named, grads = dict(made.named_parameters()), []
    for kind, weight in (("weight", values(512, COLUMNS, seed=3)), ("bias", values(2, 256, seed=4))):
        found = [p for name, p in named.items() if name.rpartition(".")[2].rstrip("01") == kind]
        if not found:
            continue
        whole = len(found) == 1
        with torch.no_grad():
            for parameter, piece in zip(found, [weight] if whole else weight.chunk(2), strict=True):
                (parameter.rowwise_data if whole else parameter).copy_(piece.reshape(-1) if whole else piece.view(parameter.shape))
        grads.append((found, weight))
    x = x.clone().requires_grad_()
    y = made(x, torch.tensor(splits, device="cuda"))
    y.backward(dy)
    of = [torch.cat([p.grad.reshape(-1) for p in found]).view(weight.shape) for found, weight in grads]
    return (y.detach(), x.grad, *of)  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore:GroupedLinear is using single_grouped_weight")
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("owner", ["module", "operation"])
@pytest.mark.parametrize("name", ["bf16", "current", "block", "mxfp8", "nvfp4"])
def test_one_weight_for_all_products_is_the_package_s_own_many(monkeypatch: pytest.MonkeyPatch, name: str, owner: str, bias: bool) -> None:
    """The package's path of grouped tensors against its path of lists: to the bit in 8 bits, but that a bias is added there before a product is
    rounded, and that gradients of weights may meet different kernels."""
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    capability, splits = (9, 0) if name == "block" else (10, 0), [128, 256]
    with package_on(capability) as te:
        x, dy, recipe = values(), values(columns=256, seed=1), recipe_for(te, name)
        made = [layer(te, "module", False, False, bias), layer(te, owner, True, False, bias), layer(te, owner, True, True, bias)]
        assert [len([*each.parameters()]) for each in made] == [2 + 2 * bias] * 2 + [1 + bias]
        found = []
        for each in made:
            torch.manual_seed(5)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                found.append(step(each, x, dy, splits))
    wanted, *others = found
    for other in others:
        for i, (a, b) in enumerate(zip(other, wanted, strict=True)):
            # Where the two paths meet different kernels, by the machine, fp32 sums differ by their order, and so in a last bit.
            rounded_apart = name == "bf16" or (bias and i == 0) or i == 2
            assert torch.equal(a, b) or (rounded_apart and relative_error(a, b) <= 2.0**-8), i
