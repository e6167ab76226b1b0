"""Ten training steps of a residual block of fusible operations, one of them and one fusion written here, by the names of Transformer Engine alone.

* ``python examples/te_ops.py --recipe mxfp8``
* ``fusible run examples/te_ops.py --recipe mxfp8``
* ``fusible run --device cpu examples/te_ops.py --recipe mxfp8``
"""

import argparse

import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch.ops.op import BasicOperation, FusedOperation, OperationContext

HIDDEN, FFN, TOKENS = 128, 256, 256
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def mxfp8_hybrid(role):
    """Which quantizer a tensor gets, by what it is to its layer: MXFP8 of E4M3, and of E5M2 for gradients."""
    gradient = role is not None and role.tensor_type.startswith("grad")
    return te.MXFP8Quantizer(te.DType.kFloat8E5M2 if gradient else te.DType.kFloat8E4M3)


RECIPES = {
    "bf16": None,
    "delayed": recipe.DelayedScaling,
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
    "custom": lambda: recipe.CustomRecipe(qfactory=mxfp8_hybrid),
}


class LearnedScale(BasicOperation):
    """``y = x * scale`` with one scale per column."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((size,), 0.5, device=DEVICE, dtype=torch.bfloat16))

    def op_forward(self, ctx: OperationContext, input_, **unused):
        if ctx.requires_grad:
            ctx.save_for_backward(input_)
        return input_ * self.scale

    def op_backward(self, ctx: OperationContext, grad_output):
        (input_,) = ctx.saved_tensors
        return grad_output * self.scale, [(grad_output * input_).sum(dim=0)]


class ForwardScaleAdd(FusedOperation):
    """``y = extra + x * scale`` in one pass; backward is that of the two operations."""

    calls = 0

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        scale, _ = self.basic_ops
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(input_)
        ForwardScaleAdd.calls += 1
        return torch.addcmul(basic_op_extra_inputs[1][0], input_, scale.scale), [(), ()]


def fuse_scale_add(ops, *, recipe=None):
    """Put every scale and the addition after it together."""
    fused = []
    for op in ops:
        if fused and isinstance(fused[-1], LearnedScale) and isinstance(op, te.ops.AddExtraInput):
            fused[-1] = ForwardScaleAdd([fused[-1], op])
        else:
            fused.append(op)
    return fused


te.ops.register_forward_fusion(fuse_scale_add)


def make_block(seed: int = 0) -> te.ops.Sequential:
    torch.manual_seed(seed)
    like = {"device": DEVICE, "dtype": torch.bfloat16}
    fork, join = te.ops.MakeExtraOutput(), te.ops.AddExtraInput()
    fork.set_extra_output_channel(0, "residual", output_to_caller=False)
    join.set_extra_input_channel(0, "residual")
    return te.ops.Sequential(
        fork,
        te.ops.LayerNorm(HIDDEN, **like),
        te.ops.Linear(HIDDEN, FFN, **like),
        te.ops.GELU(),
        te.ops.Linear(FFN, HIDDEN, **like),
        LearnedScale(HIDDEN),
        join,
    )


def make_batch(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and what the block shall make of them: the columns one place further."""
    torch.manual_seed(seed)
    x = torch.randn(TOKENS, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    return x, x.roll(1, dims=1)


def train(block: torch.nn.Module, recipe_name: str, steps: int) -> list[float]:
    chosen = RECIPES[recipe_name]
    quantization = chosen() if chosen else None
    optimizer = torch.optim.Adam(block.parameters(), lr=1e-3)
    x, target = make_batch()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with te.autocast(enabled=quantization is not None, recipe=quantization):
            y = block(x)
        loss = torch.nn.functional.mse_loss(y.float(), target.float())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", choices=[*RECIPES, "all"], default="all")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    for name in RECIPES if options.recipe == "all" else [options.recipe]:
        before = ForwardScaleAdd.calls
        losses = train(make_block(), name, options.steps)
        print(f"{name:8}", *(f"{loss:.4f}" for loss in losses), f"({ForwardScaleAdd.calls - before} fused passes)")
