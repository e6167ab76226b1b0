"""Block-scaled quantized data without autograd. Fields, constructor arguments and their order are those of NVIDIA's storages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.nn.functional import max_pool2d

from fusible import tex
from fusible.errors import ArgumentError, expected
from fusible.quantized.shapes import viewed
from fusible.quantized.storage import FieldStorage, wrong_buffer
from fusible.tex import DType
from fusible.tex.formats import FLOAT8_BLOCKS, MXFP8, NVFP4, WAYS, BlockFormat
from fusible.tex.formulas.arrays import Array
from fusible.tex.protocol import QuantizerLike, outer

__all__ = ["BlockScaledStorage", "Float8BlockwiseQTensorStorage", "MXFP8TensorStorage", "NVFP4TensorStorage"]


def _fields(*names: str) -> dict[str, str]:
    return {name: f"_{name}" for name in names}


class BlockScaledStorage(FieldStorage):
    """A row-wise and a column-wise copy, each of data (uint8) and of the scales of its blocks; at least one of the copies is there."""

    _FORMAT: ClassVar[BlockFormat]
    _TENSORS = _fields("rowwise_data", "columnwise_data", "rowwise_scale_inv", "columnwise_scale_inv")

    _rowwise_data: Any
    _rowwise_scale_inv: Any
    _columnwise_data: Any
    _columnwise_scale_inv: Any

    def _hold(self, quantizer: QuantizerLike | None, fake_dtype: torch.dtype | None, *buffers: Any, **options: Any) -> None:
        """Set the fields of a new storage; ``buffers`` in the order of its format."""
        self._quantizer = quantizer
        self._dtype = fake_dtype if fake_dtype is not None else torch.float32
        for name, value in (*zip(self._FORMAT.buffers, buffers, strict=True), *options.items()):
            setattr(self, f"_{name}", value)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._FORMAT.shape(self))

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": self._rowwise_data is not None, "columnwise": self._columnwise_data is not None}

    def get_data_tensors(self) -> tuple[Any, Any]:
        return self._rowwise_data, self._columnwise_data

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a copy, or make the column-wise one from the row-wise one where both have the scales of the same tiles; None leaves one as it is.

        Any other copy could only be made by quantizing twice. Raises ``ArgumentError`` for that, and where no copy would be left.
        """
        has = self.get_usages()
        asked = {"rowwise": rowwise_usage, "columnwise": columnwise_usage}
        wanted = {way: has[way] if asked[way] is None else asked[way] for way in has}
        of = f"a tensor of {self._FORMAT}"
        if not any(wanted.values()):
            raise ArgumentError(expected("at least one usage", of=of, got="neither row-wise nor column-wise", do="keep one"))
        for way in has:
            if wanted[way] and not has[way] and not (way == "columnwise" and has["rowwise"] and self._tiled):
                got, do = f"a request for {way} data", "quantize the unquantized tensor with that usage"
                raise ArgumentError(expected("the copies that were made", of=of, got=got, do=do))
        if wanted["columnwise"] and not has["columnwise"]:
            self._make_columnwise()
        for way in has:
            if not wanted[way]:
                for name in self._TENSORS:
                    if way in name:
                        setattr(self, f"_{name}", None)

    @property
    def _tiled(self) -> bool:
        """Whether both copies have the same elements and scales."""
        return False

    def _make_columnwise(self) -> None:
        raise NotImplementedError

    def _take_where(self, new: Any, changed: torch.Tensor) -> None:
        """Take over the blocks of ``new`` that have changed; all, where scales lie in the order of products."""
        if self._FORMAT.is_swizzled(self) or self._FORMAT.is_swizzled(new):
            self.copy_from_storage(new)
            return
        for way, there in self.get_usages().items():
            if there:
                self._take_blocks(way, new, changed.reshape(-1, changed.shape[-1]))

    def _take_blocks(self, way: str, new: Any, changed: torch.Tensor) -> None:
        """Take over the blocks of one copy in which an element of ``changed [M, K]`` is."""
        form, columnwise, tiled = self._FORMAT, way == "columnwise", self._FORMAT.has_tile_scales(self)
        rows, columns = form.block(way, tiled or form.is_tiled(self._quantizer))
        blocks = max_pool2d(changed[None].float(), (rows, columns), ceil_mode=True)[0] > 0
        places = blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: changed.shape[0], : changed.shape[1]]
        scaled = blocks if tiled else places[:: form.block(way, False)[0], :: form.block(way, False)[1]]
        stored = places.t() if columnwise and form.transposed else places
        data, scales = getattr(self, f"_{way}_data"), getattr(self, f"_{way}_scale_inv")
        data.copy_(torch.where(stored[:, :: form.packed].reshape(data.shape), getattr(new, f"_{way}_data").view(data.shape), data))
        scaled = scaled.t() if form.rows_second(columnwise, tiled) else scaled
        used = scales[: scaled.shape[0], : scaled.shape[1]]
        used.copy_(torch.where(scaled, getattr(new, f"_{way}_scale_inv")[: scaled.shape[0], : scaled.shape[1]], used))

    def _viewed(self, shape: tuple[int, ...]) -> dict[str, Any] | None:
        have = self.shape
        if torch.Size(shape).numel() != have.numel() or not shape or shape[-1] != have[-1]:
            return None
        fields = self.get_metadata()
        for way in WAYS:
            data = fields[f"{way}_data"]
            if data is not None:
                wanted = self._FORMAT.data_shape(shape, way == "columnwise")
                fields[f"{way}_data"] = viewed(data, wanted)
        return fields

    def _fits(self, shape: Sequence[int]) -> bool:
        return self._FORMAT.fits(shape)

    def _row_step(self) -> int:
        """Whole blocks: but 1x128 blocks lie within their rows."""
        return self._FORMAT.length

    @property
    def _gathered_ways(self) -> tuple[str, ...]:
        """The copies that are gathered: the column-wise one is made of the row-wise one where it can be."""
        has = self.get_usages()
        return tuple(way for way in has if has[way] and not (way == "columnwise" and has["rowwise"] and self._tiled))

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        return tuple(f"_{way}_{part}" for way in self._gathered_ways for part in ("data", "scale_inv"))

    def fsdp_extract_buffers(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(buffers, meta)``: of each copy the data and the scales with the rows first. Raises ``ArgumentError`` where blocks would be cut."""
        shape = tuple(self.shape)
        if self._FORMAT.is_swizzled(self):
            do = "quantize without optimize_for_gemm"
            raise ArgumentError(expected("scales in the order of their blocks", of=f"rows of {self._FORMAT}", got="the order of products", do=do))
        if len(shape) < 2 or outer(shape) % self._row_step():
            wanted = f"a multiple of {self._row_step()} rows"
            raise ArgumentError(expected(wanted, of=f"a shard of {self._FORMAT}", got=list(shape), do="divide it at whole blocks"))
        buffers: list[Any] = []
        for way in self._gathered_ways:
            data, columnwise, tiled = getattr(self, f"_{way}_data"), way == "columnwise", self._FORMAT.has_tile_scales(self)
            buffers.append(data.view(shape[-1], -1).t().contiguous() if columnwise and self._FORMAT.transposed else data)
            lines, blocks = self._FORMAT.used_scales(shape, columnwise, tiled)
            scales = getattr(self, f"_{way}_scale_inv")[:lines, :blocks]
            buffers.append((scales.t() if self._FORMAT.rows_second(columnwise, tiled) else scales).contiguous())
        kept = {name: getattr(self, f"_{name}") for name in self._TENSORS if name.startswith("amax") and getattr(self, f"_{name}") is not None}
        return tuple(buffers), {"field_names": self.fsdp_buffer_fields(), "inner": shape[1:], "kept": kept}

    def _of_rows(self, buffers: Sequence[Any], meta: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
        gathered, inner = dict(zip(meta["field_names"], buffers, strict=True)), meta["inner"]
        ways = [name.split("_")[1] for name in meta["field_names"] if name.endswith("data")]
        first = gathered[f"_{ways[0]}_data"]
        form, tiled, per_row = self._FORMAT, self._FORMAT.has_tile_scales(self), inner[-1] // self._FORMAT.packed
        shape = (first.numel() // (per_row * outer(inner)), *inner)
        if ways[0] == "rowwise" and tuple(first.shape[1:]) != form.data_shape(shape, False)[1:]:
            raise ValueError(f"rows of {list(first.shape[1:])}")
        fields: dict[str, Any] = dict(meta["kept"])
        for way in ways:
            columnwise = way == "columnwise"
            data, scales = gathered[f"_{way}_data"], gathered[f"_{way}_scale_inv"]
            data = data.t().contiguous() if columnwise and form.transposed else data
            scales = scales.t() if form.rows_second(columnwise, tiled) else scales
            lines, blocks = form.used_scales(shape, columnwise, tiled)
            if scales.shape[0] < lines or scales.shape[1] < blocks:
                raise ValueError(f"{list(scales.shape)} scales for {[lines, blocks]} blocks")
            padded = scales.new_zeros(form.scale_shape(shape, columnwise, tiled))
            padded[: scales.shape[0], : scales.shape[1]] = scales
            fields[f"{way}_data"] = data.view(form.data_shape(shape, columnwise))
            fields[f"{way}_scale_inv"] = padded
        return shape, fields

    def _check_buffers(self, shape: tuple[int, ...]) -> str | None:
        wanted: dict[str, tuple[Sequence[int], torch.dtype]] = {}
        if not self._fits(shape):
            return f"blocks that do not fill {list(shape)}"
        form = self._FORMAT
        for way in WAYS:
            if (getattr(self, f"_{way}_data") is None) != (getattr(self, f"_{way}_scale_inv") is None):
                return f"{way} data or scales alone"
            columnwise = way == "columnwise"
            wanted[f"{way}_data"] = form.data_shape(shape, columnwise), torch.uint8
            wanted[f"{way}_scale_inv"] = form.scale_shape(shape, columnwise, form.has_tile_scales(self)), form.scale_dtype
        return wrong_buffer(self, wanted) or ("no data" if not any(self.get_usages().values()) else None)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={getattr(self, f'_{name}')!r}" for name in self._OPTIONS)
        empty = self._rowwise_data is None and self._columnwise_data is None
        return f"{type(self).__name__}(shape={None if empty else list(self.shape)}, dtype={self._dtype}, {options})"


class Float8BlockwiseQTensorStorage(BlockScaledStorage):
    """FP8 with one fp32 scale per 1x128 block, or per 128x128 tile (``_is_2D_scaled``): value = data read as ``_fp8_dtype``, times its block's scale.

    ``_rowwise_data``: uint8 ``[*leading, K]``; ``_columnwise_data``: uint8 ``[K, *leading]``. With ``M`` the product of ``leading``, the scales are
    ``[ceil(K / 128), M]`` and ``[ceil(M / 128), K]`` (blocks first), or ``[ceil(M / 128), ceil(K / 128)]`` and its transpose; the last dimension is
    padded to a multiple of 4.
    """

    _FORMAT = FLOAT8_BLOCKS
    _OPTIONS = ("fp8_dtype", "is_2D_scaled")

    _fp8_dtype: Any
    _is_2D_scaled: bool

    def __init__(
        self,
        rowwise_data: Array | None,
        rowwise_scale_inv: Array | None,
        columnwise_data: Array | None,
        columnwise_scale_inv: Array | None,
        fp8_dtype: int,
        quantizer: QuantizerLike | None,
        is_2D_scaled: bool,
        *,
        fake_dtype: torch.dtype | None = None,
    ) -> None:
        copies = (rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv)
        self._hold(quantizer, fake_dtype, *copies, fp8_dtype=DType(fp8_dtype), is_2D_scaled=is_2D_scaled)

    @property
    def _tiled(self) -> bool:
        return self._is_2D_scaled

    def _row_step(self) -> int:
        return 1 if not self._is_2D_scaled and self._columnwise_data is None else super()._row_step()

    def _make_columnwise(self) -> None:
        rows, columns = self._FORMAT.used_scales(self.shape, False, True)
        scales = self._rowwise_scale_inv
        turned = scales.new_zeros(self._FORMAT.scale_shape(self.shape, True, True))
        turned[:columns, :rows] = scales[:rows, :columns].t()
        self._columnwise_data = tex.fp8_transpose(self._rowwise_data, self._fp8_dtype, out=None)
        self._columnwise_scale_inv = turned


class MXFP8TensorStorage(BlockScaledStorage):
    """FP8 with one power of two per 32 elements: value = data read as ``_fp8_dtype``, times ``2^(s - 127)`` of its block's byte ``s``.

    ``_rowwise_data`` and ``_columnwise_data``: uint8 ``[*leading, K]``, neither transposed. With ``M`` the product of ``leading``, the scales are
    uint8 ``[M, K / 32]``, padded to multiples of ``[128, 4]``, and ``[M / 32, K]``, padded to multiples of ``[4, 128]``; with
    ``_with_gemm_swizzled_scales`` they lie in the order that tensor cores read.
    """

    _FORMAT = MXFP8
    _OPTIONS = ("fp8_dtype", "with_gemm_swizzled_scales")

    _fp8_dtype: Any
    _with_gemm_swizzled_scales: bool

    def __init__(
        self,
        rowwise_data: Array | None,
        rowwise_scale_inv: Array | None,
        columnwise_data: Array | None,
        columnwise_scale_inv: Array | None,
        fp8_dtype: int,
        quantizer: QuantizerLike | None,
        with_gemm_swizzled_scales: bool,
        *,
        fake_dtype: torch.dtype | None = None,
    ) -> None:
        copies = (rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv)
        self._hold(quantizer, fake_dtype, *copies, fp8_dtype=DType(fp8_dtype), with_gemm_swizzled_scales=with_gemm_swizzled_scales)


class NVFP4TensorStorage(BlockScaledStorage):
    """E2M1 with one E4M3 scale per 16 elements: value = element times its block's scale, times ``amax / (6 * e4m3_max)``.

    ``_rowwise_data``: uint8 ``[*leading, K / 2]``, two elements to a byte, the even one low; ``_columnwise_data``: uint8 ``[K, *leading]`` packed
    along its last dimension. With ``M`` the product of ``leading``, the scales are uint8 ``[M, K / 16]`` and ``[K, M / 16]``, padded to multiples of
    ``[128, 4]``. ``_amax_rowwise`` and ``_amax_columnwise``: fp32 ``[1]``, or ``[M]`` and ``[K]`` where ``_row_scaled_nvfp4``. ``_nvfp4_e4m3_max`` is
    448, or 256 where ``_nvfp4_use_4over6`` says so.
    """

    _FORMAT = NVFP4
    _TENSORS = BlockScaledStorage._TENSORS | _fields("amax_rowwise", "amax_columnwise")
    _OPTIONS = ("fp4_dtype", "with_gemm_swizzled_scales", "row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max")

    _amax_rowwise: Any
    _amax_columnwise: Any
    _fp4_dtype: Any
    _with_gemm_swizzled_scales: bool
    _row_scaled_nvfp4: bool
    _nvfp4_use_4over6: bool
    _nvfp4_e4m3_max: int

    def __init__(
        self,
        rowwise_data: Array | None,
        rowwise_scale_inv: Array | None,
        columnwise_data: Array | None,
        columnwise_scale_inv: Array | None,
        amax_rowwise: Array | None,
        amax_columnwise: Array | None,
        fp4_dtype: int,
        quantizer: QuantizerLike | None,
        with_gemm_swizzled_scales: bool,
        *,
        fake_dtype: torch.dtype | None = None,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
    ) -> None:
        copies = (rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, amax_rowwise, amax_columnwise)
        options = {"row_scaled_nvfp4": row_scaled_nvfp4, "nvfp4_use_4over6": nvfp4_use_4over6}
        options |= {"nvfp4_e4m3_max": nvfp4_e4m3_max if nvfp4_use_4over6 else 448, "with_gemm_swizzled_scales": with_gemm_swizzled_scales}
        self._hold(quantizer, fake_dtype, *copies, **options, fp4_dtype=DType(fp4_dtype))

    @property
    def _tiled(self) -> bool:
        quantizer = self._quantizer
        return quantizer is not None and quantizer.with_2d_quantization and not quantizer.with_rht and not self._with_gemm_swizzled_scales

    def _quantized_like(self, values: torch.Tensor) -> Any:
        """``values`` quantized by the amax that this tensor has, where none is larger: by blocks beside them that hold it."""
        amax = self._amax_rowwise if self._amax_rowwise is not None else self._amax_columnwise
        length, finite = self._FORMAT.length, bool((values.abs().amax() <= amax * (1 + 2**-16)).all()) if amax.numel() == 1 else False
        if not finite:
            return super()._quantized_like(values)
        flat = values.reshape(-1, values.shape[-1])
        beside = flat.new_zeros(length, flat.shape[1])
        beside[0, 0] = amax.item()
        new = super()._quantized_like(torch.cat([flat.clamp(-amax, amax), beside]))
        return new._rows(0, len(flat))

    def _take_where(self, new: Any, changed: torch.Tensor) -> None:
        ways = {way: (getattr(self, f"_amax_{way}"), getattr(new, f"_amax_{way}")) for way, there in self.get_usages().items() if there}
        flat = changed.reshape(-1, changed.shape[-1])
        for way, (mine, other) in ways.items():
            if self._row_scaled_nvfp4:
                lines = flat.any(1, keepdim=True) if way == "rowwise" else flat.any(0, keepdim=True)
                mine.copy_(torch.where(lines.flatten(), other, mine))
                self._take_blocks(way, new, lines.expand_as(flat))
            elif torch.allclose(mine, other, rtol=2**-16, atol=0):
                self._take_blocks(way, new, flat)
            else:
                mine.copy_(other)
                self._take_blocks(way, new, torch.ones_like(flat))

    def fsdp_extract_buffers(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As for the other formats; but amaxes of rows divide as the rows do, and those of columns are only known of the whole."""
        if self._row_scaled_nvfp4:
            do = "dequantize it, or quantize with one amax"
            raise ArgumentError(expected("one amax", of=f"rows of {self._FORMAT}", got="one amax per row", do=do))
        return super().fsdp_extract_buffers()

    def _check_buffers(self, shape: tuple[int, ...]) -> str | None:
        wanted: dict[str, tuple[Sequence[int], torch.dtype]] = {}
        for way, lines in (("rowwise", outer(shape)), ("columnwise", shape[-1] if shape else 0)):
            if (getattr(self, f"_{way}_data") is None) != (getattr(self, f"_amax_{way}") is None):
                return f"{way} data or amax alone"
            wanted[f"amax_{way}"] = (lines if self._row_scaled_nvfp4 else 1,), torch.float32
        return super()._check_buffers(shape) or wrong_buffer(self, wanted)

    def _make_columnwise(self) -> None:
        rows, columns = outer(self.shape), self.shape[-1]
        scales = self._rowwise_scale_inv.new_zeros(self._FORMAT.scale_shape(self.shape, True, True))
        tex.nvfp4_2d_scale_transpose(self._rowwise_scale_inv, scales, rows // 16, columns // 16)
        data = tex.nvfp4_data_transpose(self._rowwise_data.view(rows, columns // 2), out=None)
        self._columnwise_data = data.view(self._FORMAT.data_shape(self.shape, True))
        self._columnwise_scale_inv = scales
        self._amax_columnwise = self._amax_rowwise.clone()
