"""Ops with side values, on inputs of any number of dimensions, against float64; and that no op but those that reshape minds leading dimensions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ops_table import SIDED, TABLE, Record
from ops_tolerance import assert_close, assert_honest, assert_interchangeable, values
from torch import Tensor as TorchTensor

from fusible import nvte
from fusible.errors import ArgumentError, ShapeError
from fusible.nvte import DType, QuantizedType, Tensor, make_nvte_tensor
from fusible.ops import AddExtra, ClampedSwiGLU, ConstantScale, MakeExtra, Op, Reshape, ScaledSwiGLU, SiTUGLU, SwiGLU

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LEADING = ((13,), (1,), (0,), (3, 5), (2, 0, 4), (2, 3, 2))
E4M3, E5M2 = QuantizedType(DType.Float8E4M3, "current"), QuantizedType(DType.Float8E5M2, "current")


def random(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> TorchTensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def bound(op: Op, dtype: torch.dtype, **types: Any) -> Op:
    """The op as a plan without a recipe binds it."""
    of = nvte.nvte_dtype(dtype)
    names = (f"{name}_dtype" for name in ("x", "dy", "y", "dx", *op.arg_names, *(f"d{arg}" for arg in op.arg_names)))
    return op.with_(**{**dict.fromkeys(names, of), **types})


@pytest.mark.parametrize("scales_dtype", [None, torch.float32], ids=["same", "fp32 scales"])
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("record", SIDED.values(), ids=lambda record: record.name)
def test_a_scaled_activation_agrees_with_float64(record: Record, dtype: torch.dtype, scales_dtype: torch.dtype | None) -> None:
    generator = torch.Generator().manual_seed(3)
    (name,) = record.sides
    op = bound(record.make({}, record.width)[0], dtype)
    held = scales_dtype or dtype
    for leading in LEADING:
        x, scales = random(generator, (*leading, record.width), dtype), random(generator, leading, held)
        y, ctx = op.forward(make_nvte_tensor(x), **{name: make_nvte_tensor(scales)})  # type: ignore[call-arg]
        inferred = op.inference(make_nvte_tensor(x), **{name: make_nvte_tensor(scales)})
        dy = random(generator, y.shape, dtype)
        dx, grads, side_grads = op.backward(ctx, make_nvte_tensor(dy))
        point, factor = x.double().requires_grad_(), scales.double().requires_grad_()
        wanted = record.reference(point, {name: factor}, ())
        wanted_dx, wanted_ds = torch.autograd.grad(wanted, [point, factor], dy.double())
        where = f"{record.name} {list(leading)}"
        assert op.width(record.width) == y.shape[-1] and grads == []
        for what, got, reference, of in (
            ("y", y, wanted.detach(), dtype),
            ("inferred y", inferred, wanted.detach(), dtype),
            ("dx", dx, wanted_dx, dtype),
            ("dscales", side_grads[name], wanted_ds, held),
        ):
            assert_honest(f"{where}: {what}", got)
            assert_close(f"{where}: {what}", got.data, reference, of, record.length)
        assert op.with_(unwanted=frozenset({name})).backward(ctx, make_nvte_tensor(dy))[2] == {name: None}


@pytest.mark.parametrize("record", SIDED.values(), ids=lambda record: record.name)
def test_a_scaled_activation_writes_8_bits(record: Record) -> None:
    """What it quantizes is what it gives unquantized, but for the rounding of that."""
    generator = torch.Generator().manual_seed(4)
    (name,) = record.sides
    op = record.make({}, record.width)[0]
    wide, narrow = bound(op, torch.bfloat16), bound(op, torch.bfloat16, y_dtype=E4M3, dx_dtype=E5M2)
    x, sides = make_nvte_tensor(random(generator, (13, 12), torch.bfloat16)), {name: make_nvte_tensor(random(generator, (13,), torch.bfloat16))}
    results = []
    for each in (wide, narrow):
        y, ctx = each.forward(x, **sides)  # type: ignore[call-arg]
        dy = make_nvte_tensor(random(torch.Generator().manual_seed(5), y.shape, torch.bfloat16))
        results.append((y, each.backward(ctx, dy)[0]))
    for wide_result, narrow_result, type_ in zip(*results, (E4M3, E5M2), strict=True):
        assert narrow_result.type == type_
        assert_honest(record.name, narrow_result)
        assert_interchangeable(record.name, narrow_result, nvte.cast(wide_result, type_), torch.bfloat16, 12, 2, None)


PLAIN = [record for record in TABLE.values() if not record.sequences and record.name not in ("Residual", "extras", "Reshape")]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("record", PLAIN, ids=lambda record: record.name)
def test_leading_dimensions_are_rows(record: Record, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    parameters = {name: make_nvte_tensor(random(generator, shape, dtype)) for name, shape in record.shapes(record.width).items()}
    ops = [bound(op, dtype) for op in record.make(parameters, record.width)]
    for leading in ((2, 3, 2), (3, 1), (2, 0, 4)):
        x = random(generator, (*leading, record.width), dtype)
        found = []
        for shape in ((*leading, record.width), (math.prod(leading), record.width)):
            y, contexts = make_nvte_tensor(x.reshape(shape)), []
            for op in ops:
                y, ctx = op.forward(y)
                contexts.append(ctx)
            assert y.shape[:-1] == shape[:-1]
            d = Tensor(torch.linspace(-1, 1, math.prod(y.shape)).reshape(y.shape).to(dtype), y.type)
            all_grads = []
            for op, ctx in zip(reversed(ops), reversed(contexts), strict=True):
                d, grads = op.backward(ctx, d)
                all_grads += grads
            assert d.shape == shape
            found.append((y.data.flatten(), d.data.flatten(), *(grad.data for grad in all_grads)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), record.name


def test_reshape_takes_any_shape_and_gives_the_gradient_in_the_shape_of_x() -> None:
    x = make_nvte_tensor(torch.arange(24.0).view(2, 3, 4))
    for shape, wanted in (((6, 4), (6, 4)), ((-1, 8), (3, 8)), ((24,), (24,)), ((2, 2, -1, 2), (2, 2, 3, 2))):
        op = bound(Reshape(shape), torch.float32)
        y, ctx = op.forward(x)
        assert y.shape == wanted and torch.equal(y.data.flatten(), x.data.flatten())
        assert sum(tensor.data.numel() for tensor in ctx.values()) == 0, "a context that keeps elements"
        dx, _ = op.backward(ctx, nvte.scale(y, 2.0, DType.Float32))
        assert dx.shape == (2, 3, 4) and torch.equal(dx.data, x.data * 2)
        assert torch.equal(op.inference(x).data, y.data)
    assert Reshape((2, -1)).width(8) is None and Reshape((-1, 2)).width(8) == 2
    for op in (Reshape((5, -1)), Reshape((2, 3))):
        with pytest.raises(ShapeError, match=r"5 elements|6 elements"):
            bound(op, torch.float32).forward(x)
    empty = make_nvte_tensor(torch.zeros(0, 4))
    assert bound(Reshape((-1, 2, 2)), torch.float32).forward(empty)[0].shape == (0, 2, 2)
    for shape in ((), (-1, -1), (-2,), (0, -1)):
        with pytest.raises(ArgumentError, match="the shape of Reshape: expected .*"):
            Reshape(shape)


def test_the_gradient_of_an_extra_may_be_missing() -> None:
    op, dy = bound(MakeExtra("a"), torch.float32), make_nvte_tensor(torch.ones(2, 3))
    assert torch.equal(op.backward({}, dy, a=None)[0].data, dy.data)  # type: ignore[call-arg]
    assert torch.equal(op.backward({}, dy, a=dy)[0].data, dy.data * 2)  # type: ignore[call-arg]
    assert op.with_(unwanted=frozenset({"x"})).backward({}, dy, a=dy)[0] is None  # type: ignore[call-arg]
    add = bound(AddExtra("a"), torch.float32)
    assert add.with_(unwanted=frozenset({"a"})).backward({}, dy)[2] == {"a": None} and add.backward({}, dy)[2]["a"] is dy


def test_an_extra_has_the_shape_of_x_and_may_be_8_bit() -> None:
    op, x = bound(AddExtra("a"), torch.float32), make_nvte_tensor(torch.randn(3, 4))
    with pytest.raises(ShapeError, match=r"the side input of AddExtra\(a\): expected shape \[3, 4\], got \[4\]"):
        op.forward(x, a=make_nvte_tensor(torch.ones(4)))  # type: ignore[call-arg]
    narrow = nvte.cast(x, E4M3)
    y, _ = op.forward(x, a=narrow)  # type: ignore[call-arg]
    assert torch.equal(y.data, x.data + values(narrow).float())
    scaled, _ = bound(ConstantScale(2.0), torch.float32, x_dtype=None).forward(narrow)
    assert torch.equal(scaled.data, 2 * values(narrow).float())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SwiGLU(glu_interleave_size=0), "glu_interleave_size of SwiGLU: expected a positive number of columns, or None, got 0"),
        (lambda: ScaledSwiGLU("s", glu_interleave_size=-2), "glu_interleave_size of ScaledSwiGLU: expected .*, got -2"),
        (lambda: SiTUGLU(beta1=0.0), "beta1 of SiTUGLU: expected a finite number above 0, got 0"),
        (lambda: SiTUGLU(beta2=math.inf), "beta2 of SiTUGLU: expected a finite number above 0, got inf"),
        (lambda: SiTUGLU(beta2=math.nan), "beta2 of SiTUGLU: expected a finite number above 0, got nan"),
    ],
)
def test_options_that_mean_nothing_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_a_width_of_half_a_block_is_refused() -> None:
    for op in (SwiGLU(glu_interleave_size=3), ClampedSwiGLU(glu_interleave_size=3), ScaledSwiGLU("s", glu_interleave_size=3)):
        assert op.width(12) == 6 and op.width(None) is None
        with pytest.raises(ShapeError, match="the input of .*: expected a multiple of 6 columns"):
            op.width(8)
    with pytest.raises(ShapeError, match="a tensor that is interleaved in blocks of 3 of (de)?interleave: expected a multiple of 6 columns, got 8"):
        bound(SwiGLU(glu_interleave_size=3), torch.float32).forward(make_nvte_tensor(torch.zeros(2, 8)))


def test_an_unknown_type_of_an_op_is_refused() -> None:
    with pytest.raises(TypeError, match="takes no argument 'z_dtype'"):
        ConstantScale(1.0, z_dtype=DType.Float32)  # type: ignore[call-arg]
