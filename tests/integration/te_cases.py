"""What comes of NVIDIA's public functions and of what is neither a module nor an operation: cases that run with either side's names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from te_public import Side, case

EXPERTS, TOKENS, HIDDEN = 4, 16, 32
Results = Iterator[tuple[str, Any]]
BF16 = 2.0**-8
"""The rounding of a value to bf16, or of a sum of few."""


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _differentiated(name: str, outputs: Any, **leaves: torch.Tensor) -> Results:
    """The outputs, and the gradients of leaves by a sum of the outputs with drawn weights."""
    tensors = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if isinstance(y, torch.Tensor)]
    total = sum((y.float() * _random(*y.shape, seed=place)).sum() for place, y in enumerate(tensors) if y.requires_grad)
    grads = torch.autograd.grad(total, list(leaves.values()))  # type: ignore[arg-type]
    yield from ((f"{name} {place}", y.detach()) for place, y in enumerate(tensors))
    yield from ((f"{name}, gradient of {leaf}", grad) for leaf, grad in zip(leaves, grads, strict=True))


def _routing() -> torch.Tensor:
    map_ = torch.zeros(TOKENS, EXPERTS, dtype=torch.int32)
    map_.scatter_(1, _random(TOKENS, EXPERTS).topk(2).indices, 1)
    return map_


@case(
    "moe_permute",
    "moe_permute_with_probs",
    "moe_permute_and_pad_with_probs",
    "moe_unpermute",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    bound=BF16,
)
def permutation(te: Side) -> Results:
    x, probs, routing = _random(TOKENS, HIDDEN).requires_grad_(), _random(TOKENS, EXPERTS, seed=1).sigmoid().requires_grad_(), _routing()
    permuted, rows = te.moe_permute(x, routing, 2 * TOKENS)
    yield "row_id_map", rows
    yield from _differentiated("by a mask", permuted, x=x)
    merged = te.moe_unpermute(te.moe_permute(x, routing, 2 * TOKENS)[0], rows, probs, x.shape)
    yield from _differentiated("merged", merged, x=x, probs=probs)
    yield from _differentiated("summed", te.moe_unpermute(te.moe_permute(x, routing, 2 * TOKENS)[0], rows, restore_shape=x.shape), x=x)
    permuted, given, rows = te.moe_permute_with_probs(x, probs, routing, 2 * TOKENS)
    yield from _differentiated("with probabilities", (permuted, given), x=x, probs=probs)
    permuted, given, rows, offsets, padded = te.moe_permute_and_pad_with_probs(x, probs, routing, routing.sum(0), 16)
    yield "offsets", offsets
    yield "padded", padded
    merged = te.moe_unpermute(permuted, rows, restore_shape=x.shape, pad_offsets=offsets)
    yield from _differentiated("with padding", (permuted, given, merged), x=x, probs=probs)
    index = routing.topk(2).indices.int()
    permuted, rows = te.moe_permute(x, index, 0, map_type="index")
    yield from _differentiated("by indices", permuted, x=x)
    merging = _random(TOKENS, 2, seed=2).sigmoid().requires_grad_()
    permuted, rows = te.moe_permute(x, index, 0, map_type="index")
    yield from _differentiated("merged by indices", te.moe_unpermute(permuted, rows, merging, map_type="index"), x=x, merging=merging)
    sizes, order, of_rows = torch.tensor([4, 0, 10, 2]), torch.tensor([2, 0, 3, 1]), _random(TOKENS, seed=3).requires_grad_()
    yield from _differentiated("sorted", te.moe_sort_chunks_by_index(x, sizes, order), x=x)
    yield from _differentiated("sorted both", te.moe_sort_chunks_by_index_with_probs(x, of_rows, sizes, order), x=x, probs=of_rows)


@case("parallel_cross_entropy", bound=2.0**-20)
def losses(te: Side) -> Results:
    target = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    target[0, 3] = -100
    for options in ({}, {"label_smoothing": 0.1}, {"reduce_loss": True}, {"ignore_idx": 7, "label_smoothing": 0.2, "reduce_loss": True}):
        logits = _random(2, 8, 50).requires_grad_()
        allowed = target.clamp(min=0) if "ignore_idx" in options else target
        yield from _differentiated(f"loss {options}", te.parallel_cross_entropy(logits, allowed, **options), logits=logits)


@case("Fp8Padding", "Fp8Unpadding", "quantization.get_align_size_for_quantization")
def padding(te: Side) -> Results:
    splits = [3, 0, 17]
    for align in (None, 32):
        x = _random(sum(splits), HIDDEN).requires_grad_()
        padded, sizes = te.Fp8Padding(3, align)(x, splits)
        yield f"sizes {align}", list(sizes)
        yield from _differentiated(f"padded {align}", (padded, te.Fp8Unpadding(3, align)(padded, splits)), x=x)
    for name in ("DelayedScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"):
        yield f"alignment of {name}", te.quantization.get_align_size_for_quantization(getattr(te.recipe, name)())


@case("rope.apply_rotary_pos_emb", "rope.apply_fused_qkv_rotary_pos_emb", "RotaryPositionEmbedding", bound=BF16)
def rotation(te: Side) -> Results:
    for interleaved in (False, True):
        made = te.RotaryPositionEmbedding(HIDDEN, interleaved=interleaved)
        angles = made(8)
        yield f"angles {interleaved}", angles
        yield f"from position 3 {interleaved}", made(8, offset=3)
        for layout, shape in (("sbhd", (8, 2, 4, HIDDEN)), ("bshd", (2, 8, 4, HIDDEN))):
            x = _random(*shape).requires_grad_()
            rotated = te.rope.apply_rotary_pos_emb(x, angles, layout, interleaved=interleaved, fused=True)
            yield from _differentiated(f"{layout} {interleaved}", rotated, x=x)
            qkv = _random(*shape[:3], 3 * HIDDEN, seed=1).requires_grad_()
            split = [HIDDEN, HIDDEN, HIDDEN]
            joint = te.rope.apply_fused_qkv_rotary_pos_emb(qkv, angles, angles, split, layout, interleaved=interleaved)
            yield from _differentiated(f"joint {layout} {interleaved}", tuple(joint), qkv=qkv)


@case("InferenceParams")
def generation(te: Side) -> Results:
    for paged in (False, True):
        pages = {"is_paged": True, "total_num_pages": 6, "page_size": 4} if paged else {}
        cache = te.InferenceParams(3, 8, 2, 4, torch.float32, qkv_format="thd", max_ctx_len=4, **pages)
        cache.allocate_memory(1)
        for step, steps in enumerate(({5: 3, 7: 4}, {5: 1, 7: 1, 9: 2}, {7: 1, 9: 1})):
            cache.pre_step(OrderedDict(steps))
            k, v = (_random(sum(steps.values()), 2, 4, seed=seed) for seed in (step, step + 10))
            *held, longest, layout = cache.step(1, k, v, "thd")
            yield f"layout {paged} {step}", (longest, layout, dict(cache.sequences), dict(cache.sequences_pre_step), cache.batch_size)
            k, v, ends, all_ends = held
            k, v = cache.convert_paged_to_nonpaged(1) if paged else (k, v)
            for place, length in enumerate(cache.sequences.values()):
                yield f"keys {paged} {step} {place}", k[place, :length].clone()
                yield f"values {paged} {step} {place}", v[place, :length].clone()
            yield f"ends {paged} {step}", torch.stack([ends, all_ends])
            yield f"starts {paged} {step}", cache.get_seqlens_pre_step()[: len(steps)].clone()
        cache.reset()
        yield f"reset {paged}", dict(cache.sequences)


@case("interleave_glu_tensor", "deinterleave_glu_tensor")
def gated_layout(te: Side) -> Results:
    x = _random(64, 8)
    yield "interleaved", te.interleave_glu_tensor(x, 16)
    yield "back", te.deinterleave_glu_tensor(te.interleave_glu_tensor(x, 16), 16)


@case("CudaRNGStatesTracker")
def random_states(te: Side) -> Results:
    tracker = te.CudaRNGStatesTracker()
    tracker.add("one", 5)
    tracker.add("model-parallel-rng", 6)
    torch.manual_seed(0)
    with tracker.fork("one"):
        yield "first", torch.rand(4)
    yield "outside", torch.rand(4)
    with tracker.fork():
        yield "by default", torch.rand(4)
    with tracker.fork("one"):
        yield "goes on", torch.rand(4)
    yield "names", sorted(tracker.get_states())
    for wrong in (lambda: tracker.add("one", 7), lambda: tracker.add("two", 5), lambda: tracker.fork("three").__enter__()):
        try:
            wrong()
        except Exception:
            yield "refused", True
    tracker.reset()
    yield "empty", tracker.get_states()


@case("optimizers.FusedAdam", "optimizers.FusedSGD", bound=2.0**-20)
def optimization(te: Side) -> Results:
    makers = {
        "adamw": lambda p: te.optimizers.FusedAdam(p, lr=1e-2, weight_decay=0.1),
        "adam": lambda p: te.optimizers.FusedAdam(p, lr=1e-2, adam_w_mode=False, bias_correction=False, weight_decay=0.1),
        "sgd": lambda p: te.optimizers.FusedSGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
        "plain": lambda p: te.optimizers.FusedSGD(p, lr=1e-2),
        "adam by place": lambda p: te.optimizers.FusedAdam(p, 1e-2, (0.8, 0.9), 1e-6, 0.1),
    }
    for name, make in makers.items():
        parameters = [torch.nn.Parameter(_random(4, 8, seed=seed)) for seed in range(2)]
        optimizer = make(parameters)
        for step in range(3):
            optimizer.zero_grad()
            for place, parameter in enumerate(parameters):
                parameter.grad = _random(4, 8, seed=10 + 2 * step + place)
            optimizer.step()
        yield from ((f"{name} {place}", parameter.detach()) for place, parameter in enumerate(parameters))
        state = optimizer.state_dict()["state"]
        yield f"{name} state", sorted({key for held in state.values() for key in held})


@case("optimizers.FusedAdam", bound=2.0**-20)
def held_states(te: Side) -> Results:
    """Moments and masters in few bits, over a reload; what an optimizer of another dtype makes of its state dict."""
    floats = torch.float32, torch.bfloat16, torch.float16, torch.uint8
    masters: list[dict[str, Any]] = [
        {"master_weights": False, "master_weight_dtype": torch.float16, "store_param_remainders": True},  # without masters no effect
        {"master_weights": True},
        {"master_weights": True, "master_weight_dtype": torch.float16, "store_param_remainders": True},
        {"master_weights": True, "store_param_remainders": True},
    ]
    for of_masters, first, second in product(masters, floats, floats):
        options = {"lr": 1e-2, "weight_decay": 0.1, **of_masters, "exp_avg_dtype": first, "exp_avg_sq_dtype": second}
        parameters = [torch.nn.Parameter(_random(*shape, seed=seed, dtype=torch.bfloat16)) for seed, shape in enumerate(((4, 8), (7,)))]
        decoupled = first is torch.uint8
        optimizer = te.optimizers.FusedAdam(parameters, **options, use_decoupled_grad=decoupled)
        for step in range(4):
            for place, parameter in enumerate(parameters):
                gradient = _random(*parameter.shape, seed=10 + 2 * step + place)
                setattr(parameter, "decoupled_grad" if decoupled else "grad", gradient if decoupled else gradient.bfloat16())
            optimizer.step()
            if step == 1:
                saved = optimizer.state_dict()
                optimizer = te.optimizers.FusedAdam(parameters, **options, use_decoupled_grad=decoupled)
                optimizer.load_state_dict(saved)
            optimizer.zero_grad()
        name = f"{first} {second} {sorted(of_masters.items(), key=str)}"
        yield from ((f"{name}: {place}", parameter.detach()) for place, parameter in enumerate(parameters))
        for place, state in optimizer.state_dict()["state"].items():
            yield from ((f"{name}: {slot} of {place}", value.clone()) for slot, value in sorted(state.items()))
        whole = of_masters["master_weights"] and not of_masters.get("store_param_remainders")
        for slot in ("exp_avg", "exp_avg_sq", *["master_param"] * whole):
            optimizer.set_scaled_state(parameters[0], slot, _random(4, 8, seed=3))
            yield f"{name}: {slot} that was set", optimizer.get_unscaled_state(parameters[0], slot)


@case("optimizers.FusedAdam")
def capturable_states(te: Side) -> Results:
    """What a step that is captured cannot hold."""
    floats = torch.float32, torch.bfloat16, torch.float16, torch.uint8
    for first, second, more in product(floats, floats, ({}, {"master_weight_dtype": torch.float16}, {"store_param_remainders": True})):
        options: dict[str, Any] = {"master_weights": True, "capturable": True, "exp_avg_dtype": first, "exp_avg_sq_dtype": second, **more}
        try:
            te.optimizers.FusedAdam([torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))], **options)
            refused = False
        except Exception:
            refused = True
        yield f"{first} {second} {more}", refused


@case("optimizers.MultiTensorApply", "optimizers.multi_tensor_applier")
def many_tensors(te: Side) -> Results:
    def scaled(chunk: int, flag: Any, lists: Any, factor: float) -> list[Any]:
        return [chunk, *(tensor * factor for tensors in lists for tensor in tensors)]

    lists = [[torch.ones(2), torch.empty(0)], [torch.ones(3), torch.ones(1)]]
    for apply in (te.optimizers.MultiTensorApply(7), te.optimizers.multi_tensor_applier):
        chunk, *made = apply(scaled, torch.zeros(1), [list(tensors) for tensors in lists], 2.0)
        yield f"chunk {chunk}", chunk
        yield from ((f"of {chunk}: {place}", y) for place, y in enumerate(made))
        yield f"of nothing, {chunk}", apply(scaled, torch.zeros(1), [[torch.empty(0)]], 2.0)


@case("get_cpu_offload_context", "ManualOffloadSynchronizer", "mark_not_offload")
def offloading(te: Side) -> Results:
    """The gradients are those of layers whose activations stayed."""

    def layers() -> list[Any]:
        torch.manual_seed(0)
        return [torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.GELU()) for _ in range(3)]

    for manual in (None, False, True):
        x = _random(4, HIDDEN).requires_grad_()
        made = layers()
        options: dict[str, Any] = {} if manual is None else {"enabled": True, "model_layers": 3, "manual_synchronization": manual}
        context, synchronize, *rest = te.get_cpu_offload_context(**options)
        te.mark_not_offload(x)
        y = x
        for layer in made:
            with context:
                y = layer(y)
            y = synchronize(y)
        if manual:
            yield "controller", isinstance(rest[0], te.ManualOffloadSynchronizer)
            rest[0].start_offload_layer(0)
            rest[0].release_activation_forward_gpu_memory(0)
            rest[0].start_reload_layer(0)
        yield from _differentiated(f"manual={manual}", y, x=x, weight=made[0][0].weight)


@case(
    "CPLoadBalancingStrategy",
    "UserBufferQuantizationMode",
    "DType",
    "destroy_ub",
    "get_cudnn_version",
    "get_device_compute_capability",
    "is_bf16_available",
    "torch_version",
    "onnx_export",
)
def environment(te: Side) -> Results:
    for name in ("CPLoadBalancingStrategy", "UserBufferQuantizationMode", "DType"):
        yield name, {key: member.value for key, member in getattr(te, name).__members__.items()}
    for name in ("get_cudnn_version", "get_device_compute_capability", "is_bf16_available", "torch_version", "destroy_ub"):
        yield name, getattr(te, name)()
    yield "reason", te.is_bf16_available(return_reason=True)
    with te.onnx_export(enabled=False):
        yield "exported", te.torch_version()


@case("make_graphed_callables", bound=BF16)
def graphed(te: Side) -> Results:
    """In the mode that it was captured in a module computes in FP8 by itself, in the other as it is called."""
    x = _random(16, 32)
    for name, enabled in (("one", True), ("two", (True, False))):
        made = tuple(te.Linear(32, 32, device="cuda") for _ in range(1 if name == "one" else 2))
        for seed, module in enumerate(made):
            module.load_state_dict({"weight": _random(32, 32, seed=seed), "bias": _random(32, seed=seed)}, strict=False)
        plain = [module(x) for module in made]
        given = (made[0], (x,)) if name == "one" else (made, ((x,), (x,)))
        found = te.make_graphed_callables(*given, enabled=enabled, recipe=te.recipe.DelayedScaling(), allow_unused_input=True)
        yield f"{name}: the modules", [each is module for each, module in zip((found,) if name == "one" else found, made, strict=True)]
        for module, before in zip(made, plain, strict=True):
            for step in range(3):  # the scale of the second is of the first's amax
                leaf = (x * 2**step).requires_grad_()
                yield from _differentiated(f"{name}: step {step}", module(leaf), leaf=leaf, weight=module.weight)
            yield f"{name}: in 8 bits", torch.equal(module(x), before)
            yield f"{name}: in the other mode", torch.equal(module.eval()(x), before)
            module.train().reset()
