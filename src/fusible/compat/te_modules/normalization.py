"""``LayerNorm`` and ``RMSNorm``: the operations, with NVIDIA's older arguments beside theirs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fusible.compat.te_modules.base import device_of
from fusible.compat.te_modules.fast_setattr import FastSetattr
from fusible.errors import ArgumentError, expected
from fusible.pytorch import ops

__all__ = ["LayerNorm", "RMSNorm", "qk_norm"]


class _Normalization(FastSetattr):
    """Mixin of both: takes former names of arguments, ``params_dtype`` for ``dtype`` and ``hidden_size`` for ``normalized_shape``."""

    sequence_parallel: bool | None

    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        of = type(self).__name__
        if (normalized_shape is None) == (hidden_size is None):
            got = "both" if normalized_shape is not None else "neither"
            raise ArgumentError(expected("normalized_shape, or hidden_size as it was called", of=of, got=got, do="pass normalized_shape"))
        if params_dtype is not None:
            if "dtype" in kwargs:
                raise ArgumentError(expected("dtype, or params_dtype as it was called", of=of, got="both", do="pass dtype"))
            kwargs["dtype"] = params_dtype
        kwargs["device"] = device_of(kwargs.get("device"))
        shape: Any = hidden_size if normalized_shape is None else normalized_shape
        options: dict[str, Any] = {"eps": eps, "zero_centered_gamma": zero_centered_gamma, "sequence_parallel": sequence_parallel, **kwargs}
        super().__init__(shape, **options)  # pyright: ignore[reportCallIssue] - the operation's, which stands behind this among the bases
        self.sequence_parallel = sequence_parallel

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """In the precision of the weight, as in NVIDIA's package, where no ``torch.autocast`` says another."""
        dtype = self.weight.dtype  # pyright: ignore[reportAttributeAccessIssue] - the operation's
        if isinstance(input, torch.Tensor) and input.dtype is not dtype and not torch.is_autocast_enabled(input.device.type):
            input = input.to(dtype)
        return super().forward(input, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue] - the operation's


class LayerNorm(_Normalization, ops.LayerNorm):
    """Layer normalization (see ``fusible.pytorch.ops.LayerNorm``): ``weight`` and ``bias`` of ``normalized_shape``.

    ``sequence_parallel`` becomes an attribute of the parameters, where it is not None. ``hidden_size`` and ``params_dtype`` are former names of
    ``normalized_shape`` and ``dtype``. The output has the weight's dtype, to which an input of another is cast.
    """


class RMSNorm(_Normalization, ops.RMSNorm):
    """Root-mean-square normalization (see ``fusible.pytorch.ops.RMSNorm``): ``weight`` of ``normalized_shape``. Options are ``LayerNorm``'s."""


def qk_norm(
    kind: str | None, width: int, eps: float, dtype: torch.dtype | None, device: torch.device | str
) -> tuple[nn.Module | None, nn.Module | None]:
    """The normalizations of q's and of k's heads; None where there are none."""
    if kind is None:
        return None, None
    if kind == "L2Normalization":
        both = ops.L2Normalization(eps=eps)
        return both, both
    made = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}.get(kind)
    if made is None:
        what = "None, 'L2Normalization', 'RMSNorm' or 'LayerNorm'"
        raise ArgumentError(expected(what, of="qk_norm_type of MultiheadAttention", got=repr(kind), do="name one of these"))
    return made(width, eps=eps, params_dtype=dtype, device=device), made(width, eps=eps, params_dtype=dtype, device=device)
