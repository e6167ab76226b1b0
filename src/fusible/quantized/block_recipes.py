"""Recipes with one scale per block. Names and defaults are those of ``transformer_engine.common.recipe``."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

from fusible import knobs
from fusible.errors import ArgumentError, expected
from fusible.quantized.formats import Format
from fusible.quantized.options import MMParams, QParams, from_knob, from_others
from fusible.quantized.recipe import ParametrizedRecipe, Recipe

__all__ = ["Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"]


@dataclass(frozen=True, repr=False)
class MXFP8BlockScaling(Recipe):
    """FP8 with a power of two per 32 elements, stateless; with ``enable_2d_quantization`` the weights of linear layers have one per 32x32 tile.

    ``margin`` has no effect, as in the interface it comes from.
    """

    alignment: ClassVar[int] = 32

    margin: float = 0
    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False

    @classmethod
    def mxfp8(cls) -> bool:
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_8_bits()


@dataclass(frozen=True, repr=False)
class Float8BlockScaling(ParametrizedRecipe):
    """FP8 with fp32 scales, one per 1x128 block (``*_block_scaling_dim`` 1) or 128x128 tile (2), stateless.

    Scales are rounded down to powers of two unless ``use_f32_scales``; ``fp8_quant_*`` say so, and a lower bound of amax, per kind of tensor. At most
    one operand of a product may have tiles, products accumulate in full fp32, and attention stays in high precision.
    """

    use_f32_scales: bool = from_knob(knobs.NVTE_FP8_BLOCK_SCALING_FP32_SCALES)
    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp: QParams = from_others()
    fp8_quant_fwd_weight: QParams = from_others()
    fp8_quant_bwd_grad: QParams = from_others()
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_8_bits()
        self._derive(*[QParams(power_2_scale=not self.use_f32_scales)] * 3)
        dims = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
        for name in dims:
            self._check_one_of(name, 1, 2)
        for first, second in combinations(dims, 2):
            if getattr(self, first) == getattr(self, second) == 2:
                raise self._unfit(second, f"1 beside {first}=2", "let at most one operand of a product have tiles")
        for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            self._check_one_of(name, MMParams(use_split_accumulator=True))
        for name in ("fp8_dpa", "fp8_mha"):
            self._check_one_of(name, False)


_SCOPES = ("none", "weights", "activations", "all")


@dataclass(frozen=True, repr=False)
class NVFP4BlockScaling(ParametrizedRecipe):
    """E2M1 with an E4M3 scale per 16 elements and an fp32 amax, stateless (https://arxiv.org/abs/2509.25149).

    Column-wise copies of inputs and gradients go through a random Hadamard transform unless ``disable_rht``, gradients are rounded stochastically
    unless ``disable_stochastic_rounding``, weights have 16x16 tiles unless ``disable_2d_quantization``; ``fp4_quant_*`` say it per kind of tensor.
    ``row_scaled_activation`` takes an amax per row of inputs and outputs. ``nvfp4_4over6`` names the forward tensors (``"none"``, ``"weights"``,
    ``"activations"``, ``"all"``) whose blocks map their amax to 6 or to 4, whichever errs less by ``nvfp4_4over6_err_mode`` (``"MAE"``, ``"MSE"``);
    it excludes their transform. ``nvfp4_4over6_e4m3_use_256`` names those of them whose scales go up to 256 rather than to 448.
    """

    alignment: ClassVar[int] = 128
    _QPARAMS: ClassVar[tuple[str, str, str]] = ("fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad")
    _TAKES: ClassVar[tuple[str, ...]] = ("random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization")

    disable_rht: bool = from_knob(knobs.NVTE_NVFP4_DISABLE_RHT)
    disable_stochastic_rounding: bool = from_knob(knobs.NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING)
    disable_2d_quantization: bool = from_knob(knobs.NVTE_NVFP4_DISABLE_2D_QUANTIZATION)
    row_scaled_activation: bool = from_knob(knobs.NVTE_NVFP4_ROW_SCALED_ACTIVATION)
    nvfp4_4over6: str = from_knob(knobs.NVTE_NVFP4_4OVER6)
    nvfp4_4over6_e4m3_use_256: str = from_knob(knobs.NVTE_NVFP4_4OVER6_E4M3_USE_256)
    nvfp4_4over6_err_mode: str = from_knob(knobs.NVTE_NVFP4_4OVER6_ERR_MODE)
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp4_quant_fwd_inp: QParams = from_others()
    fp4_quant_fwd_weight: QParams = from_others()
    fp4_quant_bwd_grad: QParams = from_others()

    @classmethod
    def nvfp4(cls) -> bool:
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        rht = not self.disable_rht
        self._derive(
            QParams(random_hadamard_transform=rht),
            QParams(fp4_2d_quantization=not self.disable_2d_quantization),
            QParams(random_hadamard_transform=rht, stochastic_rounding=not self.disable_stochastic_rounding),
        )
        self._check_one_of("fp4_format", Format.E2M1)
        self._check_one_of("fp8_format", Format.E4M3)
        self._check_one_of("nvfp4_4over6", *_SCOPES)
        self._check_one_of("nvfp4_4over6_e4m3_use_256", *_SCOPES)
        self._check_one_of("nvfp4_4over6_err_mode", "MAE", "MSE")
        for tensor_type in ("input", "weight"):
            if self.uses_4over6(tensor_type):
                self._check_combination(tensor_type, "nvfp4_4over6", "random_hadamard_transform", "stochastic_rounding")
        if self.row_scaled_activation:
            self._check_combination("input", "row_scaled_activation", "fp4_2d_quantization")

    def _check_combination(self, tensor_type: str, option: str, *excluded: str) -> None:
        for name in excluded:
            if getattr(self.qparams(tensor_type), name):
                do = f"switch one of the two off ({'disable_rht=True' if name == 'random_hadamard_transform' else 'fp4_quant_*'})"
                got = f"{option}={getattr(self, option)!r}"
                raise ArgumentError(expected(f"no {name} of the {tensor_type}s", of=f"NVFP4BlockScaling with {option}", got=got, do=do))

    def uses_4over6(self, tensor_type: str) -> bool:
        """Whether blocks of a tensor of that type (``QuantizerRole.tensor_type``) map their amax to 6 or 4."""
        return not tensor_type.startswith("grad") and _within(tensor_type, self.nvfp4_4over6)

    def e4m3_max(self, tensor_type: str) -> int:
        """The largest scale of such a tensor."""
        return 256 if self.uses_4over6(tensor_type) and _within(tensor_type, self.nvfp4_4over6_e4m3_use_256) else 448


def _within(tensor_type: str, scope: str) -> bool:
    return scope in ("all", "weights" if tensor_type == "weight" else "activations")
