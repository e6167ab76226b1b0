"""torch's own encoders: in inference a layer of theirs is one call of torch's, which reads the parameters of the layers inside, and calls none."""

from __future__ import annotations

from typing import Any

from torch import nn

from fusible.models.convert.swapping import Swapped

__all__ = ["LayerByLayer", "called_in_parts"]


class LayerByLayer(Swapped):
    """A module that calls the layers inside it in inference, too."""

    prefix = ""


def called_in_parts(module: nn.Module) -> dict[str, Any]:
    """The attributes by which a module calls the layers inside it; none where it does so anyway. torch asks for them where it chooses its one call,
    and where it packs padded rows for that."""
    if isinstance(module, nn.TransformerEncoderLayer):
        return {"activation_relu_or_gelu": 0}
    return {"use_nested_tensor": False} if isinstance(module, nn.TransformerEncoder) else {}
