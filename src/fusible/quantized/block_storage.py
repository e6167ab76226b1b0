"""Block-scaled quantized data without autograd. Fields, constructor arguments and their order are those of NVIDIA's storages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch

from fusible import tex
from fusible.errors import ArgumentError, ShapeError, expected
from fusible.quantized.storage import QuantizedTensorStorage
from fusible.tex import DType
from fusible.tex.block_layout import data_shape, scale_shape, used_scales
from fusible.tex.protocol import format_of, logical_shape, outer

__all__ = ["BlockScaledStorage", "Float8BlockwiseQTensorStorage", "MXFP8TensorStorage", "NVFP4TensorStorage"]


class BlockScaledStorage(QuantizedTensorStorage):
    """A row-wise and a column-wise copy, each of data (uint8) and of the scales of its blocks; at least one of the copies is there.

    A subclass names its tensors, in the order in which they are saved, and its options; both are the names of its constructor's arguments, and its
    attributes with an underscore before.
    """

    _TENSORS: ClassVar[tuple[str, ...]] = ("rowwise_data", "columnwise_data", "rowwise_scale_inv", "columnwise_scale_inv")
    _OPTIONS: ClassVar[tuple[str, ...]] = ()

    _rowwise_data: Any
    _rowwise_scale_inv: Any
    _columnwise_data: Any
    _columnwise_scale_inv: Any

    def _hold(self, quantizer: Any, fake_dtype: Any, **fields: Any) -> None:
        self._quantizer = quantizer
        self._dtype = fake_dtype if fake_dtype is not None else torch.float32
        for name, value in fields.items():
            setattr(self, f"_{name}", value)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(logical_shape(self))

    @property
    def dtype(self) -> Any:
        return self._dtype

    @property
    def device(self) -> Any:
        return next(tensor for tensor in self.get_data_tensors() if tensor is not None).device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def get_usages(self) -> dict[str, bool]:
        """Which copies are there: ``{"rowwise": ..., "columnwise": ...}``."""
        return {"rowwise": self._rowwise_data is not None, "columnwise": self._columnwise_data is not None}

    def get_data_tensors(self) -> tuple[Any, Any]:
        """The row-wise and the column-wise data."""
        return self._rowwise_data, self._columnwise_data

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a copy, or make the column-wise one from the row-wise one where both have the scales of the same tiles; None leaves one as it is.

        Any other copy could only be made by quantizing twice. Raises ``ArgumentError`` for that, and where no copy would be left.
        """
        has = self.get_usages()
        asked = {"rowwise": rowwise_usage, "columnwise": columnwise_usage}
        wanted = {way: has[way] if asked[way] is None else asked[way] for way in has}
        of = f"a tensor of {format_of(self)}"
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

    def dequantize(self, *, dtype: Any = None) -> Any:
        """The values in ``dtype`` (default: the nominal dtype)."""
        return tex.dequantize(self, dtype if dtype is not None else self._dtype)

    def quantize_(self, tensor: Any, *, noop_flag: Any = None) -> Self:
        """Overwrite the data with ``tensor``, quantized by this storage's quantizer."""
        tex.quantize(tensor, self._quantizer, self, noop_flag)
        return self

    def copy_from_storage(self, src: Self) -> None:
        """Copy the buffers that both have. Raises ``ArgumentError`` where ``src`` has another class or other options."""
        if type(src) is not type(self) or any(getattr(src, f"_{name}") != getattr(self, f"_{name}") for name in self._OPTIONS):
            raise ArgumentError(expected(f"a {self!r}", of="copy_from_storage", got=repr(src), do="quantize by the same quantizer"))
        for name in self._TENSORS:
            mine, other = getattr(self, f"_{name}"), getattr(src, f"_{name}")
            if mine is not None and other is not None:
                mine.copy_(other)

    def view(self, *shape: Any) -> Any:
        """The same data with other leading dimensions. Raises ``ShapeError`` for another last dimension or number of elements."""
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else tuple(shape)
        have, known = self.shape, math.prod(size for size in wanted if size != -1)
        if -1 in wanted:
            wanted = tuple(have.numel() // max(known, 1) if size == -1 else size for size in wanted)
        if math.prod(wanted) != have.numel() or not wanted or wanted[-1] != have[-1]:
            of = f"a view of a tensor of {format_of(self)} {list(have)}"
            raise ShapeError(expected("the same last dimension and number of elements", of=of, got=list(wanted), do="dequantize it first"))
        fields = self.get_metadata()
        for way in ("rowwise", "columnwise"):
            if fields[f"{way}_data"] is not None:
                fields[f"{way}_data"] = fields[f"{way}_data"].view(data_shape(format_of(self), wanted, way == "columnwise"))
        return type(self)(**fields)

    def get_metadata(self) -> dict[str, Any]:
        """The fields, as the constructor takes them."""
        fields = {name: getattr(self, f"_{name}") for name in (*self._TENSORS, *self._OPTIONS)}
        return {**fields, "quantizer": self._quantizer, "fake_dtype": self._dtype}

    def prepare_for_saving(self) -> tuple[list[Any], Self]:
        """``(tensors, self)`` with the tensors taken out of ``self``; ``restore_from_saved`` puts them back."""
        tensors = [getattr(self, f"_{name}") for name in self._TENSORS]
        self.clear()
        return tensors, self

    def restore_from_saved(self, tensors: list[Any]) -> list[Any]:
        """Take this storage's tensors from the front of ``tensors`` and return the rest."""
        for name, tensor in zip(self._TENSORS, tensors, strict=False):
            setattr(self, f"_{name}", tensor)
        return tensors[len(self._TENSORS) :]

    def clear(self) -> None:
        """Drop the tensors."""
        for name in self._TENSORS:
            setattr(self, f"_{name}", None)

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

    _OPTIONS = ("fp8_dtype", "is_2D_scaled")

    _fp8_dtype: Any
    _is_2D_scaled: bool

    def __init__(
        self,
        rowwise_data: Any,
        rowwise_scale_inv: Any,
        columnwise_data: Any,
        columnwise_scale_inv: Any,
        fp8_dtype: Any,
        quantizer: Any,
        is_2D_scaled: bool,
        *,
        fake_dtype: Any = None,
    ) -> None:
        copies = {"rowwise_data": rowwise_data, "rowwise_scale_inv": rowwise_scale_inv}
        copies |= {"columnwise_data": columnwise_data, "columnwise_scale_inv": columnwise_scale_inv}
        self._hold(quantizer, fake_dtype, **copies, fp8_dtype=DType(fp8_dtype), is_2D_scaled=is_2D_scaled)

    @property
    def _tiled(self) -> bool:
        return self._is_2D_scaled

    def _make_columnwise(self) -> None:
        rows, columns = used_scales("block", self.shape, False, True)
        scales = self._rowwise_scale_inv
        turned = scales.new_zeros(scale_shape("block", self.shape, True, True))
        turned[:columns, :rows] = scales[:rows, :columns].t()
        self._columnwise_data = tex.fp8_transpose(self._rowwise_data, self._fp8_dtype, out=None)
        self._columnwise_scale_inv = turned


class MXFP8TensorStorage(BlockScaledStorage):
    """FP8 with one power of two per 32 elements: value = data read as ``_fp8_dtype``, times ``2^(s - 127)`` of its block's byte ``s``.

    ``_rowwise_data`` and ``_columnwise_data``: uint8 ``[*leading, K]``, neither transposed. With ``M`` the product of ``leading``, the scales are
    uint8 ``[M, K / 32]``, padded to multiples of ``[128, 4]``, and ``[M / 32, K]``, padded to multiples of ``[4, 128]``; with
    ``_with_gemm_swizzled_scales`` they lie in the order that tensor cores read.
    """

    _OPTIONS = ("fp8_dtype", "with_gemm_swizzled_scales")

    _fp8_dtype: Any
    _with_gemm_swizzled_scales: bool

    def __init__(
        self,
        rowwise_data: Any,
        rowwise_scale_inv: Any,
        columnwise_data: Any,
        columnwise_scale_inv: Any,
        fp8_dtype: Any,
        quantizer: Any,
        with_gemm_swizzled_scales: bool,
        *,
        fake_dtype: Any = None,
    ) -> None:
        copies = {"rowwise_data": rowwise_data, "rowwise_scale_inv": rowwise_scale_inv}
        copies |= {"columnwise_data": columnwise_data, "columnwise_scale_inv": columnwise_scale_inv}
        self._hold(quantizer, fake_dtype, **copies, fp8_dtype=DType(fp8_dtype), with_gemm_swizzled_scales=with_gemm_swizzled_scales)


class NVFP4TensorStorage(BlockScaledStorage):
    """E2M1 with one E4M3 scale per 16 elements: value = element times its block's scale, times ``amax / (6 * e4m3_max)``.

    ``_rowwise_data``: uint8 ``[*leading, K / 2]``, two elements to a byte, the even one low; ``_columnwise_data``: uint8 ``[K, *leading]`` packed
    along its last dimension. With ``M`` the product of ``leading``, the scales are uint8 ``[M, K / 16]`` and ``[K, M / 16]``, padded to multiples of
    ``[128, 4]``. ``_amax_rowwise`` and ``_amax_columnwise``: fp32 ``[1]``, or ``[M]`` and ``[K]`` where ``_row_scaled_nvfp4``. ``_nvfp4_e4m3_max`` is
    448, or 256 where ``_nvfp4_use_4over6`` says so.
    """

    _TENSORS = (*BlockScaledStorage._TENSORS, "amax_rowwise", "amax_columnwise")
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
        rowwise_data: Any,
        rowwise_scale_inv: Any,
        columnwise_data: Any,
        columnwise_scale_inv: Any,
        amax_rowwise: Any,
        amax_columnwise: Any,
        fp4_dtype: Any,
        quantizer: Any,
        with_gemm_swizzled_scales: bool,
        *,
        fake_dtype: Any = None,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
    ) -> None:
        copies = {"rowwise_data": rowwise_data, "rowwise_scale_inv": rowwise_scale_inv, "amax_rowwise": amax_rowwise}
        copies |= {"columnwise_data": columnwise_data, "columnwise_scale_inv": columnwise_scale_inv, "amax_columnwise": amax_columnwise}
        options = {"row_scaled_nvfp4": row_scaled_nvfp4, "nvfp4_use_4over6": nvfp4_use_4over6}
        options |= {"nvfp4_e4m3_max": nvfp4_e4m3_max if nvfp4_use_4over6 else 448, "with_gemm_swizzled_scales": with_gemm_swizzled_scales}
        self._hold(quantizer, fake_dtype, **copies, **options, fp4_dtype=DType(fp4_dtype))

    @property
    def _tiled(self) -> bool:
        quantizer = self._quantizer
        return quantizer is not None and quantizer.with_2d_quantization and not quantizer.with_rht and not self._with_gemm_swizzled_scales

    def _make_columnwise(self) -> None:
        rows, columns = outer(self.shape), self.shape[-1]
        scales = self._rowwise_scale_inv.new_zeros(scale_shape("nvfp4", self.shape, True, True))
        tex.nvfp4_2d_scale_transpose(self._rowwise_scale_inv, scales, rows // 16, columns // 16)
        data = tex.nvfp4_data_transpose(self._rowwise_data.view(rows, columns // 2), out=None)
        self._columnwise_data = data.view(data_shape("nvfp4", self.shape, True))
        self._columnwise_scale_inv = scales
        self._amax_columnwise = self._amax_rowwise.clone()
