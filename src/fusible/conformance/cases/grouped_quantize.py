"""Records of quantizing the members of one buffer: the bytes of each member by ml_dtypes, at its offset in the buffer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusible.conformance import block_oracle as oracle
from fusible.conformance.cases.block_tensors import in_tiles
from fusible.conformance.cases.grouped_blocks import (
    bgrad_in_blocks,
    dequantize_in_blocks,
    gated_in_blocks,
    quantize_in_blocks,
    requantize_in_blocks,
)
from fusible.conformance.cases.pointwise import choices, clamped_swiglu, gated, silu
from fusible.conformance.cases.quantize import amax_of, scale_of
from fusible.conformance.eight_bits import FORMATS, HALF_STEP, NUMPY, cast, decoded, kept_within
from fusible.conformance.table import Arguments, Found, Output, Sample, random, record
from fusible.quantized import Float8CurrentScalingQuantizer, Float8Quantizer, GroupedTensorStorage, NVFP4Quantizer, Quantizer
from fusible.tex import DType

__all__ = ["LAYOUTS", "Layout", "grouped_bytes"]

_ROWS, _COLUMNS = 8, 6
_FORMER = 1.0
"""The amax of quantizers before the call. It stays where it is the larger one."""


@dataclass(frozen=True)
class Layout:
    """Shapes of members and their offsets in a buffer of ``[8, columns]``. ``described``: the arguments that describe them."""

    label: str
    shapes: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    described: dict[str, Tensor | None] = field(default_factory=dict)
    columns: int = _COLUMNS

    @property
    def shape(self) -> tuple[int, int]:
        return _ROWS, self.columns

    @property
    def arguments(self) -> dict[str, Any]:
        described = {name: None if x is None else x.clone() for name, x in self.described.items()}
        return {"num_tensors": len(self.shapes), "first_dims": None, **described}

    def pieces(self, x: Tensor) -> list[Tensor]:
        flat = x.reshape(-1)
        return [flat[start : start + math.prod(shape)].view(shape) for start, shape in zip(self.offsets, self.shapes, strict=True)]

    def placed(self, parts: list[Tensor], buffer_like: Tensor | None = None) -> Tensor:
        """The members in their buffer. Gaps between them have the values of ``buffer_like``, or zeros."""
        buffer = torch.zeros(math.prod(self.shape), dtype=parts[0].dtype) if buffer_like is None else buffer_like.clone().cpu()
        for part, start in zip(parts, self.offsets, strict=True):
            buffer[start : start + part.numel()] = part.reshape(-1)
        return buffer

    def places(self, at: str) -> Output:
        """``tensor_offsets`` of the grouped tensor at ``at``: as given, or int64 where the members' sizes differ; equal members need none."""
        offsets = self.described.get("tensor_offsets", dims(*self.offsets, self.offsets[-1] + math.prod(self.shapes[-1])))
        return Output(f"{at}.tensor_offsets", offsets if self.described else None)

    def output(self, at: str, name: str, parts: list[Tensor]) -> Output:
        """The members' bytes in the buffer ``name`` of the grouped tensor at ``at``. Gaps between them may hold anything."""
        whole = sum(part.numel() for part in parts) == math.prod(self.shape)

        def wanted(result: Any, arguments: Arguments) -> Tensor:
            return self.placed(parts, Output(f"{at}.{name}", None).find(result, arguments))

        return Output(f"{at}.{name}", self.placed(parts) if whole else wanted)


