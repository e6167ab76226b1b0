"""Random calls of native functions, on memory between guard pages, with what they have to give in float64.

Each operand ends at, or begins after, a page that nobody may touch: a byte too far ends the process. ``python generated_calls.py FIRST COUNT`` makes
the calls of that many seeds and prints how many of each function were right; a wrong call is printed with its seed, which alone makes it again.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusible import cpp_extensions as native

__all__ = ["Call", "generate", "sweep"]

WIDE = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Guards:
    """Memory between guard pages, given back all at once."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._maps: list[tuple[int, int]] = []

    def place(self, x: Tensor) -> Tensor:
        """A copy of ``x`` whose last byte, or whose first, is next to a guard page."""
        if not x.numel():
            return x.clone()
        room = -(-x.nbytes // _PAGE) * _PAGE
        base = _libc.mmap(None, room + 2 * _PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert base not in (None, ctypes.c_void_p(-1).value)
        self._maps.append((base, room + 2 * _PAGE))
        for guard in (base, base + _PAGE + room):
            assert _libc.mprotect(guard, _PAGE, 0) == 0
        begin = base + _PAGE + (room - x.nbytes if self._rng.random() < 0.7 else 0)
        memory = (ctypes.c_uint8 * x.nbytes).from_address(begin)
        return torch.frombuffer(memory, dtype=x.dtype).view(x.shape).copy_(x)

    def free(self) -> None:
        for base, size in self._maps:
            _libc.munmap(base, size)
        self._maps.clear()


@dataclass
class Call:
    """A call, the arguments of which are guarded, and what it has to write: values in float64 and how far off they may be, or exact bits."""

    function: str
    arguments: dict[str, Any]
    wanted: dict[str, Tensor]
    tolerance: dict[str, float] = field(default_factory=dict)

    def check(self) -> str | None:
        """Makes the call, and says what is wrong."""
        result = getattr(native, self.function)(**self.arguments)
        for name, want in self.wanted.items():
            got = torch.tensor(result, dtype=torch.float64) if name == "return" else self.arguments[name]
            if name not in self.tolerance:
                if not torch.equal(got.reshape(-1).view(torch.uint8), want.contiguous().reshape(-1).view(torch.uint8)):
                    return f"{name} differs"
                continue
            scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
            error = (got.double() - want.double()).abs().max().item() if want.numel() else 0.0
            if not error <= self.tolerance[name] * scale:
                return f"{name} is off by {error:.3g} of {scale:.3g}, which may be {self.tolerance[name]:.3g} of it"
        return None


def _tolerance(dtype: torch.dtype, terms: int = 1) -> float:
    """Half a unit of the result's dtype, and what float32 loses over a sum of ``terms`` terms with a few operations each."""
    return torch.finfo(dtype).eps + (8 + terms) * torch.finfo(torch.float32).eps


class Maker:
    """What the generators draw from."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.guards = Guards(self.rng)

    def size(self, most: int = 70) -> int:
        return self.rng.choice((0, 1, 2, self.rng.randint(0, most), self.rng.randint(0, most), 16, 17, 64))

    def dtype(self) -> torch.dtype:
        return self.rng.choice(WIDE)

    def threads(self) -> int:
        return self.rng.choice((1, 2))

    def x(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.guards.place(torch.randn(shape, generator=self.torch).to(dtype))

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An output, of bytes that no result has."""
        return self.guards.place(torch.full((torch.Size(shape).numel() * dtype.itemsize,), 0x55, dtype=torch.uint8).view(dtype).view(tuple(shape)))

    def ints(self, values: Sequence[int]) -> Tensor:
        return self.guards.place(torch.tensor(values, dtype=torch.int32))

    def cuts(self, count: int, most: int) -> list[int]:
        """Cumulative lengths of ``count`` sequences of at most ``most`` tokens each."""
        ends = [0]
        for _ in range(count):
            ends.append(ends[-1] + self.rng.randint(0, most))
        return ends


GENERATORS: dict[str, Callable[[Maker], Call]] = {}


def _generator(make: Callable[[Maker], Call]) -> Callable[[Maker], Call]:
    GENERATORS[make.__name__] = make
    return make


def _encoded(values: Tensor, fp8: torch.dtype) -> Tensor:
    return values.clamp(-_LARGEST[fp8], _LARGEST[fp8]).to(fp8).view(torch.uint8)


@_generator
def quantize(m: Maker) -> Call:
    rows, cols, fp8 = m.size(), m.size(), m.rng.choice(FP8)
    src, scale = m.x(rows, cols, dtype=m.dtype()), m.rng.choice((1.0, 0.25, 3.0, 1000.0))
    codes = _encoded(src.float() * torch.tensor(scale), fp8)
    wanted = {"dst": codes, "dst_transposed": codes.t().contiguous(), "amax": src.float().abs().max().view(1) if src.numel() else torch.zeros(1)}
    arguments = {
        "src": src, "dst": m.room((rows, cols), torch.uint8), "scale": scale, "fp8_dtype": fp8, "num_threads": m.threads(),
        "dst_transposed": m.room((cols, rows), torch.uint8), "amax": m.room((1,), torch.float32), "bias_grad": m.room((cols,), torch.float32),
    }  # fmt: skip
    if m.rng.random() < 0.3:
        del arguments["bias_grad"]
    else:
        wanted["bias_grad"] = src.double().sum(0)
    if m.rng.random() < 0.3:
        del arguments["dst_transposed"], wanted["dst_transposed"]
    return Call("quantize", arguments, wanted, {"bias_grad": _tolerance(torch.float32, rows)})


@_generator
def dequantize(m: Maker) -> Call:
    shape, fp8, dtype = (m.size(), m.size()), m.rng.choice(FP8), m.dtype()
    codes = m.guards.place(_encoded(torch.randn(shape, generator=m.torch) * 10, fp8))
    arguments = {"src": codes, "dst": m.room(shape, dtype), "scale_inv": 0.375, "fp8_dtype": fp8, "num_threads": m.threads()}
    return Call("dequantize", arguments, {"dst": (codes.view(fp8).float() * 0.375).to(dtype)})


def _mx(blocks: Tensor, fp8: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and exponents of blocks, the last dimension of ``[..., 32]``: the least power of two that is not below ``amax / fp8_max``."""
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1) * torch.tensor(1 / _LARGEST[fp8]))
    exponent = torch.where(mantissa == 0, -127, exponent - (mantissa == 0.5).int()).clamp(-127, 127)
    codes = _encoded((blocks.double() * torch.exp2(-exponent.double())[..., None]).float(), fp8)
    return codes, (exponent + 127).to(torch.uint8)


@_generator
def quantize_mxfp8(m: Maker) -> Call:
    blocks = m.rng.choice((m.rng.randrange(5), m.rng.randrange(70)))  # more than are cast at once, too
    rows, cols, fp8, ways = 32 * m.rng.randrange(4), 32 * blocks, m.rng.choice(FP8), m.rng.choice((1, 2, 3))
    src = m.x(rows, cols, dtype=m.dtype())
    arguments: dict[str, Any] = {"src": src, "fp8_dtype": fp8, "num_threads": m.threads(), "tiled": m.rng.random() < 0.3}
    values, wanted = src.float(), {}
    if arguments["tiled"]:
        squares = values.view(rows // 32, 32, cols // 32, 32).transpose(1, 2).flatten(2)
        codes, exponents = (
            _mx(squares, fp8) if squares.numel() else (squares.to(torch.uint8), squares.new_zeros(squares.shape[:2], dtype=torch.uint8))
        )
        codes = codes.view(rows // 32, cols // 32, 32, 32).transpose(1, 2).reshape(rows, cols)
        both = (codes, exponents.repeat_interleave(32, 0)), (codes, exponents.repeat_interleave(32, 1))
    else:
        of_rows = _mx(values.view(rows, cols // 32, 32), fp8) if src.numel() else None
        of_columns = _mx(values.t().reshape(cols, rows // 32, 32), fp8) if src.numel() else None
        empty = torch.empty(rows, cols, dtype=torch.uint8)
        both = (
            (empty, empty.new_empty(rows, cols // 32)) if of_rows is None else (of_rows[0].view(rows, cols), of_rows[1]),
            (empty, empty.new_empty(rows // 32, cols))
            if of_columns is None
            else (of_columns[0].view(cols, rows).t().contiguous(), of_columns[1].t()),
        )
    for way, (codes, exponents) in enumerate(both):
        if ways & (1 << way):
            names = ("dst", "exponents") if way == 0 else ("dst_columns", "exponents_columns")
            arguments |= {names[0]: m.room((rows, cols), torch.uint8), names[1]: m.room(exponents.shape, torch.uint8)}
            wanted |= {names[0]: codes, names[1]: exponents.contiguous()}
    return Call("quantize_mxfp8", arguments, wanted)


@_generator
def dequantize_mxfp8(m: Maker) -> Call:
    rows, cols, fp8, dtype, along = 32 * m.rng.randrange(4), 32 * m.rng.randrange(5), m.rng.choice(FP8), m.dtype(), m.rng.random() < 0.5
    codes = m.guards.place(_encoded(torch.randn(rows, cols, generator=m.torch) * 10, fp8))
    shape = (rows, cols // 32) if along else (rows // 32, cols)
    exponents = m.guards.place(torch.randint(112, 132, shape, generator=m.torch).to(torch.uint8))
    factors = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1 if along else 0)
    arguments = {"src": codes, "exponents": exponents, "along_rows": along, "dst": m.room((rows, cols), dtype), "fp8_dtype": fp8}
    return Call("dequantize_mxfp8", {**arguments, "num_threads": m.threads()}, {"dst": (codes.view(fp8).float() * factors).to(dtype)})


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _fp4(blocks: Tensor, amax: float, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of two codes and scales of blocks, the last dimension of ``[..., 16]``, whose amaxes are ``largest``."""
    scale = torch.tensor(448.0 * 6.0) / torch.tensor(amax)
    scales = (largest * (scale * torch.tensor(1 / 6))).clamp(max=448.0).to(torch.float8_e4m3fn)
    factors = (1 / (scales.float() * (1 / scale))).clamp(max=torch.finfo(torch.float32).max)
    size = (blocks * factors[..., None]).abs().double()
    apart = (size[..., None] - _E2M1.double()).abs()
    tied = apart == apart.amin(-1, keepdim=True)
    even = torch.arange(8) % 2 == 0
    codes = (tied & (even | (tied.sum(-1, keepdim=True) == 1))).int().argmax(-1) + 8 * torch.signbit(blocks).int()
    codes = torch.where(size > 6, 7 + 8 * torch.signbit(blocks).int(), codes)
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8), scales.view(torch.uint8)


@_generator
def quantize_nvfp4(m: Maker) -> Call:
    rows, cols, columns, tiled = 16 * m.rng.randrange(4), 16 * m.rng.randrange(20), m.rng.random() < 0.5, m.rng.random() < 0.3
    src, amax = m.x(rows, cols, dtype=m.dtype()), 3.5
    arguments: dict[str, Any] = {"columns": columns, "tiled": tiled, "num_threads": m.threads()}
    if m.rng.random() < 0.3:  # what E2M1 holds, by a factor of 1: it stays as it is, whatever is drawn
        exact = _E2M1[torch.randint(8, (rows, cols), generator=m.torch)] * (torch.randint(2, (rows, cols), generator=m.torch) * 2 - 1)
        exact[::16] = exact[:, ::16] = 6.0
        src, amax, arguments["seed"] = m.guards.place(exact.to(src.dtype)), 2688.0, m.guards.place(torch.tensor([m.rng.randrange(2**62)]))
    lines = src.float().t() if columns else src.float()
    count, length = lines.shape
    blocks = lines.reshape(count, length // 16, 16)
    largest = blocks.abs().amax(-1) if src.numel() else blocks.new_zeros(count, length // 16)
    if tiled and src.numel():
        largest = largest.view(count // 16, 16, -1).amax(1).repeat_interleave(16, 0)
    codes, scales = _fp4(blocks, amax, largest)
    arguments |= {
        "src": src,
        "amax": amax,
        "dst": m.room((count, length // 2), torch.uint8),
        "scale_bytes": m.room((count, length // 16), torch.uint8),
    }
    return Call("quantize_nvfp4", arguments, {"dst": codes.reshape(count, length // 2), "scale_bytes": scales})


@_generator
def transform_columns(m: Maker) -> Call:
    """By any matrix, or Hadamard's with signs; or to the bit by one of which each sum has one term: another order of the elements, some of them with
    the other sign."""
    rows, cols = 16 * m.rng.randrange(1, 4), 16 * m.rng.randrange(1, 20)
    src, matrix, kind = m.x(rows, cols, dtype=m.dtype()), m.x(16, 16), m.rng.choice(["any", "Hadamard", "one term"])
    exactly = kind == "one term"
    if kind != "any":
        signs = torch.randint(2, (16,), generator=m.torch) * 2.0 - 1
        places = torch.arange(16)
        odd = sum((places[:, None] & places) >> bit & 1 for bit in range(4)) % 2
        hadamard = (0.25 - 0.5 * odd) * signs[:, None]
        matrix = m.guards.place(torch.eye(16)[torch.randperm(16, generator=m.torch)] * signs if exactly else hadamard)
    product = torch.einsum("gic,ij->gjc", src.bfloat16().double().unflatten(0, (-1, 16)), matrix.double()).reshape(rows, cols)
    if exactly and src.dtype is torch.bfloat16 and m.rng.random() < 0.3:
        dst = src
    else:
        dst = m.room((rows, cols), torch.bfloat16)
    arguments = {"src": src, "transform": matrix, "dst": dst, "source_amax": m.room((1,), torch.float32), "num_threads": m.threads()}
    wanted = {"dst": product, "return": product.abs().amax(), "source_amax": src.float().abs().amax().view(1)}
    if exactly:
        return Call("transform_columns", arguments, wanted | {"dst": product.bfloat16()})
    return Call("transform_columns", arguments, wanted, dict.fromkeys(wanted, _tolerance(torch.bfloat16, 16)))


@_generator
def dequantize_nvfp4(m: Maker) -> Call:
    lines, length, dtype = m.size(), 16 * m.rng.randrange(20), m.dtype()
    codes = m.guards.place(torch.randint(256, (lines, length // 2), generator=m.torch).to(torch.uint8))
    scales = m.guards.place(torch.randint(127, (lines, length // 16), generator=m.torch).to(torch.uint8))
    each = torch.stack([codes & 15, codes >> 4], -1).view(lines, length).int()
    values = _E2M1[each & 7] * (1 - 2 * (each >> 3)) * scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    arguments = {"src": codes, "scale_bytes": scales, "dst": m.room((lines, length), dtype), "num_threads": m.threads()}
    return Call("dequantize_nvfp4", arguments, {"dst": values.to(dtype)})


def _per_block(scales: Tensor, rows: int, cols: int, tiled: bool) -> Tensor:
    """A scale for each element of a matrix, of squares of 128 or of blocks along rows, whose scales lie blocks first."""
    lines = scales.repeat_interleave(128, 0)[:rows] if tiled else scales.t()
    return lines.repeat_interleave(128, 1)[:, :cols]


def _scaled(x: Tensor, fp8: torch.dtype, tiled: bool, epsilon: float, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Codes of the matrix ``x`` and inverse scales: ``fp8_max / max(amax, epsilon)``."""
    high, wide = 128 if tiled else 1, 128
    tiles = [[tile.abs().max() for tile in band.split(wide, 1)] for band in x.split(high, 0)]
    amax = torch.tensor(tiles).view(len(tiles), -1).clamp_min(epsilon)
    scale = torch.tensor(_LARGEST[fp8]) / amax
    if power_of_two:
        scale = torch.exp2(torch.frexp(scale).exponent - 1.0)
    scale = scale if tiled else scale.t().contiguous()
    return _encoded(x * _per_block(scale, x.shape[0], x.shape[1], tiled), fp8), 1 / scale


@_generator
def quantize_block_fp8(m: Maker) -> Call:
    rows, cols, fp8, ways = m.size(300), m.size(300), m.rng.choice(FP8), m.rng.choice((1, 2, 3))
    src, tiled = m.x(rows, cols, dtype=m.dtype()), m.rng.random() < 0.4
    rule: dict[str, Any] = {"tiled": tiled, "epsilon": m.rng.choice((0.0, 2.5)), "power_of_two": m.rng.random() < 0.5}
    arguments: dict[str, Any] = {"src": src, "fp8_dtype": fp8, "num_threads": m.threads(), **rule}
    wanted: dict[str, Tensor] = {}
    for way, x in enumerate((src.float(), src.float().t())):
        if not ways & (1 << way):
            continue
        blocks = -(-x.shape[0] // 128) if tiled else -(-x.shape[1] // 128), -(-x.shape[1] // 128) if tiled else x.shape[0]
        codes, inverse = _scaled(x, fp8, **rule) if src.numel() else (torch.empty(x.shape, dtype=torch.uint8), None)
        names = ("dst_columns", "scale_inv_columns") if way else ("dst", "scale_inv")
        arguments |= {names[0]: m.room(x.shape, torch.uint8), names[1]: m.room(blocks, torch.float32)}
        wanted |= {names[0]: codes} | ({} if inverse is None else {names[1]: inverse})
    return Call("quantize_block_fp8", arguments, wanted)


@_generator
def dequantize_block_fp8(m: Maker) -> Call:
    rows, cols, fp8, dtype, tiled = m.size(300), m.size(300), m.rng.choice(FP8), m.dtype(), m.rng.random() < 0.5
    codes = m.guards.place(_encoded(torch.randn(rows, cols, generator=m.torch) * 10, fp8))
    row_blocks, column_blocks = -(-rows // 128), -(-cols // 128)
    shape = (row_blocks, column_blocks) if tiled else (column_blocks, rows)
    scales = m.guards.place(torch.rand(shape, generator=m.torch) + 0.25)
    arguments = {"src": codes, "scale_inv": scales, "tiled": tiled, "dst": m.room((rows, cols), dtype), "fp8_dtype": fp8, "num_threads": m.threads()}
    return Call("dequantize_block_fp8", arguments, {"dst": (codes.view(fp8).float() * _per_block(scales, rows, cols, tiled)).to(dtype)})


@_generator
def column_sums(m: Maker) -> Call:
    rows, cols, dtype = m.size(), m.size(), m.dtype()
    src = m.x(rows, cols, dtype=dtype)
    arguments = {"src": src, "dst": m.room((cols,), torch.float32), "num_threads": m.threads()}
    return Call("column_sums", arguments, {"dst": src.double().sum(0)}, {"dst": _tolerance(torch.float32, rows)})


@_generator
def transpose_bytes(m: Maker) -> Call:
    rows, cols = m.size(), m.size(200)
    src = m.guards.place(torch.randint(0, 256, (rows, cols), generator=m.torch, dtype=torch.uint8))
    arguments = {"src": src, "dst": m.room((cols, rows), torch.uint8), "num_threads": m.threads()}
    return Call("transpose_bytes", arguments, {"dst": src.t().contiguous()})


_POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"), "silu": torch.nn.functional.silu, "relu": torch.relu,
    "sigmoid": torch.sigmoid, "qgelu": lambda x: x * torch.sigmoid(1.702 * x), "srelu": lambda x: torch.relu(x) ** 2,
    "erf_gelu": torch.nn.functional.gelu,
}  # fmt: skip
_GATED = {"geglu": "gelu", "swiglu": "silu", "reglu": "relu", "glu": "sigmoid", "qgeglu": "qgelu", "sreglu": "srelu", "erf_geglu": "erf_gelu"}


@_generator
def activation(m: Maker) -> Call:
    name, dtype, shape = m.rng.choice(list(_POINTWISE)), m.dtype(), (m.size(), m.size())
    x = m.x(*shape, dtype=m.dtype())
    arguments = {"name": name, "src": x, "dst": m.room(shape, dtype), "dtype": dtype, "num_threads": m.threads()}
    return Call("activation", arguments, {"dst": _POINTWISE[name](x.double())}, {"dst": _tolerance(dtype)})


@_generator
def activation_backward(m: Maker) -> Call:
    name, dtype, shape = m.rng.choice(list(_POINTWISE)), m.dtype(), (m.size(), m.size())
    x, g = m.x(*shape, dtype=m.dtype()), m.x(*shape, dtype=m.dtype())
    y = x.double().requires_grad_()
    (dx,) = torch.autograd.grad(_POINTWISE[name](y), y, g.double())
    arguments = {
        "name": name, "grad": g, "src": x, "dst": m.room(shape, dtype), "dtype": dtype, "bias_grad": m.room(shape[1:], torch.float32),
        "num_threads": m.threads(),
    }  # fmt: skip
    tolerance = {"dst": 4 * _tolerance(dtype), "bias_grad": _tolerance(torch.float32, 4 * shape[0])}
    return Call("activation_backward", arguments, {"dst": dx, "bias_grad": dx.sum(0)}, tolerance)


@_generator
def gated_activation(m: Maker) -> Call:
    name, dtype, rows, cols = m.rng.choice(list(_GATED)), m.dtype(), m.size(), m.size()
    x = m.x(rows, 2 * cols, dtype=m.dtype())
    want = _POINTWISE[_GATED[name]](x[:, :cols].double()) * x[:, cols:].double()
    arguments = {"name": name, "src": x, "dst": m.room((rows, cols), dtype), "dtype": dtype, "num_threads": m.threads()}
    return Call("gated_activation", arguments, {"dst": want}, {"dst": 4 * _tolerance(dtype)})


@_generator
def norm_fwd(m: Maker) -> Call:
    rows, cols, dtype, centred = m.size(), m.size() + 1, m.dtype(), m.rng.random() < 0.5
    x, gamma = m.x(rows, cols, dtype=m.dtype()), m.x(cols, dtype=m.dtype())
    bias = m.x(cols) if centred else None
    wide = x.double()
    mu = wide.mean(1) if centred else torch.zeros(rows, dtype=torch.float64)
    rsigma = ((wide - mu[:, None]) ** 2).mean(1).add(1e-3).rsqrt()
    want = (wide - mu[:, None]) * rsigma[:, None] * gamma.double() + (0 if bias is None else bias.double())
    arguments = {
        "x": x, "weight": gamma, "bias": bias, "mu": m.room((rows,), torch.float32) if centred else None, "rsigma": m.room((rows,), torch.float32),
        "eps": 1e-3, "zero_centered_gamma": False, "dst": m.room((rows, cols), dtype), "dtype": dtype, "num_threads": m.threads(),
    }  # fmt: skip
    wanted = {"dst": want, "rsigma": rsigma, **({"mu": mu} if centred else {})}
    # A row of one or two elements that are almost their mean magnifies its rounding by rsigma, at most 1 / sqrt(eps) = 32.
    loose = 32 * _tolerance(torch.float32, cols)
    return Call("norm_fwd", arguments, wanted, {"dst": torch.finfo(dtype).eps + loose, "rsigma": loose, "mu": _tolerance(torch.float32, cols)})


@_generator
def softmax_forward(m: Maker) -> Call:
    b, rows, cols, dtype = m.rng.randint(1, 3), m.size(), m.size() + 1, m.dtype()
    x, causal = m.x(b, rows, cols, dtype=dtype), m.rng.random() < 0.5
    scores = x.double() * 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(rows, cols).tril(cols - rows) == 0, -torch.inf)
    want = torch.softmax(scores, -1).nan_to_num(0.0)
    arguments = {"src": x, "dst": m.room(x.shape, dtype), "scale": 0.5, "causal": causal, "num_threads": m.threads()}
    return Call("softmax_forward", arguments, {"dst": want}, {"dst": _tolerance(dtype, cols)})


@_generator
def gemm(m: Maker) -> Call:
    rows, cols, depth, dtype = m.size(), m.size(), m.size(), m.dtype()
    flips = m.rng.random() < 0.5, m.rng.random() < 0.5
    made, given = [], []
    for shape, flip in (((rows, depth), flips[0]), ((depth, cols), flips[1])):
        x = torch.randn(shape[::-1] if flip else shape, generator=m.torch)
        kind = m.rng.choice((*WIDE, *FP8))
        codes = _encoded(x, kind) if kind in FP8 else x.to(kind)
        given.append((m.guards.place(codes), flip, kind, 0.5))
        value = codes.view(kind).double() * 0.5
        made.append(value.t() if flip else value)
    names = ("", "_transposed", "_dtype", "_scale")
    operands = {side + name: value for side, values in zip(("left", "right"), given, strict=True) for name, value in zip(names, values, strict=True)}
    bias = m.x(cols)
    arguments = {
        **operands, "dst": m.room((rows, cols), dtype), "dtype": dtype, "bias": bias, "column_sums": m.room((cols,), torch.float32),
        "num_threads": m.threads(),
    }  # fmt: skip
    want = made[0] @ made[1] + bias.double()
    # Operands wider than bfloat16 beside FP8 ones are read as bfloat16 at no level: FP8 and bfloat16 are exact in it.
    tolerance = {"dst": _tolerance(dtype, depth), "column_sums": _tolerance(torch.float32, depth + rows)}
    return Call("gemm", arguments, {"dst": want, "column_sums": want.sum(0)}, tolerance)


def _blocks(m: Maker, cols: int, kinds: tuple[str, ...]) -> tuple[Tensor, Any, Tensor, bool, Tensor]:
    """A random operand in blocks, [cols, depth]: codes, what they are, scales, whether these are of squares; and its values."""
    kind, extra = m.rng.choice(kinds), m.rng.choice((0, 3))
    depth = (
        m.rng.randint(0, 300)
        if kind in ("floats", "squares")
        else 32 * m.rng.randrange(12)
        if kind in ("exponents", "fours of powers")
        else 16 * m.rng.randrange(30)
    )
    if kind == "fours":
        codes = torch.randint(256, (cols, depth // 2), generator=m.torch).to(torch.uint8)
        scales = torch.randint(127, (cols, depth // 16 + extra), generator=m.torch).to(torch.uint8)
        each = torch.stack([codes & 15, codes >> 4], -1).view(cols, depth).int()
        factors = scales.view(torch.float8_e4m3fn).float()[:, : depth // 16].repeat_interleave(16, 1)
        return codes, 10, scales, False, _E2M1[each & 7] * (1 - 2 * (each >> 3)) * factors
    if kind == "fours of powers":
        codes = torch.randint(256, (cols, depth // 2), generator=m.torch).to(torch.uint8)
        scales = torch.randint(112, 132, (cols, depth // 32 + extra), generator=m.torch).to(torch.uint8)
        each = torch.stack([codes & 15, codes >> 4], -1).view(cols, depth).int()
        factors = torch.exp2(scales.float() - 127)[:, : depth // 32].repeat_interleave(32, 1)
        return codes, 10, scales.view(torch.float8_e8m0fnu), False, _E2M1[each & 7] * (1 - 2 * (each >> 3)) * factors
    fp8 = m.rng.choice(FP8)
    codes = _encoded(torch.randn(cols, depth, generator=m.torch) * 10, fp8)
    if kind == "exponents":
        scales = torch.randint(112, 132, (cols, depth // 32 + extra), generator=m.torch).to(torch.uint8)
        factors = torch.exp2(scales.float() - 127)[:, : depth // 32].repeat_interleave(32, 1)
    else:
        tiled, blocks = kind == "squares", -(-depth // 128)
        scales = torch.rand((-(-cols // 128), blocks + extra) if tiled else (blocks, cols + extra), generator=m.torch) + 0.5
        factors = _per_block(scales if tiled else scales[:, :cols], cols, depth, tiled)
    return codes, fp8, scales, kind == "squares", codes.view(fp8).float() * factors


@_generator
def gemm_of_blocks(m: Maker) -> Call:
    rows, cols, dtype = m.rng.choice((m.rng.randint(0, 24), m.rng.randint(25, 90))), m.rng.choice((0, 1, m.rng.randint(0, 200), 64, 130)), m.dtype()
    codes, kind, scales, tiled, values = _blocks(m, cols, ("exponents", "floats", "squares", "fours", "fours of powers"))
    left = m.x(rows, values.shape[1], dtype=m.dtype())
    bias = m.x(cols)
    arguments = {
        "left": left, "left_transposed": False, "left_dtype": left.dtype, "left_scale": 0.5, "right": m.guards.place(codes),
        "right_transposed": True, "right_dtype": kind, "right_scale": 0.25, "right_scales": m.guards.place(scales), "right_tiled": tiled,
        "dst": m.room((rows, cols), dtype), "dtype": dtype, "bias": bias, "num_threads": m.threads(),
    }  # fmt: skip
    want = 0.125 * (left.double() @ values.double().t()) + bias.double()
    # Sums of sizes are larger than their sum: by the square root of the terms, at random signs, and that of the largest value beside the usual.
    return Call("gemm", arguments, {"dst": want}, {"dst": 8 * _tolerance(dtype, values.shape[1])})


@_generator
def gemm_of_left_blocks(m: Maker) -> Call:
    rows, cols, dtype = m.rng.choice((m.rng.randint(0, 24), m.rng.randint(25, 90))), m.rng.choice((0, 1, m.rng.randint(0, 200), 64, 130)), m.dtype()
    codes, kind, scales, _, values = _blocks(m, rows, ("exponents", "floats", "fours", "fours of powers"))
    right, transposed = m.x(cols, values.shape[1], dtype=m.dtype()), m.rng.choice((True, False))
    arguments = {
        "left": m.guards.place(codes), "left_transposed": False, "left_dtype": kind, "left_scale": 0.5, "left_scales": m.guards.place(scales),
        "right": right if transposed else m.guards.place(right.t().contiguous()), "right_transposed": transposed, "right_dtype": right.dtype,
        "right_scale": 0.25, "dst": m.room((rows, cols), dtype), "dtype": dtype, "num_threads": m.threads(),
    }  # fmt: skip
    want = 0.125 * (values.double() @ right.double().t())
    return Call("gemm", arguments, {"dst": want}, {"dst": 8 * _tolerance(dtype, values.shape[1])})


@_generator
def multi_tensor_adam(m: Maker) -> Call:
    count, dtype = m.size(), m.dtype()
    g, w, first, second = m.x(count, dtype=m.dtype()), m.x(count, dtype=dtype), m.x(count), m.x(count).abs_()
    mean, square = 0.9 * first.double() + 0.1 * g.double(), 0.99 * second.double() + 0.01 * g.double() ** 2
    want = w.double() - 0.1 * ((mean / 0.5) / ((square / 0.25).sqrt() + 1e-3) + 0.01 * w.double())
    arguments = {
        "gradients": [g], "weights": [w], "first": [first], "second": [second], "masters": [], "lr": 0.1, "beta1": 0.9, "beta2": 0.99,
        "epsilon": 1e-3, "correction1": 0.5, "correction2": 0.25, "decoupled": True, "weight_decay": 0.01, "num_threads": m.threads(),
    }  # fmt: skip
    return _ListCall("multi_tensor_adam", arguments, {"weights": want, "first": mean}, {"weights": 4 * _tolerance(dtype), "first": _tolerance(dtype)})


@_generator
def multi_tensor_adam_scaled(m: Maker) -> Call:
    """Of moments as codes: the weights that they lead to, and the scales that belong to the new ones; masters of each kind."""
    count, coded = m.size(), m.rng.random() < 0.5
    g, first = (
        m.x(count, dtype=m.dtype()),
        m.guards.place(_encoded(torch.randn(count, generator=m.torch) * 40, torch.float8_e4m3fn).view(torch.uint8)),
    )
    second = m.x(count, dtype=torch.float16).abs_()
    scales = [m.guards.place(torch.tensor([value])) for value in (2.0**-7, 0.25)]
    masters, weights = m.x(count, dtype=torch.float16 if coded else torch.float32), m.x(count, dtype=m.dtype())
    start = masters.double() * (0.5 if coded else 1)
    mean = 0.9 * first.view(torch.float8_e4m3fn).double() * 2.0**-7 + 0.1 * g.double()
    square = 0.99 * second.double() * 0.25 + 0.01 * g.double() ** 2
    want = start - 0.1 * ((mean / 0.5) / ((square / 0.25).sqrt() + 1e-3) + 0.01 * start)
    arguments = {
        "gradients": [g], "weights": [weights], "first": [first], "second": [second], "first_scales": [scales[0]], "second_scales": [scales[1]],
        "masters": [masters], "master_scales": [m.guards.place(torch.full((1 if coded else 0,), 0.5))], "lr": 0.1, "beta1": 0.9, "beta2": 0.99,
        "epsilon": 1e-3, "correction1": 0.5, "correction2": 0.25, "decoupled": True, "weight_decay": 0.01, "num_threads": m.threads(),
    }  # fmt: skip
    of = {"first_scales": (mean, 448.0), "second_scales": (square, 32752.0)}
    new = {name: (x.abs().amax() / largest).clamp_min(2.0**-126)[None] if count else torch.tensor([2.0**-126]) for name, (x, largest) in of.items()}
    tolerance = {"weights": 4 * _tolerance(weights.dtype), **dict.fromkeys(new, _tolerance(torch.float32))}
    return _ListCall("multi_tensor_adam_scaled", arguments, {"weights": want, **new}, tolerance)


class _ListCall(Call):
    """A call of lists of one tensor."""

    def check(self) -> str | None:
        getattr(native, self.function)(**self.arguments)
        for name, want in self.wanted.items():
            error = (self.arguments[name][0].double() - want).abs().max().item() if want.numel() else 0.0
            if not error <= self.tolerance[name] * max(1.0, float(want.abs().max()) if want.numel() else 1.0):
                return f"{name} is off by {error:.3g}"
        return None


@_generator
def rope(m: Maker) -> Call:
    count, heads, half = m.rng.randint(0, 4), m.rng.randint(1, 3), m.rng.randint(1, 20)
    cuts, dtype, width = m.cuts(count, 9), m.dtype(), 2 * half + m.rng.choice((0, 1, 6))
    tokens = cuts[-1] + m.rng.randint(0, 3)
    x, freqs = m.x(tokens, heads, width, dtype=dtype), m.x(12, 1, 1, 2 * half)
    want = torch.zeros(x.shape, dtype=torch.float64)
    for begin, end in itertools.pairwise(cuts):
        part, angles = x[begin:end].double(), freqs[: end - begin, 0].double()
        head = part[..., : 2 * half]
        turned = torch.cat((-head[..., half:], head[..., :half]), -1)
        want[begin:end] = torch.cat((head * angles.cos() + turned * angles.sin(), part[..., 2 * half :]), -1)
    arguments = {
        "src": x, "dst": m.room(x.shape, dtype), "freqs": freqs, "sequence_first": False, "interleaved": False, "backward": False,
        "cu_seqlens": m.ints(cuts), "num_threads": m.threads(),
    }  # fmt: skip
    return Call("rope", arguments, {"dst": want}, {"dst": _tolerance(dtype, 2)})


@_generator
def attention_forward(m: Maker) -> Call:
    """Packed sequences, of which tokens beyond the last one are not written."""
    count, share, groups, width, value = m.rng.randint(0, 4), m.rng.randint(1, 3), m.rng.randint(1, 2), m.rng.randint(1, 70), m.rng.randint(1, 70)
    cuts_q, cuts_kv, dtype = m.cuts(count, 40), m.cuts(count, 70), m.dtype()
    tokens_q, tokens_kv, heads = cuts_q[-1] + m.rng.randint(0, 2), cuts_kv[-1] + m.rng.randint(0, 2), share * groups
    q, k, v = (m.x(t, h, w, dtype=dtype) for t, h, w in ((tokens_q, heads, width), (tokens_kv, groups, width), (tokens_kv, groups, value)))
    out = m.guards.place(torch.zeros(tokens_q, heads, value, dtype=dtype))
    want, causal = torch.zeros(out.shape, dtype=torch.float64), m.rng.random() < 0.5
    for a, b, c, d in zip(cuts_q, cuts_q[1:], cuts_kv, cuts_kv[1:], strict=False):
        keys, values = (x[c:d].double().repeat_interleave(share, 1).transpose(0, 1) for x in (k, v))
        scores = q[a:b].double().transpose(0, 1) @ keys.transpose(1, 2) * 0.2
        if causal:
            scores = scores.masked_fill(torch.ones(b - a, d - c).tril() == 0, -torch.inf)
        want[a:b] = (torch.softmax(scores, -1).nan_to_num(0.0) @ values).transpose(0, 1)
    rules = {"scale": 0.2, "causal": causal, "causal_bottom_right": False, "window_left": -1, "window_right": -1, "window_bottom_right": False}
    rows = {name: m.guards.place(torch.zeros(tokens_q, heads, 1)) for name in ("stats", "largest")}
    arguments = {
        "q": q, "k": k, "v": v, "out": out, **rows, **rules, "lengths_q": m.ints(cuts_q), "lengths_kv": m.ints(cuts_kv), "num_threads": m.threads()
    }  # fmt: skip
    # Scores and probabilities are rounded to bfloat16 before the second product where operands are bfloat16 and the CPU multiplies these.
    own = max(torch.finfo(dtype).eps, torch.finfo(torch.bfloat16).eps if dtype is torch.bfloat16 else 0.0)
    return Call("attention_forward", arguments, {"out": want}, {"out": 4 * own + _tolerance(torch.float32, width + 70)})


@_generator
def copy_to_cache(m: Maker) -> Call:
    count, groups, width, size, per = m.rng.randint(0, 4), m.rng.randint(1, 3), m.rng.randint(1, 20), m.rng.randint(1, 5), m.rng.randint(1, 4)
    added = m.cuts(count, per * size)
    cached = [0]
    for begin, end in itertools.pairwise(added):
        cached.append(cached[-1] + m.rng.randint(end - begin, per * size))
    pages = list(range(count * per))
    m.rng.shuffle(pages)
    dtype = m.rng.choice((*WIDE, torch.uint8))
    parts: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for name, w in (("k", width), ("v", m.rng.randint(1, 20))):
        new = m.guards.place((torch.randn(added[-1], groups, w, generator=m.torch) * 9).abs().to(dtype))
        cache = m.guards.place((torch.randn(count * per, size, groups, w, generator=m.torch) * 9).abs().to(dtype))
        want = cache.clone()
        for i in range(count):
            length, fresh = cached[i + 1] - cached[i], added[i + 1] - added[i]
            for t in range(fresh):
                place = length - fresh + t
                want[pages[i * per + place // size], place % size] = new[added[i] + t]
        parts |= {f"new_{name}": new, f"{name}_cache": cache}
        wanted[f"{name}_cache"] = want
    table = m.guards.place(torch.tensor(pages, dtype=torch.int32).view(count, per))
    lengths = {"new_lengths": m.ints(added), "cached_lengths": m.ints(cached)}
    return Call("copy_to_cache", {**parts, "table": table, **lengths, "paged": True, "num_threads": m.threads()}, wanted)


def generate(seed: int) -> tuple[str, str, Call, Guards]:
    """The level, the generator's name and the call of a seed, and the memory that it lies in."""
    rng = random.Random(seed)
    level, name = rng.choice(native.usable_levels()), rng.choice(sorted(GENERATORS))
    maker = Maker(seed)
    return level, name, GENERATORS[name](maker), maker.guards


def sweep(first: int, count: int) -> Counter[str]:
    """Makes the calls of ``count`` seeds from ``first`` on. Prints each seed before its call where it is wrong; returns how many were right."""
    right: Counter[str] = Counter()
    held_to = native.get_level()
    for seed in range(first, first + count):
        print(f"\r{seed}", end="", file=sys.stderr, flush=True)
        level, name, call, guards = generate(seed)
        native.set_level(level)
        wrong = call.check()
        if wrong is None:
            right[name] += 1
        else:
            print(f"wrong: seed {seed}: {name} at {level}: {wrong}", flush=True)
        del call
        guards.free()
    native.set_level(held_to)
    return right


if __name__ == "__main__":
    for name, count in sorted(sweep(int(sys.argv[1]), int(sys.argv[2])).items()):
        print(f"{name} {count}")
