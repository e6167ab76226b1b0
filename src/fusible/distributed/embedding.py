"""Embeddings of a model that is laid out: such as all processes have alike, and such as share out their vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fusible.errors import NotServedError, OutOfRangeError, expected
from fusible.pytorch.engine.parametrized import parameter_of
from fusible.pytorch.engine.shares import Share, localized

__all__ = ["VocabularyEmbedding", "WholeEmbedding"]


class _Laid(nn.Embedding):
    """``nn.Embedding`` whose weight is a ``DTensor``; ``share``: how this process holds it, and what becomes of its gradient."""

    share: Share

    @classmethod
    def take(cls, module: nn.Embedding, share: Share) -> None:
        """Make ``module`` one of this class."""
        module.__class__ = cls
        module.share = share  # type: ignore[assignment]

    def _local(self) -> torch.Tensor:
        (weight,) = localized([(self, self.share)])
        return weight


class WholeEmbedding(_Laid):
    """Every process has the weight whole."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        options = self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        return nn.functional.embedding(input, self._local(), *options)


class VocabularyEmbedding(_Laid):
    """The processes share out the rows of the weight, one for each token: each embeds its tokens, and the others' as 0; all add up what they have."""

    @staticmethod
    def check(module: nn.Embedding) -> None:
        """Raise ``NotServedError`` for an embedding whose tokens depend on one another."""
        options = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, name)]
        if options:
            of, got = "an Embedding that is parallelized along 'tp'", repr(getattr(module, options[0]))
            raise NotServedError(expected(f"no {options[0]}", of=of, got=got, do="leave it out"))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.is_cpu and input.numel() and not torch.compiler.is_compiling():  # elsewhere the answer would be waited for
            self._check_tokens(input)
        parameter: Any = parameter_of(self, "weight")
        weight, mesh = self._local(), _along_shards(parameter)
        first = mesh.get_local_rank() * -(-self.num_embeddings // mesh.size())  # as torch shares out rows
        local = input - first
        own = (local >= 0) & (local < weight.shape[0])
        padding = None if self.padding_idx is None or not 0 <= self.padding_idx - first < weight.shape[0] else self.padding_idx - first
        rows = weight if weight.shape[0] else nn.functional.pad(weight, (0, 0, 0, 1))  # of few tokens the last processes have none
        y = nn.functional.embedding(local.where(own, 0), rows, padding).where(own[..., None], 0.0)
        summed: Any = DTensor.from_local(y, mesh, (Partial(),), run_check=False).redistribute(placements=(Replicate(),))
        return summed.to_local()  # type: ignore[no-any-return]

    def _check_tokens(self, input: torch.Tensor) -> None:
        """Raise ``OutOfRangeError`` for a token that is in no process's rows, as in ``nn.Embedding``."""
        least, most = (int(each) for each in input.aminmax())
        if least < 0 or most >= self.num_embeddings:
            got, do = least if least < 0 else most, "give tokens of its vocabulary"
            raise OutOfRangeError(expected(f"tokens from 0 to {self.num_embeddings - 1}", of="an Embedding", got=got, do=do))


def _along_shards(parameter: DTensor) -> DeviceMesh:
    """The processes that share the rows out."""
    mesh = parameter.device_mesh
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[parameter.placements.index(Shard(0))]]  # type: ignore[index]