def dims(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


BY_ROWS = Layout("rows", ((3, 6), (0, 6), (4, 6), (1, 6)), (0, 18, 18, 42), {"first_dims": dims(3, 0, 4, 1)})
LAYOUTS = (
    Layout("equal", ((2, 6),) * 4, (0, 12, 24, 36)),
    BY_ROWS,
    Layout("two", ((4, 6),) * 2, (0, 24)),
    Layout("columns", ((8, 1), (8, 0), (8, 2), (8, 3)), (0, 8, 8, 24), {"last_dims": dims(1, 0, 2, 3)}),
    Layout("both", ((1, 4), (2, 3), (3, 2), (4, 1)), (0, 4, 10, 16), {"first_dims": dims(1, 2, 3, 4), "last_dims": dims(4, 3, 2, 1)}),
    Layout("rows left over", ((2, 6), (1, 6), (0, 6), (2, 6)), (0, 12, 18, 18), {"first_dims": dims(2, 1, 0, 2)}),
    Layout("gaps", ((2, 6), (1, 6), (1, 6), (2, 6)), (0, 18, 24, 36), {"first_dims": dims(2, 1, 1, 2), "tensor_offsets": dims(0, 18, 24, 36, 48)}),
    Layout("out of order", ((2, 6),) * 4, (36, 0, 12, 24), {"first_dims": dims(2, 2, 2, 2), "tensor_offsets": dims(36, 0, 12, 24, 48)}),
)

LEFT_OVER, GAPS = LAYOUTS[5:7]
NOBODY = Layout("nobody's rows", ((0, 6),) * 4, (0,) * 4, {"first_dims": dims(0, 0, 0, 0)})

_WIDE = 660
LARGE = Layout("large", ((3, _WIDE), (0, _WIDE), (4, _WIDE), (1, _WIDE)), (0, 3 * _WIDE, 3 * _WIDE, 7 * _WIDE), BY_ROWS.described, _WIDE)
"""More than 4,096 elements."""


def turned(parts: list[Tensor]) -> list[Tensor]:
    return [part.t().contiguous() for part in parts]


@dataclass(frozen=True)
class Case:
    """A kind of quantizer: ``make(**usages)`` makes one, and the methods give what it makes of members."""

    label: str
    make: Callable[..., Quantizer]
    fp8: DType
    current: bool

    def scales(self, parts: list[Tensor]) -> list[float]:
        return [scale_of(part, self.fp8, False) if self.current else 16.0 for part in parts]

    def data(self, parts: list[Tensor]) -> list[Tensor]:
        return [cast(part, scale, self.fp8) for part, scale in zip(parts, self.scales(parts), strict=True)]

    def amax(self, x: list[Tensor]) -> tuple[Output, ...]:
        largest = torch.stack([amax_of(part) for part in x]).amax(0)
        return () if self.current else (Output("quantizer.amax", largest.clamp(min=_FORMER)),)

    def outputs(self, at: str, layout: Layout, parts: list[Tensor], rowwise: bool = True, columnwise: bool = True) -> tuple[Output, ...]:
        data, inverse = self.data(parts), torch.tensor(self.scales(parts)).double().reciprocal()
        return (
            layout.output(at, "rowwise_data", data) if rowwise else Output(f"{at}.rowwise_data", None),
            layout.output(at, "columnwise_data", turned(data)) if columnwise else Output(f"{at}.columnwise_data", None),
            Output(f"{at}.scale_inv", inverse if rowwise else None),
            Output(f"{at}.columnwise_scale_inv", inverse if columnwise else None),
        )


def case(fp8: DType, current: bool) -> Case:
    def make(**usages: bool) -> Quantizer:
        if current:
            return Float8CurrentScalingQuantizer(fp8, "cpu", **usages)
        return Float8Quantizer(torch.tensor([16.0]), torch.tensor([_FORMER]), fp8, **usages)

    return Case(f"{fp8.name} {'current' if current else 'delayed'}", make, fp8, current)


_CASES = tuple(case(fp8, current) for fp8 in FORMATS for current in (False, True))


def described(x: GroupedTensorStorage) -> tuple[str, ...]:
    return tuple(name for name in ("rowwise_data", "columnwise_data", "scale_inv", "columnwise_scale_inv") if getattr(x, name) is not None)


def grouped_bytes(
    layout: Layout, data: list[Tensor], quantizer: Quantizer, dtype: torch.dtype, inverse: Tensor, **changes: Any
) -> GroupedTensorStorage:
    """A grouped tensor of members ``data`` (bytes); ``changes`` replace fields."""
    rows, columns = layout.placed(data), layout.placed(turned(data))
    fields = {"data": rows, "columnwise_data": columns, "scale_inv": inverse.clone(), "columnwise_scale_inv": inverse.clone()}
    return GroupedTensorStorage(layout.shape, dtype, quantizer=quantizer, **{**fields, **layout.arguments, **changes})


@record("group_quantize")
def group_quantize(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for layout in (*LAYOUTS, LARGE):
        x = random(generator, layout.shape, dtype, 3.0)
        parts = layout.pieces(x)
        shapes = Output("result.logical_shape", layout.shape), Output("result.num_tensors", len(layout.shapes)), Output("result.fake_dtype", dtype)
        for each in _CASES if layout is not LARGE else _CASES[:1]:
            for usages in ({}, {"columnwise": False}, {"rowwise": False}) if layout in (BY_ROWS, GAPS) else ({},):
                arguments = {"tensor": x.clone(), "quantizer": each.make(**usages), **layout.arguments}
                outputs = each.outputs("result", layout, parts, usages.get("rowwise", True), usages.get("columnwise", True))
                yield Sample(f"{layout.label} {each.label} {usages}", arguments, (*outputs, layout.places("result"), *shapes, *each.amax(parts)))
        plain = Output("result.rowwise_data", x.reshape(-1).clone()), Output("result.columnwise_data", None), Output("result.quantizer", None)
        yield Sample(f"{layout.label} unquantized", {"tensor": x, "quantizer": None, **layout.arguments}, (*plain, *shapes))
    yield from into_output(generator, dtype)
    yield from quantize_in_blocks(dtype)


def into_output(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    layout = BY_ROWS
    for each, noop in itertools.product(_CASES, (None, 0.0, 1.0)):
        x = random(generator, layout.shape, dtype, 3.0)
        parts, quantizer = layout.pieces(x), each.make()
        old = [torch.full(part.shape, 7, dtype=torch.uint8) for part in parts]
        output = grouped_bytes(layout, old, quantizer, dtype, torch.full((4,), 0.5))
        outputs = each.outputs("output", layout, parts) + each.amax(parts)
        if noop == 1.0:
            kept = [Output(f"output.{name}", getattr(output, name).clone()) for name in described(output)]
            outputs = (*kept, *(() if each.current else (Output("quantizer.amax", torch.tensor([_FORMER])),)))
        flag = None if noop is None else torch.tensor([noop])
        arguments = {"tensor": x, "quantizer": quantizer, **layout.arguments, "noop_flag": flag, "output": output}
        yield Sample(f"into an output, {each.label}, noop {noop}", arguments, outputs)


@record("bgrad_group_quantize")
def bgrad_group_quantize(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for layout in (each for each in (*LAYOUTS, LARGE, NOBODY) if "last_dims" not in each.described):
        for each in _CASES if layout not in (LARGE, NOBODY) else _CASES[:1]:
            x = random(generator, layout.shape, dtype, 3.0)
            parts = layout.pieces(x)
            sums = torch.stack([part.double().sum(0) for part in parts])
            size = x.double().abs().sum(0).max().item()
            arguments = {"tensor": x, "quantizer": each.make(), **layout.arguments}
            outputs = (*each.outputs("result.0", layout, parts), layout.places("result.0"), Output(1, sums, dtype, _ROWS, size), *each.amax(parts))
            yield Sample(f"{layout.label} {each.label}", arguments, outputs)
    yield from bgrad_in_blocks(dtype)


def stored(generator: torch.Generator, layout: Layout, fp8: DType, *, special: bool = True) -> tuple[list[Tensor], Tensor, Tensor]:
    """The members' bytes, the inverses of their scales, and the float64 values that they represent, in their buffer. ``special``: the values include
    NaN and, in E5M2, infinities and the largest number, and the scales are not powers of two."""
    values = torch.randn(layout.shape, generator=generator)
    if special:
        largest = torch.finfo(getattr(torch, NUMPY[fp8].__name__)).max
        values[0, :4] = torch.tensor([torch.nan, -largest, torch.inf, -torch.inf])
    bits = values.numpy().astype(NUMPY[fp8]).view(np.uint8)
    inverse = torch.tensor([1.7, 0.3, 2.1, 0.125] if special else [0.5, 0.25, 2.0, 0.125])[: len(layout.shapes)]
    data = layout.pieces(torch.from_numpy(bits))
    values = [decoded(part, fp8) * scale.item() for part, scale in zip(data, inverse, strict=True)]
    return data, inverse, layout.placed(values)


_WHOLE = tuple(layout for layout in LAYOUTS if sum(map(math.prod, layout.shapes)) == _ROWS * _COLUMNS)


@record("group_dequantize")
def group_dequantize(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for layout in (*_WHOLE, LARGE):
        for each in _CASES if layout is not LARGE else _CASES[:1]:
            data, inverse, values = stored(generator, layout, each.fp8)
            arguments = {"input": grouped_bytes(layout, data, each.make(), torch.bfloat16, inverse), "otype": dtype}
            outputs = (Output("result.rowwise_data", values, dtype), Output("result.quantizer", None), Output("result.fake_dtype", dtype))
            yield Sample(f"{layout.label} {each.label}", arguments, (*outputs, Output("result.logical_shape", layout.shape)))
    yield from dequantize_in_blocks(dtype)


@record("group_requantize_inplace")
def group_requantize(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for layout in (each for each in (*_WHOLE, GAPS, LARGE) if "last_dims" not in each.described):
        for each in _CASES if layout is not LARGE else _CASES[:1]:
            data, inverse, values = stored(generator, layout, each.fp8)
            for wanted in (False, True) if layout is not GAPS else (False,):
                quantizer, alone = each.make(), {"columnwise_data": None, "columnwise_scale_inv": None}
                grouped = grouped_bytes(layout, data, each.make(columnwise=False), torch.bfloat16, inverse, **alone)
                arguments = {"grouped_x": grouped, "quantizer": quantizer, "otype": dtype, "return_dequantized": wanted, **layout.arguments}
                outputs = (
                    Output("grouped_x.rowwise_data", layout.placed(data)), layout.output("grouped_x", "columnwise_data", turned(data)),
                    Output("grouped_x.scale_inv", inverse), Output("grouped_x.columnwise_scale_inv", inverse),
                    Output(None, values.view(layout.shape) if wanted else None, dtype),
                    *(Output(f"grouped_x.{name}", taken_on(name)) for name in ("quantizer", "num_tensors", *layout.described)),
                )  # fmt: skip
                yield Sample(f"{layout.label} {each.label} {wanted}", arguments, outputs)
    yield from nothing_to_add(generator, dtype)
    yield from requantize_in_blocks(dtype)


def nothing_to_add(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """A column-wise copy that exists already, or that is not asked for, stays as it is."""
    each = _CASES[0]
    for there, asked in ((True, True), (True, False), (False, False)):
        data, inverse, values = stored(generator, BY_ROWS, each.fp8)
        columns = torch.randint(0, 256, (math.prod(BY_ROWS.shape),), generator=generator, dtype=torch.uint8) if there else None
        columnwise = {"columnwise_data": columns, "columnwise_scale_inv": inverse.clone() if there else None}
        grouped = grouped_bytes(BY_ROWS, data, each.make(columnwise=there), torch.bfloat16, inverse, **columnwise)
        described = {"otype": dtype, "return_dequantized": asked, **BY_ROWS.arguments}
        arguments = {"grouped_x": grouped, "quantizer": each.make(columnwise=asked), **described}
        outputs = [Output(f"grouped_x.{name}", x if x is None else x.clone()) for name, x in columnwise.items()]
        outputs.append(Output(None, values.view(BY_ROWS.shape) if asked else None, dtype))
        yield Sample(f"columns there {there}, asked for {asked}", arguments, (*outputs, Output("grouped_x.rowwise_data", BY_ROWS.placed(data))))


def taken_on(name: str) -> Found:
    """The argument of that name, which the grouped tensor takes over."""
    return lambda result, arguments: arguments[name]


def near(at: str, values: list[Tensor], each: Case, dtype: torch.dtype) -> Found:
    """The bytes of the result where they are within half a step of the float64 value, first rounded to ``dtype``; elsewhere the nearest ones."""

    def wanted(result: Any, arguments: Arguments) -> Tensor:
        found = Output(f"{at}.columnwise_data", None).find(result, arguments).cpu()
        inverses = Output(f"{at}.columnwise_scale_inv", None).find(result, arguments).cpu()
        good, sizes = [], [value.numel() for value in values]
        rest = found.numel() - sum(sizes)
        for bits, value, inverse in zip(found.split([*sizes, rest])[:-1], turned(values), inverses.tolist(), strict=True):
            bound = (HALF_STEP[each.fp8] + torch.finfo(dtype).eps) * value.abs() + 2.0**-10 * inverse + 1e-5
            good.append(kept_within(bits, value, inverse, each.fp8, bound).view(-1))
        return torch.cat([*good, found[sum(sizes) :]])

    return wanted


def grouped_activation(generator: torch.Generator, dtype: torch.dtype, f: Callable[..., Tensor], options: dict[str, float]) -> Iterator[Sample]:
    more = [(layout, each, options) for layout in _WHOLE[:3] for each in _CASES]
    more += [(layout, _CASES[0], options) for layout in (LARGE, LEFT_OVER)]
    more += [*((_WHOLE[0], _CASES[0], {**options, **chosen}) for chosen in choices(options))]
    for layout, each, chosen in more:
        x, prob = random(generator, (_ROWS, 2 * layout.columns), dtype), torch.rand(_ROWS, generator=generator)
        if chosen.get("limit", 0.0) > 1e3 and dtype is not torch.float16:
            x[1] = torch.finfo(dtype).max  # whose product is infinite in fp32
        values = layout.pieces(f(x.double(), **chosen) * prob.double()[:, None])
        inverse = torch.tensor([1 / scale for scale in each.scales(values)], dtype=torch.float64)
        # An amax is that of values rounded to the dtype; 17 is what the bound of one fp32 operation counts.
        shape, rounded = Output("result.logical_shape", layout.shape), 1 + torch.finfo(dtype).eps / torch.finfo(torch.float32).eps / 17
        outputs = [
            Output("result.columnwise_data", near("result", values, each, dtype)), Output("result.rowwise_data", None),
            Output("result.columnwise_scale_inv", inverse, magnitude=rounded * inverse.max().item()), shape,
            Output("result.columnwise_data.shape", torch.Size([x.numel() // 2])),
        ]  # fmt: skip
        if not each.current:
            largest = torch.stack([value.abs().max() for value in values if value.numel()]).amax(0, keepdim=True)
            largest = largest.clamp(min=_FORMER)
            outputs.append(Output("quantizer.amax", largest, magnitude=rounded * largest.item()))
        arguments = {"input_2h": x, "prob": prob, "quantizer": each.make(), **layout.arguments, **chosen}
        yield Sample(f"{layout.label} {each.label} {chosen}", arguments, tuple(outputs))
    yield gated_in_blocks(generator, dtype, f, options)


_LIMITED = {"limit": 1.5, "alpha": 1.3, "glu_linear_offset": 0.5}
record("group_scaled_swiglu")(partial(grouped_activation, f=gated(silu), options={}))
record("group_scaled_clamped_swiglu")(partial(grouped_activation, f=clamped_swiglu, options=_LIMITED))


def nvfp4_lines(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes, and E4M3 bytes ``[lines, blocks]``, of the lines ``x``."""
    codes, scales = oracle.nvfp4(x.float().numpy(), amax.numpy(), False)
    return torch.from_numpy(oracle.packed(codes)), torch.from_numpy(scales)


def padded(scales: Tensor) -> Tensor:
    """Scales in the upper left of zeros, in multiples of 128 lines and 4 blocks."""
    whole = torch.zeros(-(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4, dtype=torch.uint8)
    whole[: scales.shape[0], : scales.shape[1]] = scales
    return whole


def placed_at(at: str, data: Tensor, left: int) -> Output:
    """The bytes ``data`` at ``at``. The ``left`` bytes behind them may hold anything."""
    if not left:
        return Output(at, data)
    return Output(at, lambda result, arguments: torch.cat([data, Output(at, None).find(result, arguments).cpu()[len(data) :]]))


def nvfp4_call(x: Tensor, quantizer: NVFP4Quantizer, rows: tuple[int, ...], amaxes: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments that quantize members of ``rows`` by the ``amaxes`` of each way."""
    known_amaxes = {f"{way}_amax": amax.clone() for way, amax in amaxes.items()}
    return {"tensor": x, "quantizer": quantizer, "num_tensors": len(rows), "first_dims": torch.tensor(rows), **known_amaxes}


_PREFIXES = {"rowwise": "", "columnwise": "columnwise_"}


@record("nvfp4_group_quantize_with_amax")
def nvfp4_group_quantize(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for rows, left, width in (((16, 48, 32), 0, 48), ((32, 32, 32), 0, 48), ((64, 64, 48), 0, 48), ((32,), 16, 48), ((32, 16), 0, 144)):
        x = random(generator, (sum(rows) + left, width), dtype, 3.0)
        parts = x[: sum(rows)].split(rows)
        amaxes = {"rowwise": torch.tensor([20.03, 12.5, 9.01])[: len(rows)], "columnwise": torch.tensor([15.0, 17.0, 30.0])[: len(rows)]}
        members = {"rowwise": parts, "columnwise": [part.t() for part in parts]}
        ways = {way: [nvfp4_lines(part, amax) for part, amax in zip(members[way], amaxes[way], strict=True)] for way in members}
        outputs = []
        for way, made in ways.items():
            outputs.append(placed_at(f"result.{way}_data", torch.cat([codes.reshape(-1) for codes, _ in made]), left * width // 2))
            outputs.append(Output(f"result.{_PREFIXES[way]}scale_inv", torch.cat([padded(scales).view(-1) for _, scales in made])))
            outputs.append(Output(f"result.{_PREFIXES[way]}amax", amaxes[way]))
        yield Sample(f"{rows}, {left} left over", nvfp4_call(x, NVFP4Quantizer(), rows, amaxes), tuple(outputs))
    # The same in the order of tensor cores.
    quantizer = NVFP4Quantizer()
    quantizer.optimize_for_gemm = True
    outputs = [Output("result._with_gemm_swizzled_scales", True)]
    for way, made in ways.items():
        ordered = torch.cat([in_tiles(padded(scales)).view(-1) for _, scales in made])
        outputs.append(Output(f"result.{_PREFIXES[way]}scale_inv", ordered))
    yield Sample("in tiles", nvfp4_call(x.clone(), quantizer, rows, amaxes), tuple(outputs))
    # A member without rows. Only stochastic rounding would draw random numbers for it, and this rounding is to nearest.
    rows, amax = (16, 0, 32), torch.tensor([20.0, 0.0, 15.0])
    codes = torch.cat([nvfp4_lines(part, most)[0] for part, most in zip(x[:48].split(rows), amax, strict=True) if len(part)])
    outputs = (Output("result.rowwise_data", codes.reshape(-1)), Output("result.amax", amax))
    arguments = nvfp4_call(x[:48].clone(), NVFP4Quantizer(), rows, {"rowwise": amax, "columnwise": amax})
    yield Sample("a member without rows", arguments, outputs)
    # The tensor keeps the given amaxes, whatever scales follow from them.
    amax = torch.tensor([1e5, torch.inf, torch.nan])
    x = random(generator, (96, 48), dtype, 3.0)
    arguments = nvfp4_call(x, NVFP4Quantizer(columnwise=False), (16, 48, 32), {"rowwise": amax, "columnwise": torch.ones(3)})
    yield Sample("extreme amaxes", arguments, (Output("result.amax", amax),))
