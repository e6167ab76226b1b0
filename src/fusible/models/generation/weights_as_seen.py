"""What tells one state of a model's weights from another, without reading them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

__all__ = ["weights_as_seen"]


def weights_as_seen(model: object) -> tuple[tuple[int, int | None], ...]:
    """The addresses and versions of all parameters and buffers: others where one was replaced, or written so that torch counts it. Of a model that is
    no module, nothing."""
    if not isinstance(model, nn.Module):
        return ()
    held = [plain for tensors in (model.parameters(), model.buffers()) for tensor in tensors for plain in _plain(tensor)]
    return tuple([(x.data_ptr(), None if x.is_inference() else x._version) for x in held])


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors of memory that a tensor, maybe a quantized one, consists of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # pyright: ignore[reportAttributeAccessIssue] - as torch asks subclasses of tensors for it
        yield from _plain(getattr(tensor, name))
