"""The ops whose words are of their own on tensors that record, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops_table import SIDED, TABLE, Record
from ops_tolerance import assert_close

from fusible import lazy
from fusible.nvte import DType, Tensor, make_nvte_tensor, nvte_dtype

pytest.importorskip("jaxlib")

RECORDS = [
    *(record for name, record in TABLE.items() if "blocks of" in name or name in ("SiTUGLU", "ClampedSwiGLU", "ConstantScale", "Reshape")),
    TABLE["L2Normalization-eps"],
    *SIDED.values(),
]


def recorded(x: torch.Tensor) -> Tensor:
    return make_nvte_tensor(lazy.Tensor(x))


def computed(x: Tensor) -> torch.Tensor:
    return torch.from_dlpack(x.data.eval())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_an_op_records_what_it_computes(record: Record, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(8)
    types: dict[str, Any] = dict.fromkeys(("x_dtype", "dy_dtype", "y_dtype", "dx_dtype"), nvte_dtype(dtype))
    op = record.make({}, record.width)[0].with_(**types)
    x, sides = torch.randn(5, record.width, generator=generator).to(dtype), {name: torch.randn(5, generator=generator) for name in record.sides}
    y, ctx = op.forward(recorded(x), **{name: recorded(side) for name, side in sides.items()})
    dy = torch.randn(*y.shape, generator=generator).to(dtype)
    dx, _, *rest = op.backward(ctx, recorded(dy))
    point, leaves = x.double().requires_grad_(), {name: side.double().requires_grad_() for name, side in sides.items()}
    wanted = record.reference(point, leaves, ())
    wanted_dx, *wanted_sides = torch.autograd.grad(wanted, [point, *leaves.values()], dy.double())
    assert_close(f"{record.name}: y", computed(y), wanted.detach(), dtype, record.length)
    assert_close(f"{record.name}: dx", computed(dx), wanted_dx, dtype, record.length)
    for name, wanted_side in zip(leaves, wanted_sides, strict=True):
        assert rest[0][name].type is DType.Float32
        assert_close(f"{record.name}: d{name}", computed(rest[0][name]), wanted_side, torch.float32, record.length)
