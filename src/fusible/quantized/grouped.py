"""Many tensors in one buffer: the experts of a mixture, quantized or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from fusible import tex
from fusible.errors import ArgumentError, DTypeError, NotServedError, ShapeError, expected
from fusible.quantized.arguments import (
    Count,
    Dense,
    Device,
    HostSizes,
    MemberShapes,
    NoopFlag,
    Saved,
    Size,
    Sizes,
    SizesOfMembers,
    Sources,
    check_methods,
)
from fusible.quantized.gathered import check_saved
from fusible.quantized.group_buffers import check_sources, empty_buffers, empty_member
from fusible.quantized.quantizer import Quantizer
from fusible.quantized.saving import register_saved
from fusible.quantized.shapes import size_of
from fusible.tex.calls.grouped import group_arguments, layout_of, layout_of_grouped, members, register_grouped_factory
from fusible.tex.formats import NVFP4_OPTIONS, scaling, scheme_of
from fusible.tex.formulas.arrays import Array

__all__ = ["GROUPED_BUFFERS", "GroupedTensorStorage", "kind_of_grouped"]

GROUPED_BUFFERS = (
    "rowwise_data",
    "columnwise_data",
    "scale_inv",
    "columnwise_scale_inv",
    "amax",
    "columnwise_amax",
    "scale",
    "first_dims",
    "last_dims",
    "tensor_offsets",
)
_DESCRIBING = ("scale", "first_dims", "last_dims", "tensor_offsets")


class GroupedTensorStorage:
    """``num_tensors`` tensors of one dtype and one quantizer in flat buffers, one after the other or at ``tensor_offsets`` (in elements).

    ``shape``: the logical shape ``[rows, columns]`` of all members stacked. ``first_dims`` and ``last_dims``: int64 ``[num_tensors]``, the members'
    rows and columns, each None where all have the same; ``tensor_offsets``: int64 ``[num_tensors + 1]`` or None. ``shapes`` (later
    ``tensor_shapes``) gives the members' shapes to the host. ``data``: row-wise, ``columnwise_data``: column-wise, both ``[elements]``;
    ``scale_inv``, ``amax`` and their column-wise twins: those of the members, one after the other. Without a ``quantizer`` the data is of
    ``dtype``. The buffers are shared with the members that ``split_into_quantized_tensors`` gives, and with a ``copy``.
    """

    _TENSORS: ClassVar[dict[str, str]] = group_arguments({name: name for name in GROUPED_BUFFERS}, None)
    _PARTS: ClassVar[dict[str, str]] = {}
    _OPTIONS: ClassVar[tuple[str, ...]] = ("num_tensors", "shapes", *NVFP4_OPTIONS, "with_gemm_swizzled_scales")

    rowwise_data: Any
    columnwise_data: Any
    scale_inv: Any
    columnwise_scale_inv: Any
    amax: Any
    columnwise_amax: Any
    scale: Any
    first_dims: Any
    last_dims: Any
    tensor_offsets: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_methods(cls)

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        num_tensors: int,
        shapes: Sequence[Sequence[int]] | None = None,
        quantizer: Any = None,
        data: Array | None = None,
        columnwise_data: Array | None = None,
        scale_inv: Array | None = None,
        columnwise_scale_inv: Array | None = None,
        amax: Array | None = None,
        columnwise_amax: Array | None = None,
        scale: Array | None = None,
        first_dims: Array | None = None,
        last_dims: Array | None = None,
        tensor_offsets: Array | None = None,
        offsets: Sequence[int] | None = None,
        scale_inv_offsets: Sequence[int] | None = None,
        columnwise_scale_inv_offsets: Sequence[int] | None = None,
        requires_grad: bool = False,
        stride: Sequence[int] | None = None,
        with_gemm_swizzled_scales: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
    ) -> None:
        self.logical_shape = tuple(shape)
        self.fake_dtype = dtype
        self.num_tensors = num_tensors
        self.tensor_shapes = [tuple(member) for member in shapes] if shapes is not None else None
        self.quantizer = quantizer
        self._take([data, columnwise_data, scale_inv, columnwise_scale_inv, amax, columnwise_amax, scale, first_dims, last_dims, tensor_offsets])
        self.offsets = offsets
        self.scale_inv_offsets = scale_inv_offsets
        self.columnwise_scale_inv_offsets = columnwise_scale_inv_offsets
        self.quantized_tensors: list[Any] | None = None
        self._with_gemm_swizzled_scales = with_gemm_swizzled_scales
        self.row_scaled_nvfp4 = row_scaled_nvfp4
        self.nvfp4_use_4over6 = nvfp4_use_4over6
        self.nvfp4_e4m3_max = nvfp4_e4m3_max

    @classmethod
    def make_grouped_tensor_from_rowwise_data(
        cls, *, num_tensors: Count, tensor_shape: Sizes, rowwise_data: Dense, dtype: torch.dtype | None = None, internal: bool = False
    ) -> GroupedTensorStorage:
        """``num_tensors`` unquantized members of ``tensor_shape``, ``[rows, columns]`` or ``[n]``, one after the other in ``rowwise_data``, whose
        dtype theirs is; ``internal`` asks for a bare storage. Raises ``ShapeError`` for another number of elements."""
        member, of = tuple(tensor_shape), f"of {cls.__name__}.make_grouped_tensor_from_rowwise_data"
        if len(member) not in (1, 2):
            raise ShapeError(expected("[rows, columns] or [n]", of=f"tensor_shape {of}", got=[*member], do="pass the shape of one member"))
        elements = num_tensors * math.prod(member)
        if rowwise_data.numel() != elements:
            wanted, got = f"{elements} elements, of {num_tensors} members {list(member)}", rowwise_data.numel()
            raise ShapeError(expected(wanted, of=f"rowwise_data {of}", got=got, do="pass their buffer"))
        if dtype is not None and dtype is not rowwise_data.dtype:
            raise DTypeError(expected(f"{dtype}, which dtype says", of=f"rowwise_data {of}", got=rowwise_data.dtype, do="cast it"))
        rows, columns = member if len(member) == 2 else (*member, 1)
        made, data = GroupedTensorStorage if internal else cls, rowwise_data.contiguous().view(-1)
        return made((num_tensors * rows, columns), data.dtype, num_tensors=num_tensors, shapes=[member] * num_tensors, data=data)

    @staticmethod
    def make_tensor_offsets(split_dims: SizesOfMembers, common_dim: Size) -> torch.Tensor:
        """int64 ``[members + 1]``: where each member begins, in elements, and where the last one ends; ``split_dims``: their sizes in one dimension,
        ``common_dim`` that in the other."""
        dims = split_dims.to(torch.int64)  # elements may be more than the type of the rows can count
        return torch.cat([dims.new_zeros(1), (dims * common_dim).cumsum(0)])

    @classmethod
    def make_grouped_tensor(
        cls,
        num_tensors: Count,
        first_dims: HostSizes | None,
        last_dims: HostSizes | None,
        logical_first_dim: Size,
        logical_last_dim: Size,
        quantizer: Quantizer | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> GroupedTensorStorage:
        """``num_tensors`` members of unspecified values, as ``quantizer`` makes them, or of ``dtype`` where there is none.

        ``first_dims`` and ``last_dims``: int64 ``[num_tensors]``, their rows and columns, or None where all have the same: then
        ``logical_first_dim / num_tensors`` rows of ``logical_last_dim`` columns, or what the other leaves of ``[logical_first_dim,
        logical_last_dim]``. Reads them on the host. ``device`` defaults to the CPU. Raises ``ArgumentError`` without a dtype, ``ShapeError`` where
        the members do not fit.
        """
        if quantizer is None and dtype is None:
            raise ArgumentError(expected("a dtype", of="an unquantized grouped tensor", got="none", do="give one, or a quantizer"))
        layout = layout_of((logical_first_dim, logical_last_dim), num_tensors, first_dims, last_dims)
        device = torch.device(device if device is not None else "cpu")
        offsets = None if first_dims is None and last_dims is None else torch.tensor([*layout.offsets, layout.total], device=device)
        described = {"num_tensors": num_tensors, "first_dims": first_dims, "last_dims": last_dims, "tensor_offsets": offsets}
        described |= {"shapes": layout.shapes, "offsets": [*layout.offsets, layout.total], "quantizer": quantizer}
        buffers = empty_buffers(quantizer, layout, dtype, device)
        made = cls((logical_first_dim, logical_last_dim), dtype or torch.float32, **described, **buffers)
        made.quantized_tensors = made.split_into_quantized_tensors()
        return made

    @classmethod
    def make_grouped_tensor_with_shapes(
        cls,
        num_tensors: Count,
        shapes: MemberShapes,
        quantizer: Quantizer | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> GroupedTensorStorage:
        """``make_grouped_tensor`` of members of these shapes. Raises ``ShapeError`` unless there are ``num_tensors`` of them."""
        if len(shapes) != num_tensors:
            of = f"shapes of {cls.__name__}.make_grouped_tensor_with_shapes"
            raise ShapeError(expected(f"{num_tensors}, which num_tensors says", of=of, got=len(shapes), do="pass one for each member"))
        rows, columns = ([shape[i] for shape in shapes] for i in (0, 1))
        first, last = (None if len(set(dims)) == 1 else torch.tensor(dims, device=device) for dims in (rows, columns))
        if first is not None and last is not None:
            logical = 1, sum(row * column for row, column in shapes)
        else:
            logical = rows[0] if last is not None else sum(rows), columns[0] if last is None else sum(columns)
        return cls.make_grouped_tensor(num_tensors, first, last, *logical, quantizer, device, dtype)

    @property
    def device(self) -> Any:
        found = next((buffer for buffer in self.get_data_tensors() if buffer is not None), None)
        if found is None:
            raise ArgumentError(expected("data", of=f"device of a {type(self).__name__}", got="none", do="use it before it is cleared"))
        return found.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fake_dtype

    def get_dtype(self) -> torch.dtype:
        """The nominal dtype."""
        return self.fake_dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.logical_shape)

    def size(self, dim: int | None = None) -> Any:
        return size_of(self.logical_shape, dim, type(self).__name__)

    def get_usages(self) -> dict[str, bool]:
        """Which copies are there: ``{"rowwise": ..., "columnwise": ...}``."""
        return {"rowwise": self.rowwise_data is not None, "columnwise": self.columnwise_data is not None}

    def has_data(self) -> bool:
        return self.rowwise_data is not None

    def has_columnwise_data(self) -> bool:
        return self.columnwise_data is not None

    def all_same_first_dim(self) -> bool:
        return self.first_dims is None

    def all_same_last_dim(self) -> bool:
        return self.last_dims is None

    def all_same_shape(self) -> bool:
        return self.first_dims is None and self.last_dims is None

    def varying_both_dims(self) -> bool:
        return self.first_dims is not None and self.last_dims is not None

    def get_common_first_dim(self) -> int:
        """The rows that every member has."""
        if self.first_dims is not None:
            raise ArgumentError(expected("members of equal rows", of="get_common_first_dim", got="first_dims", do="read first_dims"))
        if not self.num_tensors:
            raise ArgumentError(expected("members", of="get_common_first_dim", got="none", do="call it before the grouped tensor is cleared"))
        return self.logical_shape[0] // self.num_tensors if self.last_dims is None else self.logical_shape[0]

    def get_common_last_dim(self) -> int:
        """The columns that every member has."""
        if self.last_dims is not None:
            raise ArgumentError(expected("members of equal columns", of="get_common_last_dim", got="last_dims", do="read last_dims"))
        return self.logical_shape[1]

    def split_into_quantized_tensors(self) -> list[Any]:
        """The members: views where unquantized, else quantized tensors of the quantizer's class. Reads the dimensions on the host."""
        if self.tensor_shapes is None:
            layout = layout_of_grouped(self)
            self.tensor_shapes, self.offsets = [*layout.shapes], [*layout.offsets, layout.total]
        found = members(self, empty_member)
        return [member.view(shape) for member, shape in zip(found, self.tensor_shapes, strict=True)] if self.quantizer is None else found

    def dequantize(self, *, dtype: torch.dtype | None = None) -> GroupedTensorStorage:
        """The unquantized grouped tensor, in ``dtype`` (default: the nominal dtype), with data of its own."""
        dtype = dtype if dtype is not None else self.fake_dtype
        if self.quantizer is not None:
            return tex.group_dequantize(self, dtype)
        if self.rowwise_data is None:
            raise ArgumentError(expected("data", of=f"{type(self).__name__}.dequantize", got="none", do="use it before it is cleared"))
        return GroupedTensorStorage(**{**self.get_metadata(), "data": self.rowwise_data.to(dtype, copy=True), "dtype": dtype})

    def quantize(self, tensors: Sources, noop_flag: NoopFlag | None = None) -> tuple[Any, ...]:
        """Quantize one tensor into each member, in place; returns the members. Nothing is written where ``noop_flag[0] == 1``, nor where a tensor is
        refused: ``ShapeError`` or ``DTypeError`` for one that its member cannot take."""
        found = self.split_into_quantized_tensors()
        own = self.fake_dtype if self.quantizer is None else None
        check_sources(tensors, found, own, f"{type(self).__name__}.quantize")
        for tensor, member in zip(tensors, found, strict=True):
            if self.quantizer is not None:
                member.quantize_(tensor, noop_flag=noop_flag)  # by the copies that there are, whichever the quantizer asks for
                continue
            values = tensor if isinstance(tensor, torch.Tensor) else tensor.dequantize()
            member.copy_(values if noop_flag is None else torch.where(noop_flag.reshape(()) == 1, member, values.to(member)))
        return tuple(found)

    def copy(self) -> GroupedTensorStorage:
        """Another description of the same buffers."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def get_data_tensors(self) -> tuple[Any, ...]:
        """Every tensor field, in the order in which it is saved."""
        return tuple(getattr(self, name) for name in GROUPED_BUFFERS)

    def get_metadata(self) -> dict[str, Any]:
        """The fields, as the constructor takes them; of the members' shapes those that the host was given, and never what it read of a tensor."""
        shapes = self.tensor_shapes if self.all_same_shape() else None
        described = {"shape": self.logical_shape, "dtype": self.fake_dtype, "num_tensors": self.num_tensors, "shapes": shapes}
        buffers = group_arguments({name: getattr(self, name) for name in GROUPED_BUFFERS}, self)
        return described | buffers | {"quantizer": self.quantizer, "with_gemm_swizzled_scales": self._with_gemm_swizzled_scales}

    def prepare_for_saving(self) -> tuple[list[Any], GroupedTensorStorage]:
        """``(tensors, self)`` with the tensors taken out of ``self``; ``restore_from_saved`` puts them back."""
        tensors = [*self.get_data_tensors()]
        self._take([None] * len(GROUPED_BUFFERS))
        self.quantized_tensors = None
        return tensors, self

    def restore_from_saved(self, tensors: Saved) -> list[Any]:
        """Take this storage's tensors from the front of ``tensors`` and return the rest."""
        check_saved(self, tensors)
        self._take(tensors)
        return tensors[len(GROUPED_BUFFERS) :]

    def _take(self, tensors: Sequence[Any]) -> None:
        for name, tensor in zip(GROUPED_BUFFERS, tensors, strict=False):
            setattr(self, name, tensor)
        self._share_buffers()

    def _share_buffers(self) -> None:
        """One buffer under two names, where a member has one attribute for both: FP8's scale, whichever copy of the data it scales. What is written
        to a member is then written under either name."""
        if self.scale_inv is not None and self.columnwise_scale_inv is not None and scheme_of(self.quantizer).per_tensor:
            self.columnwise_scale_inv = self.scale_inv

    @property
    def _saved_shape(self) -> tuple[int, ...]:
        """The shape that the constructor takes."""
        return self.logical_shape

    def _check_buffers(self, shape: Sequence[int]) -> str | None:
        """Why the buffers cannot be those of the members that are described, or None."""
        try:
            layout = layout_of_grouped(self)
            wanted = empty_buffers(self.quantizer, layout, self.fake_dtype, "meta")
        except (ArgumentError, DTypeError, NotServedError) as error:
            return str(error)
        for argument, name in self._TENSORS.items():
            buffer, like = getattr(self, name), wanted.get(argument)
            if buffer is not None and name not in _DESCRIBING and like is not None and (buffer.numel(), buffer.dtype) != (like.numel(), like.dtype):
                return f"{buffer.dtype} {list(buffer.shape)} as {argument}"
        return None if self.has_data() or self.has_columnwise_data() else "no data"

    def clear(self) -> None:
        """Drop everything."""
        self._take([None] * len(GROUPED_BUFFERS))
        self.logical_shape, self.num_tensors, self.tensor_shapes = (0, 0), 0, []
        self.quantizer = self.quantized_tensors = None
        self.offsets = self.scale_inv_offsets = self.columnwise_scale_inv_offsets = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_tensors} in {list(self.logical_shape)}, {self.fake_dtype}, {self.quantizer})"


check_methods(GroupedTensorStorage)


def _make_grouped(like: Quantizer | None, /, **fields: Any) -> GroupedTensorStorage:
    return GroupedTensorStorage(fields.pop("shape"), fields.pop("dtype"), **fields)


def kind_of_grouped(x: GroupedTensorStorage) -> tuple[Any, ...]:
    """What dispatch sees of a grouped tensor."""
    buffer = x.rowwise_data if x.rowwise_data is not None else x.columnwise_data
    device = buffer.device.type if isinstance(buffer, torch.Tensor) else "lazy"
    return "grouped", scaling(x.quantizer), device, x.fake_dtype


for _class in (Quantizer, type(None)):
    register_grouped_factory(_class, _make_grouped)
tex.register_kind(GroupedTensorStorage, kind_of_grouped)
register_saved(GroupedTensorStorage)
