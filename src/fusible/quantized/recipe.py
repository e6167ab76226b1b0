"""Recipes: how tensors are scaled and quantized. Values: two recipes with the same options are the same recipe.

Names and defaults are those of ``transformer_engine.common.recipe``; the defaults that it takes from the environment are read when a recipe is made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Self

from fusible import knobs
from fusible.errors import ArgumentError, check_number, expected
from fusible.quantized.formats import Format
from fusible.quantized.options import MMParams, Options, QParams, from_knob, from_others

__all__ = ["CustomRecipe", "DelayedScaling", "Float8CurrentScaling", "HighPrecision", "ParametrizedRecipe", "Recipe"]


@dataclass(frozen=True, repr=False)
class Recipe(Options):
    """Base of all recipes.

    ``fp8_dpa``: attention on 8-bit operands; ``fp8_mha``: nor are they widened between attention and the linear layers around it.
    ``backward_override``: None for a backward pass on quantized operands, ``"high_precision"`` for one on the original operands, ``"dequantized"``
    for one on the values of the quantized ones.
    """

    alignment: ClassVar[int] = 16
    """What the rows of each group are padded to a multiple of, so that it can be quantized alone."""

    _: KW_ONLY
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = from_knob(knobs.NVTE_BACKWARD_OVERRIDE)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_one_of("backward_override", None, "high_precision", "dequantized")

    def immutable(self) -> Self:
        """An immutable recipe with the present options: itself, or a copy of a recipe that can be changed."""
        return self

    # What kind of recipe it is. The class may be asked, too.

    @classmethod
    def delayed(cls) -> bool:
        return False

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return False

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return cls.delayed() or cls.float8_current_scaling()

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return False

    @classmethod
    def mxfp8(cls) -> bool:
        return False

    @classmethod
    def nvfp4(cls) -> bool:
        return False

    @classmethod
    def custom(cls) -> bool:
        return False

    @classmethod
    def high_precision(cls) -> bool:
        return False

    def _check_8_bits(self) -> None:
        self._check_one_of("fp8_format", Format.E4M3, Format.E5M2, Format.HYBRID)


@dataclass(frozen=True, repr=False)
class ParametrizedRecipe(Recipe):
    """A recipe that has ``QParams`` for forward inputs, for weights and for gradients.

    Those that are given say all of their tensors' options; those that are not (None) follow from the recipe's other options.
    """

    _QPARAMS: ClassVar[tuple[str, str, str]] = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
    _TAKES: ClassVar[tuple[str, ...]] = ("power_2_scale", "amax_epsilon")

    _derived: Mapping[str, QParams] = field(default_factory=dict, repr=False, compare=False, kw_only=True)
    """Those that were not given. ``dataclasses.replace`` hands them on with the rest, by which they are known and follow from the new options."""

    def qparams(self, tensor_type: str) -> QParams:
        """The parameters by which a tensor of that type (``QuantizerRole.tensor_type``) is quantized."""
        inp, weight, grad = self._QPARAMS
        return getattr(self, weight if tensor_type == "weight" else grad if tensor_type.startswith("grad") else inp)

    def _derive(self, *defaults: QParams) -> None:
        """Fill in what was not given, in the order of ``_QPARAMS``; what was given must be options that the recipe takes."""
        derived = {
            name: getattr(type(self), name) or default  # a class that derives from the recipe may have one of its own
            for name, default in zip(self._QPARAMS, defaults, strict=True)
            if getattr(self, name) is None or getattr(self, name) is self._derived.get(name)
        }
        for name, value in (*derived.items(), ("_derived", derived)):
            object.__setattr__(self, name, value)
        plain = QParams()
        for name in self._QPARAMS:
            idle = [option for option, value in vars(getattr(self, name)).items() if option not in self._TAKES and value != getattr(plain, option)]
            if idle:
                raise self._unfit(name, f"none but {' and '.join(self._TAKES)}", f"leave {idle[0]} out")

    def _follows(self, name: str) -> bool:
        return name in self._derived


@dataclass(frozen=True, repr=False)
class HighPrecision(Recipe):
    """No quantization: operations compute in ``lowest``, on operands that are rounded to it, and give it.

    ``lowest`` is ``"bfloat16"``, ``"float16"`` or ``"float32"``, or None for the input's own precision. An fp32 module trains in bf16 under
    ``HighPrecision("bfloat16")``: its parameters and their gradients stay fp32, as the optimizer wants them, and only products' operands are rounded.
    """

    lowest: str | None = None
    backward_override: str | None = field(default=None, kw_only=True)

    @classmethod
    def high_precision(cls) -> bool:
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lowest not in (None, "bfloat16", "float16", "float32"):
            raise self._unfit("lowest", "bfloat16, float16, float32 or None", "name one of these")
        for name, value in (("fp8_dpa", False), ("fp8_mha", False), ("backward_override", None)):
            self._check_one_of(name, value)


@dataclass(frozen=True, repr=False)
class DelayedScaling(Recipe):
    """Per-tensor scaling by the largest absolute values of earlier iterations.

    ``scale = fp8_max * 2**-margin / amax`` where ``amax`` is taken over a window of ``amax_history_len`` iterations (``"max"``), is the latest one
    (``"most_recent"``), or what ``amax_compute_algo(amax_history [window, n]) -> [n]`` gives. ``scaling_factor_compute_algo(amax, scale, fp8_max,
    recipe) -> scale`` replaces the formula. A non-finite amax never enters the history. ``backward_override`` must be None.
    """

    margin: float = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Any], Any] = "max"
    scaling_factor_compute_algo: Callable[[Any, Any, Any, Any], Any] | None = None
    reduce_amax: bool = True

    @classmethod
    def delayed(cls) -> bool:
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_8_bits()
        if self.backward_override is not None:
            raise self._unfit("backward_override", "None", f"give None, or unset {knobs.NVTE_BACKWARD_OVERRIDE.name}")
        check_number(self.margin, f"margin of {type(self).__name__}")
        if self.amax_history_len < 1:
            raise self._unfit("amax_history_len", "at least 1", "give the window's length")
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in ("max", "most_recent"):
            raise self._unfit("amax_compute_algo", "'max', 'most_recent' or a function", "name one")
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise self._unfit("scaling_factor_compute_algo", "a function or None", "give one of the two")


@dataclass(frozen=True, repr=False)
class Float8CurrentScaling(ParametrizedRecipe):
    """Per-tensor scaling by the tensor's own largest absolute value: ``scale = fp8_max / amax``, stateless.

    ``use_power_2_scales`` rounds scales down to powers of two; ``fp8_quant_*`` say so, and a lower bound of amax, per kind of tensor.
    """

    use_power_2_scales: bool = from_knob(knobs.NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES)
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams = from_others()
    fp8_quant_fwd_weight: QParams = from_others()
    fp8_quant_bwd_grad: QParams = from_others()
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_8_bits()
        self._derive(*[QParams(power_2_scale=self.use_power_2_scales)] * 3)


@dataclass(frozen=True, repr=False)
class CustomRecipe(Recipe):
    """Quantization by a function: ``qfactory(role) -> Quantizer | DelayedScalingRequest | None``; None leaves a tensor in high precision.

    Recipes are the same where their factories are: give a function that was made once. ``quantization_alignment`` is the number that rows of grouped
    operations are padded to a multiple of, at least what any quantizer of the factory asks for. ``fp8_format`` says nothing about quantization.
    """

    qfactory: Callable[..., Any]
    fp8_format: Format = Format.HYBRID
    quantization_alignment: int = 128

    @classmethod
    def custom(cls) -> bool:
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.qfactory) or not isinstance(self.qfactory, Hashable):
            raise ArgumentError(
                expected("a hashable function of a QuantizerRole", of="CustomRecipe.qfactory", got=repr(self.qfactory), do="give one")
            )
        if self.quantization_alignment < 1:
            raise self._unfit("quantization_alignment", "at least 1", "give the number of rows")
