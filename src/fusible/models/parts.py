"""What a family says of its models: the parts of a block in order, each with the names that a checkpoint has for its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from fusible import pytorch
from fusible.models.gated_sum import GatedSum
from fusible.models.latent_attention import MultiHeadLatentAttention
from fusible.models.parallel_residual import ParallelResidual
from fusible.models.side_by_side import SideBySide
from fusible.pytorch.modules.linear import default_weight_init_method
from fusible.pytorch.quantized_parameters import hold_parameters

__all__ = [
    "Activation",
    "Attention",
    "Blueprint",
    "CrossAttention",
    "Experts",
    "HeadNorm",
    "LatentAttention",
    "Norm",
    "Parallel",
    "Part",
    "Product",
    "Residual",
    "SharedExpert",
    "Weights",
    "stored_in",
]


class Weights(Protocol):
    """Where parts take their parameters from."""

    @property
    def dtype(self) -> torch.dtype: ...

    def values(self, name: str, shape: tuple[int, ...], initial: torch.Tensor | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The parameter of a name; of one that is quantized the values. ``initial``: what a new model has in it, where that is not drawn. ``dtype``:
        in the place of the model's."""
        ...

    def weights(self, names: Sequence[str], shapes: Sequence[tuple[int, int]], transposed: bool = False) -> list[torch.Tensor]:
        """The matrices of ``names``, quantized ones as they are: as one, on top of one another, or each by itself where none has the values of all.

        ``transposed``: the checkpoint has ``[columns, rows]``.
        """
        ...

    def vector(self, names: Sequence[str], sizes: Sequence[int], initial: float = 0.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The vectors ``names``, one behind the other. ``initial``: what a new model has in them. ``dtype``: of ``matrix``."""
        ...

    def stack(self, names: Sequence[Sequence[str]], shape: tuple[int, int]) -> torch.Tensor:
        """``[len(names), rows, columns]``: for each of ``names`` its matrices of ``shape``, one on top of the other; of quantized ones the values."""
        ...

    def quantized(self, names: Sequence[Sequence[str]], shape: tuple[int, int]) -> list[torch.Tensor] | None:
        """For each of ``names`` its matrices of ``shape``, one on top of the other, where they are quantized and stay so; None else."""
        ...

    def finish(self, module: nn.Module) -> nn.Module:
        """``module`` with its weights as the model holds them: as they are, or in the number format of a recipe."""
        ...


class Part(Protocol):
    """A part of a block: makes its module from a checkpoint's parameters, and tells what a checkpoint has of a module that it made."""

    def made(self, weights: Weights) -> nn.Module: ...

    def stored(self, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters of ``module`` by the checkpoint's names, in its shapes."""
        ...


def stored_in(parts: Sequence[Part], modules: Iterable[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint has of ``modules``, each of which one of ``parts`` made."""
    for part, module in zip(parts, modules, strict=True):
        yield from part.stored(module)


def _keep_zero(layer: Any, there: torch.Tensor) -> None:
    """Let rows of a layer's bias that no checkpoint has, where ``there`` is False, get gradients of 0: an optimizer leaves them at 0."""
    layer.bias.register_hook(lambda gradient: gradient * there.to(gradient.device))


class _InitialValue:
    """An initializer that gives ``tensor`` in the place of the one it is asked to fill, once: a module keeps initializers, and must keep no second
    copy of its weights. Afterwards it fills by ``drawn``."""

    def __init__(self, tensor: torch.Tensor, drawn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._drawn = drawn

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        given, self._tensor = self._tensor, None
        return self._drawn(x) if given is None else given


@dataclass(frozen=True)
class Norm:
    """``kind``: ``RMSNorm``, whose weight is ``name.weight``, or ``LayerNorm``, which also has ``name.bias``. ``zero_centered``: 1 is added to the
    weight."""

    name: str
    features: int
    eps: float
    kind: type[nn.Module] = pytorch.RMSNorm
    zero_centered: bool = False

    def made(self, weights: Weights) -> nn.Module:
        options = {"zero_centered_gamma": self.zero_centered, "param_dtype": weights.dtype, "device": "meta"}
        module = self.kind(self.features, eps=self.eps, **options)
        initial = {"weight": 0.0 if self.zero_centered else 1.0, "bias": 0.0}
        names = [name for name, _ in module.named_parameters()]
        module.load_state_dict({name: weights.vector([f"{self.name}.{name}"], [self.features], initial[name]) for name in names}, assign=True)
        return module

    def stored(self, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((f"{self.name}.{name}", parameter) for name, parameter in module.named_parameters())


@dataclass(frozen=True)
class Product:
    """``x @ weight.T``, and a ``bias``: the layers ``names`` of ``rows`` outputs each as one, of ``columns`` inputs.

    ``bias``: whether each has one, as ``name.bias``; or the names of theirs, None for a layer without, whose part of the bias is 0 and stays so.
    ``transposed``: the checkpoint has the weight as ``[columns, rows]``. ``high_precision``: no recipe quantizes it.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    bias: bool | tuple[str | None, ...] = False
    transposed: bool = False
    high_precision: bool = False

    @property
    def bias_names(self) -> tuple[str | None, ...]:
        """Of each layer the name of its bias; none at all where no layer has one."""
        if isinstance(self.bias, tuple):
            return self.bias
        return tuple(f"{name}.bias" for name in self.names) if self.bias else ()

    def made(self, weights: Weights) -> nn.Module:
        shapes = [(rows, self.columns) for rows in self.rows]
        matrices = weights.weights([f"{name}.weight" for name in self.names], shapes, self.transposed)
        bias, names = self.biases(weights), self.bias_names
        if len(matrices) == 1:
            layer = self.of(matrices[0], bias, weights)
            if None in names:
                there = [torch.full((rows,), name is not None, device="cpu") for name, rows in zip(names, self.rows, strict=True)]
                _keep_zero(layer, torch.cat(there))
            return layer
        biases = [None] * len(matrices) if bias is None else list(bias.split(list(self.rows)))
        if None in names:
            biases = [None if name is None else part for name, part in zip(names, biases, strict=True)]
        return SideBySide(*(self.of(matrix, of_it, weights) for matrix, of_it in zip(matrices, biases, strict=True)))

    def biases(self, weights: Weights) -> torch.Tensor | None:
        """The biases of all layers, one behind the other."""
        names = self.bias_names
        if None not in names:
            return weights.vector([name for name in names if name is not None], self.rows) if names else None
        there = {name: weights.vector([name], [rows]) for name, rows in zip(names, self.rows, strict=True) if name is not None}
        like = next(iter(there.values()))
        return torch.cat([like.new_zeros(rows) if name is None else there[name] for name, rows in zip(names, self.rows, strict=True)])

    def of(self, matrix: torch.Tensor, bias: torch.Tensor | None, weights: Weights) -> nn.Module:
        """The layer with these parameters."""
        linear = pytorch.Linear(
            self.columns,
            matrix.shape[0],
            bias is not None,
            param_dtype=weights.dtype,
            weight_init_method=_InitialValue(matrix, default_weight_init_method),
            bias_init_method=None if bias is None else _InitialValue(bias, nn.init.zeros_),
            high_precision=self.high_precision,
        )
        return linear if self.high_precision else weights.finish(linear)

    def stored(self, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        layers = list(module.layers) if isinstance(module, SideBySide) else [module]
        for name, part in zip(self.names, self._parts(layers, "weight"), strict=True):
            yield f"{name}.weight", part.T if self.transposed else part
        if self.bias_names:
            yield from ((name, part) for name, part in zip(self.bias_names, self._parts(layers, "bias"), strict=True) if name is not None)

    def _parts(self, layers: list[Any], kind: str) -> Sequence[torch.Tensor]:
        """The weight or the bias of each layer."""
        return [getattr(layer, kind) for layer in layers] if len(layers) > 1 else getattr(layers[0], kind).split(list(self.rows))


@dataclass(frozen=True)
class Attention:
    """Attention of q, k and v side by side, causal unless ``options`` say otherwise: those of ``pytorch.DotProductAttention``."""

    heads: int
    groups: int
    head_width: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def made(self, weights: Weights) -> nn.Module:
        return pytorch.DotProductAttention(self.heads, self.head_width, groups=self.groups, **self.options)

    def stored(self, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())


@dataclass(frozen=True)
class CrossAttention:
    """Attention of q over keys and values from elsewhere, an extra input; ``options``: those of ``pytorch.CrossAttention``."""

    heads: int
    head_width: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def made(self, weights: Weights) -> nn.Module:
        return pytorch.CrossAttention(self.heads, self.head_width, **self.options)

    def stored(self, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())


@dataclass(frozen=True)
class LatentAttention:
    """Causal attention over latents of ``rank`` columns, from ``compress``, of which ``expand``, a norm and a product, makes keys and values
    (``models.latent_attention``); ``query``: a norm and a product for the queries, or none. ``options``: those of ``pytorch.LatentAttention``."""

    compress: Product
    query: tuple[Part, ...]
    expand: tuple[Norm, Product]
    heads: int
    rank: int
    key_width: int
    rope_width: int
    value_width: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def made(self, weights: Weights) -> nn.Module:
        compress = self.compress.made(weights)
        query = pytorch.Sequential(*(part.made(weights) for part in self.query)) if self.query else None
        expand = pytorch.Sequential(*(part.made(weights) for part in self.expand))
        widths = self.heads, self.rank, self.key_width, self.rope_width, self.value_width
        return MultiHeadLatentAttention(compress, query, expand, *widths, self.options)

    def stored(self, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.compress.stored(module.compress)
        yield from stored_in(self.query, module.query) if self.query else ()
        yield from stored_in(self.expand, module.expand)


@dataclass(frozen=True)
class HeadNorm:
    """RMS normalization of each head of q, by the weight ``q_name``, and of k."""

    q_name: str
    k_name: str
    heads: int
    groups: int
    head_width: int
    eps: float
    zero_centered: bool = False

    def made(self, weights: Weights) -> nn.Module:
        options = {"groups": self.groups, "eps": self.eps, "zero_centered_gamma": self.zero_centered}
        module = pytorch.QKNorm(self.heads, self.head_width, **options, param_dtype=weights.dtype, device="meta")
        initial = 0.0 if self.zero_centered else 1.0
        names = {"q_weight": self.q_name, "k_weight": self.k_name}
        tensors = {own: weights.vector([f"{name}.weight"], [self.head_width], initial) for own, name in names.items()}
        module.load_state_dict(tensors, assign=True)
        return module

    def stored(self, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((f"{self.q_name}.weight", module.q_weight), (f"{self.k_name}.weight", module.k_weight))


@dataclass(frozen=True)
class Activation:
    """``kind``: one of Fusible's activations; a gate takes what it is applied to, and then the factor."""

    kind: type[nn.Module]

    def made(self, weights: Weights) -> nn.Module:
        return self.kind()

    def stored(self, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())


@dataclass(frozen=True)
class Experts:
    """A mixture of ``count`` experts, of which a token takes ``top_k``, weighted by the softmax of their logits; not ``normalized``, by that of all.

    ``up`` and ``down``: the names of the matrices that enter and leave an expert, with ``{}`` for its number; several of ``up`` are read as one.
    ``options``: others of ``pytorch.MixtureOfExperts``, for the router; ``bias``: the name of what is added to its scores, to choose by them.
    """

    router: str
    up: tuple[str, ...]
    down: str
    features: int
    inner: int
    count: int
    top_k: int
    activation: str
    normalized: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    bias: str | None = None

    @property
    def matrices(self) -> dict[str, tuple[list[list[str]], tuple[int, int]]]:
        """By the name of a parameter the matrices of each expert, by their names and in their shape, that lie in it one on top of the other."""
        numbers = range(self.count)
        return {
            "up_weight": ([[f"{name.format(i)}.weight" for name in self.up] for i in numbers], (self.inner, self.features)),
            "down_weight": ([[f"{self.down.format(i)}.weight"] for i in numbers], (self.features, self.inner)),
        }

    def made(self, weights: Weights) -> nn.Module:
        options = {"activation": self.activation, "normalized": self.normalized, "param_dtype": weights.dtype, "device": "meta", **self.options}
        module = pytorch.MixtureOfExperts(self.features, self.inner, self.count, self.top_k, expert_bias=self.bias is not None, **options)
        tensors = {"router_weight": weights.values(f"{self.router}.weight", (self.count, self.features), dtype=self.options.get("router_dtype"))}
        if self.bias is not None:
            tensors["expert_bias"] = weights.vector([self.bias], [self.count], dtype=torch.float32)
        matrices = self.matrices
        quantized = {name: weights.quantized(*of) for name, of in matrices.items()}
        stacked = None in quantized.values()
        if stacked:
            tensors |= {name: weights.stack(*of) for name, of in matrices.items()}
        else:
            hold_parameters(module, {f"{name}{i}": matrix for name, each in quantized.items() for i, matrix in enumerate(each or ())})
        module.load_state_dict(tensors, assign=True, strict=stacked)
        return weights.finish(module)

    def stored(self, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{self.router}.weight", module.router_weight
        if self.bias is not None:
            yield self.bias, module.expert_bias
        for i, (up, down) in enumerate(module.expert_weights()):
            yield from ((f"{name.format(i)}.weight", part) for name, part in zip(self.up, up.split(self.inner), strict=True))
            yield f"{self.down.format(i)}.weight", down


@dataclass(frozen=True)
class SharedExpert:
    """``experts(x) + sigmoid(gate(x)) * shared(x)``: an expert that every token takes (Dai et al. 2024, arXiv:2401.06066), by a gate of its own, or
    whole."""

    experts: Experts
    gate: Product | None
    shared: tuple[Part, ...]

    def made(self, weights: Weights) -> nn.Module:
        shared = pytorch.Sequential(*(part.made(weights) for part in self.shared))
        return GatedSum(self.experts.made(weights), None if self.gate is None else self.gate.made(weights), shared)

    def stored(self, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.experts.stored(module.main)
        if self.gate is not None:
            yield from self.gate.stored(module.gate)
        yield from stored_in(self.shared, module.shared)


@dataclass(frozen=True)
class Residual:
    """``x + parts(x)``."""

    parts: tuple[Part, ...]

    def made(self, weights: Weights) -> nn.Module:
        return pytorch.Residual(*(part.made(weights) for part in self.parts))

    def stored(self, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return stored_in(self.parts, module)


@dataclass(frozen=True)
class Parallel:
    """``x + sum of branch(norm(x))``."""

    norm: Part
    branches: tuple[tuple[Part, ...], ...]

    def made(self, weights: Weights) -> nn.Module:
        branches = [pytorch.Sequential(*(part.made(weights) for part in branch)) for branch in self.branches]
        return ParallelResidual(self.norm.made(weights), *branches)

    def stored(self, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.norm.stored(module.norm)
        for parts, branch in zip(self.branches, module.branches, strict=True):
            yield from stored_in(parts, branch)


@dataclass(frozen=True)
class Blueprint:
    """A causal language model.

    ``embedding``: the name of the table ``[vocabulary, hidden]``, whose rows are multiplied by ``embedding_scale``; ``positions``: that of learned
    positions ``[context, hidden]``, which are added. ``body``: the blocks and the last norm. ``head``: the product that gives logits; with ``tied``,
    by the embedding's table. ``soft_cap``: logits are ``soft_cap * tanh(logit / soft_cap)``.
    """

    vocabulary: int
    context: int
    hidden: int
    embedding: str
    body: tuple[Part, ...]
    head: Product
    tied: bool = False
    embedding_scale: float = 1.0
    positions: str | None = None
    soft_cap: float | None = None
    older: tuple[tuple[str, str], ...] = ()
