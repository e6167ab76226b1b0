"""Convolutions over any number of spatial dimensions, and their transposes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.errors import ArgumentError, check_switch, expected
from fusible.lazy import dtypes
from fusible.lazy.frontend import Tensor, as_shape, padding_of, steps
from fusible.lazy.locate import shows_user
from fusible.lazy.modules.checks import check_channels, check_sizes, float_dtype
from fusible.lazy.modules.module import Module
from fusible.lazy.modules.parameter import DefaultParameter
from fusible.lazy.ops.convolution import convolution, convolution_transpose

__all__ = ["Conv", "ConvTranspose"]


class _Convolutional(Module):
    """The base of both modules, with the window, one entry per spatial dimension, and the bias."""

    weight: Tensor
    bias: Tensor | None

    @shows_user
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_dims: Sequence[int],
        stride: Sequence[int] | None = None,
        padding: Sequence[Sequence[int]] | None = None,
        dilation: Sequence[int] | None = None,
        groups: int | None = None,
        bias: bool = True,
        dtype: dtypes.dtype = dtypes.float32,
    ) -> None:
        name = type(self).__name__
        check_sizes(name, in_channels=in_channels, out_channels=out_channels)
        self.dtype = float_dtype(name, dtype)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_dims = as_shape(kernel_dims, f"kernel_dims of {name}")
        rank = len(self.kernel_dims)
        self.stride = steps(stride, rank, "stride", name)
        self.padding = padding_of(padding, rank, "padding", name)
        self.dilation = steps(dilation, rank, "dilation", name)
        self.groups = 1 if groups is None else groups
        if self.groups < 1 or in_channels % self.groups or out_channels % self.groups:
            wanted = f"a divisor of {in_channels} and {out_channels}"
            raise ArgumentError(expected(wanted, of=f"groups of {name}", got=groups, do="change one of them"))
        self.weight = DefaultParameter((*self._channels(), *self.kernel_dims), dtype)
        check_switch(bias, f"bias of {name}")
        self.bias = DefaultParameter(out_channels, dtype) if bias else None

    def _channels(self) -> tuple[int, int]:
        """The first two sizes of the weight."""
        raise NotImplementedError

    def _window(self) -> dict[str, Any]:
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}


class Conv(_Convolutional):
    """The cross-correlation of ``x`` with ``weight`` over any number of spatial dimensions, plus ``bias``.

    ``x`` ``[N, in_channels, *spatial]``, ``weight`` ``[out_channels, in_channels / groups, *kernel_dims]`` and ``bias`` ``[out_channels]`` (or None)
    give ``[N, out_channels, *out]`` with ``out = (spatial + before + after - dilation (kernel - 1) - 1) // stride + 1``. ``stride`` and ``dilation``
    (1 by default) are one int per spatial dimension, ``padding`` (zeros, none by default) is one pair ``(before, after)`` for each. All are of
    ``dtype``, a float; 16-bit floats accumulate in float32, bias included, and round once.

    Raises ``ArgumentError`` where ``groups`` does not divide the channels, or for an illegal window.
    """

    def _channels(self) -> tuple[int, int]:
        return self.out_channels, self.in_channels // self.groups

    def forward(self, input: Any) -> Tensor:
        """``[N, in_channels, *spatial]`` to ``[N, out_channels, *out]``; raises ``ShapeError`` for a padded input smaller than the dilated kernel."""
        check_channels("Conv", input, self.in_channels, self.dtype, rank=self.weight.ndim)
        return convolution(input, self.weight, self.bias, **self._window())


class ConvTranspose(_Convolutional):
    """The transpose of a ``Conv``: every element of ``x`` adds a scaled kernel to the result, plus ``bias``.

    ``x`` ``[N, in_channels, *spatial]``, ``weight`` ``[in_channels, out_channels / groups, *kernel_dims]`` and ``bias`` ``[out_channels]`` (or None)
    give ``[N, out_channels, *out]`` with ``out = stride (spatial - 1) + dilation (kernel - 1) + 1 - before - after``: ``padding`` is cut off the
    result. Everything else is as for ``Conv``.
    """

    def _channels(self) -> tuple[int, int]:
        return self.in_channels, self.out_channels // self.groups

    def forward(self, input: Any) -> Tensor:
        """``[N, in_channels, *spatial]`` to ``[N, out_channels, *out]``."""
        check_channels("ConvTranspose", input, self.in_channels, self.dtype, rank=self.weight.ndim)
        return convolution_transpose(input, self.weight, self.bias, **self._window())
