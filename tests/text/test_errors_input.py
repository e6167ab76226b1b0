"""What a user gets for bad input: one sentence, frozen here, and nothing is changed by it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusible import (
    GELU,
    DelayedScaling,
    Dropout,
    HighPrecision,
    LayerNorm,
    Linear,
    MultiHeadedSelfAttention,
    Residual,
    Sequential,
    SwiGLU,
    autocast,
    nvte,
    ops,
    tex,
)
from fusible.compute_pipeline import ComputePipeline, PlanRequest
from fusible.errors import ArgumentError, BackendError, CheckpointError, DTypeError, FusibleError, ShapeError
from fusible.fusions import register_fusion_backward, register_fusion_forward
from fusible.nvte import DType, QuantizedType, make_nvte_tensor
from fusible.quantized import Float8Quantizer

WIDTH = 8


def model() -> Sequential:
    torch.manual_seed(1)
    attention = MultiHeadedSelfAttention(WIDTH, 2)
    net = Sequential(
        Residual(LayerNorm(WIDTH), Linear(WIDTH, 3 * WIDTH), attention, Linear(WIDTH, WIDTH)), Residual(Linear(WIDTH, 12), GELU(), Linear(12, WIDTH))
    )
    with autocast(recipe=DelayedScaling()):
        for _ in range(2):
            net(torch.randn(6, WIDTH)).sum().backward()
    return net


def lengths(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def mask(*rows: str) -> Tensor:
    return torch.tensor([[digit == "1" for digit in row] for row in rows])


CALLS: list[tuple[str, Callable[[Sequential], Any], type[FusibleError], str]] = [
    ("rank 1", lambda m: m(torch.zeros(8)), ShapeError,
     "x of Residual -> LayerNorm -> Linear -> ...: expected a tensor [tokens, hidden] or [batch, seq, hidden], "
     "got shape [8]; reshape it."),
    ("rank 4", lambda m: m(torch.zeros(1, 2, 3, 8)), ShapeError,
     "x of Residual -> LayerNorm -> Linear -> ...: expected a tensor [tokens, hidden] or [batch, seq, hidden], "
     "got shape [1, 2, 3, 8]; reshape it."),
    ("lengths beyond the rows", lambda m: m(torch.zeros(2, 3, 8), lengths(3, 4)), ShapeError,
     "seq_lens: expected lengths of at most 3, the rows of a sequence of x, got 4; check the lengths."),
    ("lengths of other sequences", lambda m: m(torch.zeros(2, 3, 8), lengths(3)), ShapeError,
     "seq_lens: expected one length for each of the 2 sequences of x, got 1; check the lengths."),
    ("negative lengths of padded sequences", lambda m: m(torch.zeros(2, 3, 8), lengths(3, -1)), ArgumentError,
     "seq_lens: expected lengths of at least 0, got -1; give one length per sequence."),
    ("a mask of concatenated tokens", lambda m: m(torch.zeros(4, 8), mask("111", "100")), ShapeError,
     "x of Residual -> LayerNorm -> Linear -> ...: expected a tensor [batch, seq, hidden], as a mask is given, got shape [4, 8]; reshape it."),
    ("a mask of another shape", lambda m: m(torch.zeros(2, 3, 8), mask("11", "10")), ShapeError,
     "seq_lens: expected a mask [2, 3], of x's tokens, got bool [2, 2]; give one bool per token."),
    ("a mask that is padded on the left", lambda m: m(torch.zeros(2, 3, 8), mask("111", "011")), ArgumentError,
     "a mask as seq_lens: expected True for tokens and False for the padding behind them, in each row, got row 1 with 2 otherwise placed; "
     "pad at the end, and turn a mask around that says True for padding."),
    ("a mask of padding", lambda m: m(torch.zeros(2, 3, 8), mask("000", "000")), ArgumentError,
     "a mask as seq_lens: expected True for tokens and False for the padding behind them, in each row, got row 0 without one; "
     "pad at the end, and turn a mask around that says True for padding."),
    ("width", lambda m: m(torch.zeros(4, 7)), ShapeError,
     "the input of LayerNorm(8): expected 8 columns, got 7; give a tensor whose last dimension is that wide."),
    ("float64", lambda m: m(torch.zeros(4, 8, dtype=torch.float64)), DTypeError,
     "the parameters of Residual -> LayerNorm -> Linear -> ...: expected fp64, got float32; cast x, or call .double() or .float() of the modules."),
    ("integers", lambda m: m(torch.zeros(4, 8, dtype=torch.int64)), DTypeError,
     "x of Residual -> LayerNorm -> Linear -> ...: expected fp32, fp16, bf16 or fp64, got int64; cast it."),
    ("8-bit floats", lambda m: m(torch.zeros(4, 8).to(torch.float8_e4m3fn)), DTypeError,
     "x of Residual -> LayerNorm -> Linear -> ...: expected fp32, fp16, bf16 or fp64, got float8_e4m3fn; cast it."),
    ("no tensor", lambda m: m([[0.0] * 8]), DTypeError,
     "x of Residual -> LayerNorm -> Linear -> ...: expected a torch.Tensor, got list; convert it."),
    ("device", lambda m: m(torch.zeros(4, 8, device="meta")), ArgumentError,
     "got meta; move one of them."),
    ("lengths that are too short", lambda m: m(torch.zeros(4, 8), lengths(1, 2)), ShapeError,
     "seq_lens: expected lengths that add up to the 4 tokens of x, got a sum of 3; check the lengths."),
    ("lengths that are too long", lambda m: m(torch.zeros(4, 8), lengths(4, 1)), ShapeError,
     "seq_lens: expected lengths that add up to the 4 tokens of x, got a sum of 5; check the lengths."),
    ("negative lengths", lambda m: m(torch.zeros(4, 8), lengths(6, -2)), ArgumentError,
     "seq_lens: expected lengths of at least 0, got -2; give one length per sequence."),
    ("lengths that are no integers", lambda m: m(torch.zeros(4, 8), lengths(4, dtype=torch.float32)), DTypeError,
     "seq_lens: expected an integer tensor [sequences], or a bool mask [batch, seq], got torch.float32 [1]; give one length per sequence."),
    ("lengths of rank 2", lambda m: m(torch.zeros(4, 8), lengths(4)[None]), DTypeError,
     "seq_lens: expected an integer tensor [sequences], or a bool mask [batch, seq], got torch.int32 [1, 1]; give one length per sequence."),
    ("a list of lengths", lambda m: m(torch.zeros(4, 8), [4]), DTypeError,
     "seq_lens: expected an integer tensor [sequences], or a bool mask [batch, seq], got list; give one length per sequence."),
    ("executor", lambda m: m.compile(executor="tensorrt"), ArgumentError,
     "got 'tensorrt'; name one of these."),
    ("recipe", lambda m: autocast(recipe="delayed"), DTypeError,  # type: ignore[arg-type]
     "autocast: expected a recipe, got 'delayed'; give e.g. fusible.DelayedScaling() or Float8CurrentScaling()."),
    ("scaling state", lambda m: m.load_state_dict({**m.state_dict(), "scaling_state.0": torch.zeros(40, dtype=torch.uint8)}), CheckpointError,
     "a saved scaling state: expected a safetensors file, got damaged bytes"),
    ("scaling state of no pipeline", lambda m: m.load_state_dict({**m.state_dict(), "scaling_state.7": torch.zeros(4)}), CheckpointError,
     "Sequential: expected scaling state for 1 pipelines, got also scaling_state.7; load the checkpoint into the model it was saved from."),
]  # fmt: skip


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize(("call", "error", "sentence"), [pytest.param(*case[1:], id=case[0]) for case in CALLS])
def test_bad_input_is_one_sentence_and_changes_nothing(
    call: Callable[[Sequential], Any], error: type[FusibleError], sentence: str, grad: bool
) -> None:
    net = model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    grads = [parameter.grad.clone() for parameter in net.parameters()]
    random = torch.get_rng_state()
    with autocast(recipe=DelayedScaling()), torch.set_grad_enabled(grad), pytest.raises(error, match=re.escape(sentence)) as raised:
        call(net)
    text = str(raised.value)
    assert ": expected " in text and text.endswith(".") and "\n" not in text
    after = net.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(net.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    with autocast(recipe=DelayedScaling()):
        net(torch.randn(6, WIDTH)).sum().backward()


def _of_two_inputs(a: ops.GELU, x: nvte.Tensor, y: nvte.Tensor) -> Any:
    """A fusion that no forward can call."""


def _without_context(a: ops.GELU, dy: nvte.Tensor) -> Any:
    """A fusion that no backward can call."""


MADE: list[tuple[str, Callable[[], Any], type[FusibleError], str]] = [
    ("an odd gate", lambda: SwiGLU()(torch.zeros(2, 7)), ShapeError,
     "the input of SwiGLU(): expected an even number of columns, got 7; give two halves, the gate first."),
    ("the width of a product", lambda: Sequential(Linear(4, 6), Linear(5, 3))(torch.zeros(2, 4)), ShapeError,
     "the input of MMT(5 -> 3) of Linear -> Linear: expected 5 columns, got 6; give a tensor whose last dimension is that wide."),
    ("the width of attention", lambda: MultiHeadedSelfAttention(8, 2)(torch.zeros(2, 8)), ShapeError,
     "the input of DotProductAttention(heads=2, groups=2, head_width=4, causal=True) of MultiHeadedSelfAttention: expected 24 columns, got 8; "
     "give a tensor whose last dimension is that wide."),
    ("heads", lambda: MultiHeadedSelfAttention(8, 3), ArgumentError,
     "the number of heads: expected a divisor of the 8 features, got 3; choose another number."),
    ("groups", lambda: ops.DotProductAttention(4, 8, groups=3), ArgumentError,
     "the number of groups: expected a divisor of the 4 heads, got 3; share each group between equally many heads."),
    ("an odd head with rotary positions", lambda: ops.DotProductAttention(4, 7, rope_base=1e4), ArgumentError,
     "attention with rotary positions: expected an even head width, got 7; change the number of heads."),
    ("a probability", lambda: Dropout(1.0), ArgumentError,
     "p of Dropout: expected a probability in [0, 1), got 1.0; give the share of elements to drop."),
    ("a window", lambda: DelayedScaling(amax_history_len=0), ArgumentError,
     "DelayedScaling.amax_history_len: expected at least 1, got 0; give the window's length."),
    ("an amax rule", lambda: DelayedScaling(amax_compute_algo="mean"), ArgumentError,
     "DelayedScaling.amax_compute_algo: expected 'max', 'most_recent' or a function, got 'mean'; name one."),
    ("a precision", lambda: HighPrecision(lowest="fp32"), ArgumentError,
     "HighPrecision.lowest: expected bfloat16, float16, float32 or None, got 'fp32'; name one of these."),
    ("a module", lambda: Sequential(Linear(2, 2), torch.relu), DTypeError,
     "Sequential: expected modules, got builtin_function_or_method; give nn.Module instances."),
    ("an op", lambda: ComputePipeline([Linear(2, 2)]), DTypeError,  # type: ignore[list-item]
     "a pipeline's list: expected fusible.ops.Op, got Linear; give operations."),
    ("a slot", lambda: nvte.cast(make_nvte_tensor(torch.ones(2, 2)), QuantizedType(DType.Float8E4M3, "delayed", "0.x")), ArgumentError,
     "the running pass of cast: expected a scale named '0.x', got none; run inside nvte.running(Pass)."),
    ("a quantized type", lambda: QuantizedType(DType.BFloat16, "current"), DTypeError,
     "a QuantizedType: expected an element type of 8 or 4 bits, got bf16; use Float8E4M3 or Float8E5M2."),
    ("a scaling", lambda: QuantizedType(DType.Float8E4M3, "delayed"), DTypeError,
     "a QuantizedType's scaling: expected 'delayed' with a slot, 'current', or another scaling with its quantizer, "
     "got 'delayed' with slot '' and quantizer None; give one of these."),
    ("a quantizer's format", lambda: Float8Quantizer(torch.ones(1), torch.zeros(1), 6), DTypeError,
     "fp8_dtype of Float8Quantizer: expected kFloat8E4M3 or kFloat8E5M2, got 6; pass one."),
    ("a tensor of int16", lambda: make_nvte_tensor(torch.zeros(2, dtype=torch.int16)), DTypeError,
     "a tensor of make_nvte_tensor: expected fp64, fp32, fp16, bf16, an 8-bit float, uint8, int32 or int64, got torch.int16; cast it."),
    ("a fusion without types", lambda: register_fusion_forward(lambda a, x: a), DTypeError,
     "the forward fusion <lambda>: expected parameters (op types, x: nvte.Tensor), got (a, x); annotate each parameter with its type."),
    ("a fusion of two inputs", lambda: register_fusion_forward(_of_two_inputs), DTypeError,
     "the forward fusion _of_two_inputs: expected parameters (op types, x: nvte.Tensor), "
     "got (a: 'ops.GELU', x: 'nvte.Tensor', y: 'nvte.Tensor') -> 'Any'; annotate each parameter with its type."),
    ("a fusion without its contexts", lambda: register_fusion_backward(_without_context), DTypeError,
     "the backward fusion _without_context: expected parameters (op types, their contexts, dy: nvte.Tensor), "
     "got (a: 'ops.GELU', dy: 'nvte.Tensor') -> 'Any'; annotate each parameter with its type."),
    ("a backward fusion without types", lambda: register_fusion_backward(lambda a, x: a), DTypeError,
     "the backward fusion <lambda>: expected parameters (op types, their contexts, dy: nvte.Tensor), got (a, x); "
     "annotate each parameter with its type."),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "sentence"), [pytest.param(*case[1:], id=case[0]) for case in MADE])
def test_what_cannot_be_made(make: Callable[[], Any], error: type[FusibleError], sentence: str) -> None:
    with pytest.raises(error) as raised:
        make()
    assert str(raised.value) == sentence


def test_an_op_whose_side_value_nobody_gives() -> None:
    bias = torch.zeros(2)
    for ops_, sentence in (
        (
            [ops.ResidualEnd()],
            "ResidualEnd(): expected an earlier op with the side output 'residual', got none; put the op that gives it before this one.",
        ),
        ([ops.ResidualBegin()], "the side output 'residual': expected a later op that takes it, got none; close what was begun."),
    ):
        pipeline = ComputePipeline(ops_)
        with pytest.raises(ArgumentError) as raised:
            pipeline.plan(PlanRequest(None, DType.Float32, len(bias), True, ((),), (True,), False, 0))
        assert str(raised.value) == sentence and pipeline.plans_built == 0


def test_parameters_on_two_devices() -> None:
    net = Sequential(Linear(4, 4), Linear(4, 4, device="meta"))
    with pytest.raises(ArgumentError) as raised:
        net(torch.zeros(2, 4))
    assert str(raised.value) == "x of Linear -> Linear: expected a tensor on meta, where the parameters are, got cpu; move one of them."


def test_nvte_tensors_are_immutable() -> None:
    tensor = make_nvte_tensor(torch.zeros(2))
    with pytest.raises(AttributeError, match="nvte.Tensor is immutable: data cannot be set"):
        tensor.data = torch.ones(2)


def test_an_unknown_backend() -> None:
    before = tex.explain("gelu", torch.zeros(2), None).backend
    with pytest.raises(BackendError, match=r"^Backend 'cuda' not found\. Available backends: \[.*'torch'.*\]$"):
        tex.set_backend("cuda")
    assert tex.explain("gelu", torch.zeros(2), None).backend == before
