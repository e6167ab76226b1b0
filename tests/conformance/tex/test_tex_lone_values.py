"""One extraordinary value among ordinary ones, cast by the compiled kernels at every level and by plain torch, to the bit: a kernel that goes faster
where all is ordinary may have noticed it only by what lies beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from native_calls import by_torch, native

from fusible import cpp_extensions, tex
from fusible.quantized import Float8BlockQuantizer, Float8CurrentScalingQuantizer, Float8Quantizer, MXFP8Quantizer, NVFP4Quantizer

pytestmark = pytest.mark.skipif(not cpp_extensions.available, reason="no compiled kernels")

E4M3, E5M2 = tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2
COPIES = ((True, False), (False, True), (True, True))
BUFFERS = ("_data", "_transpose", "_scale_inv", "_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")


def squares(fp8: tex.DType, rowwise: bool, columnwise: bool) -> Any:
    made = MXFP8Quantizer(fp8, rowwise=rowwise, columnwise=columnwise)
    made.with_2d_quantization = True
    return made


def fp4(fp8: tex.DType, rowwise: bool, columnwise: bool, *, of_squares: bool = False) -> Any:
    made = NVFP4Quantizer(rowwise=rowwise, columnwise=columnwise)
    made.with_2d_quantization = of_squares
    return made


MAKERS: dict[str, Callable[[tex.DType, bool, bool], Any]] = {
    "delayed": lambda fp8, r, c: Float8Quantizer(torch.tensor([3.0]), torch.zeros(1), fp8, rowwise=r, columnwise=c),
    "current": lambda fp8, r, c: Float8CurrentScalingQuantizer(fp8, "cpu", rowwise=r, columnwise=c),
    "blocks": lambda fp8, r, c: Float8BlockQuantizer(fp8, rowwise=r, columnwise=c, block_scaling_dim=1),
    "blocks of any scale": lambda fp8, r, c: Float8BlockQuantizer(fp8, rowwise=r, columnwise=c, block_scaling_dim=1, force_pow_2_scales=False),
    "128 squares": lambda fp8, r, c: Float8BlockQuantizer(fp8, rowwise=r, columnwise=c, block_scaling_dim=2),
    "mxfp8": lambda fp8, r, c: MXFP8Quantizer(fp8, rowwise=r, columnwise=c),
    "mxfp8 squares": squares,
    "nvfp4": fp4,
    "nvfp4 squares": lambda fp8, r, c: fp4(fp8, r, c, of_squares=True),
}


def lone(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Of each value, at each of two places, among each of three others."""
    info = torch.finfo(dtype)
    values = {"inf": torch.inf, "-inf": -torch.inf, "nan": torch.nan, "-nan": -torch.nan, "-0": -0.0, "subnormal": info.smallest_normal / 4}
    values |= {"least": info.smallest_normal, "largest": info.max, "-largest": -info.max}
    for name, among, place in product(values, (0.0, -1.5, info.smallest_normal), ((0, 0), (97, 70))):
        x = torch.full((128, 128), among, dtype=dtype)
        x[place] = values[name]
        yield f"{name} at {place} among {among}", x


def stored(x: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The bytes of each buffer, all codes of NaN as one: E5M2 has three of each sign, and torch's cast drops some signs."""
    last = 0x7C if getattr(x, "_fp8_dtype", None) == E5M2 else 0x7E
    for name in BUFFERS:
        buffer = getattr(x, name, None)
        if buffer is not None:
            found = buffer.contiguous().view(torch.uint8)
            eight_bits = buffer.dtype is torch.uint8 and hasattr(x, "_fp8_dtype") and not name.endswith("scale_inv")
            yield name, torch.where((found & 0x7F) > last, 0x7F, found) if eight_bits else found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_lone_value_is_cast_as_by_torch(maker: str, dtype: torch.dtype) -> None:
    for (name, x), fp8, copies in product(lone(dtype), (E4M3,) if "fp4" in maker else (E4M3, E5M2), COPIES):
        wanted = dict(stored(by_torch(tex.quantize, x, MAKERS[maker](fp8, *copies))))
        for level in cpp_extensions.usable_levels():
            cpp_extensions.set_level(level)
            found = dict(stored(native(tex.quantize, x, MAKERS[maker](fp8, *copies))))
            assert found.keys() == wanted.keys() and found
            differing = [buffer for buffer in found if not torch.equal(found[buffer], wanted[buffer])]
            assert not differing, (name, fp8, copies, level)
