"""What stands around a model goes on when ``fusible.convert`` has converted it: optimizers, hooks, copies, checkpointing, compilers, ``Trainer``."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_families import BY_NAME, logits, losses, without_nvidias_package
from torch import nn

import fusible
from fusible.models.convert import load_scaling_states, scaling_states

DELAYED = fusible.DelayedScaling()
LLAMA = BY_NAME["llama"]
INPUTS = LLAMA.inputs()


def trained(model: Any, steps: int = 2) -> list[float]:
    return losses(model, INPUTS, steps)


def test_modules_and_parameters_stay_the_objects_they_were() -> None:
    model = LLAMA.make()
    modules, parameters, keys = dict(model.named_modules()), dict(model.named_parameters()), list(model.state_dict())
    fusible.convert(model, DELAYED)
    assert all(module is modules[name] for name, module in model.named_modules())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert isinstance(model.model.layers[0].mlp.up_proj, nn.Linear) and isinstance(model.model.layers[0].mlp.up_proj, fusible.Linear)
    assert isinstance(model.model.norm, fusible.RMSNorm)
    trained(model)
    assert list(model.state_dict()) == keys
    assert [key for key, _ in model.named_buffers()] == [key for key, _ in LLAMA.make().named_buffers()]


def test_an_optimizer_made_before_goes_on() -> None:
    model = LLAMA.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fusible.convert(model, DELAYED)
    before = model.model.layers[1].mlp.down_proj.weight.clone()
    model(**INPUTS).loss.backward()
    optimizer.step()
    assert not torch.equal(before, model.model.layers[1].mlp.down_proj.weight)


def test_tied_weights_stay_tied_and_the_head_stays_in_high_precision() -> None:
    family = BY_NAME["gpt2"]
    model = fusible.convert(family.make(), DELAYED)
    assert model.lm_head.weight is model.transformer.wte.weight and type(model.lm_head) is nn.Linear


def test_hooks_are_called_and_see_what_they_saw() -> None:
    model, seen = LLAMA.make(), []
    layer = model.model.layers[0]
    layer.self_attn.q_proj.register_forward_hook(lambda module, args, y: seen.append((module, y.shape)))
    layer.mlp.down_proj.register_full_backward_hook(lambda module, dx, dy: seen.append((module, dy[0].shape)))
    fusible.convert(model, DELAYED)
    model(**INPUTS).loss.backward()
    assert seen == [(layer.self_attn.q_proj, torch.Size([2, 12, 64])), (layer.mlp.down_proj, torch.Size([2, 12, 64]))]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_losses_to_the_bit(reentrant: bool) -> None:
    reference = trained(fusible.convert(LLAMA.make(), DELAYED))
    model = fusible.convert(LLAMA.make(), DELAYED)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert trained(model) == reference


def test_a_repeated_forward_follows_the_autocast_that_the_first_one_was_in() -> None:
    model = fusible.convert(LLAMA.make(), DELAYED)
    model.activation_checkpointing_enable({"use_reentrant": False})
    plain = LLAMA.make()
    with fusible.autocast(enabled=False):
        loss = model.train()(**INPUTS).loss
    loss.backward()
    plain.train()(**INPUTS).loss.backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(found.grad, wanted.grad, rtol=1e-3, atol=1e-5)  # type: ignore[arg-type]  # pyright: ignore


def test_the_autocast_around_a_call_decides() -> None:
    model, reference = fusible.convert(LLAMA.make(), DELAYED), logits(LLAMA.make(), INPUTS)
    with fusible.autocast(enabled=False):
        assert logits(model, INPUTS).sub(reference).abs().max() < 1e-5
    own = logits(model, INPUTS)
    with fusible.autocast(recipe=fusible.NVFP4BlockScaling()):
        other = logits(model, INPUTS)
    assert (other - reference).norm() > 2 * (own - reference).norm() > 0
    unconverted = fusible.convert(LLAMA.make())
    with fusible.autocast(recipe=fusible.Float8CurrentScaling()):
        assert (logits(unconverted, INPUTS) - reference).norm() > 0.01


def test_a_second_conversion_gives_another_recipe_and_takes_what_is_new() -> None:
    model = fusible.convert(LLAMA.make(), DELAYED, exclude="mlp")
    first = len(fusible.conversion_report(model).converted)
    logits(model, INPUTS)
    fusible.convert(model, fusible.NVFP4BlockScaling())
    assert len(fusible.conversion_report(model).converted) > first
    assert torch.equal(logits(model, INPUTS), logits(fusible.convert(LLAMA.make(), fusible.NVFP4BlockScaling()), INPUTS))
    fusible.convert(model)
    assert logits(model, INPUTS).sub(logits(LLAMA.make(), INPUTS)).abs().max() < 1e-5


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_converted_too_and_goes_its_own_way(copied: Any) -> None:
    model = fusible.convert(LLAMA.make(), DELAYED)
    trained(model)
    other = copied(model)
    assert trained(other) == trained(model)
    fusible.convert(other, undo=True)
    assert type(other.model.norm).__name__ == "LlamaRMSNorm" and type(model.model.norm).__name__ == "FusibleLlamaRMSNorm"
    assert torch.equal(logits(fusible.convert(model, undo=True), INPUTS), logits(other, INPUTS))


def test_training_goes_on_to_the_bit_with_the_scaling_states() -> None:
    model = fusible.convert(LLAMA.make(), DELAYED)
    trained(model)
    weights, states = copy.deepcopy(model.state_dict()), scaling_states(model)
    reference = trained(model)
    other = fusible.convert(LLAMA.make(seed=4), DELAYED)
    other.load_state_dict(weights)
    load_scaling_states(other, states)
    assert trained(other) == reference
    anew = fusible.convert(LLAMA.make(seed=4), DELAYED)
    anew.load_state_dict(weights)
    assert trained(anew) != reference


def test_scaling_states_of_another_model_are_refused() -> None:
    model = fusible.convert(LLAMA.make(), DELAYED)
    trained(model)
    states = scaling_states(model)
    other = fusible.convert(LLAMA.make(), DELAYED, exclude="mlp")
    with pytest.raises(fusible.errors.CheckpointError, match="states of its modules alone"):
        load_scaling_states(other, states)
    assert not scaling_states(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_is_moved_to_another_precision_before_or_after(dtype: torch.dtype) -> None:
    after = fusible.convert(LLAMA.make(), DELAYED)
    logits(after, INPUTS)
    y = logits(after.to(dtype), INPUTS)
    assert y.dtype is dtype
    assert torch.equal(y, logits(fusible.convert(LLAMA.make().to(dtype), DELAYED), INPUTS))


def test_a_model_without_data_is_converted_and_filled_later() -> None:
    with torch.device("meta"):
        model = LLAMA.make()
    fusible.convert(model, DELAYED)
    model.to_empty(device="cpu")
    filled = LLAMA.make()
    model.load_state_dict(filled.state_dict())
    for name, buffer in filled.named_buffers():
        model.get_buffer(name).copy_(buffer)
    assert torch.equal(logits(model, INPUTS), logits(fusible.convert(filled, DELAYED), INPUTS))
    with torch.device("meta"):
        assigned = fusible.convert(LLAMA.make(), DELAYED)
    assigned.load_state_dict(filled.state_dict(), assign=True)
    for name, buffer in filled.named_buffers():
        assigned.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer
    assert torch.equal(logits(assigned, INPUTS), logits(model, INPUTS))


def test_frozen_layers_get_no_gradient() -> None:
    model = fusible.convert(LLAMA.make(), DELAYED)
    model.requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(True)
    model(**INPUTS).loss.backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == {
        f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")
    }


def test_under_torchs_autocast_losses_are_those_of_bf16() -> None:
    reference = LLAMA.make()(**INPUTS).loss
    model = fusible.convert(LLAMA.make())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**INPUTS).loss
        assert model.model.norm(torch.randn(2, 64)).dtype is torch.float32
    loss.backward()
    assert abs(loss - reference) < 2**-6 * reference
    assert model.model.layers[0].mlp.up_proj.weight.grad.dtype is torch.float32


def test_weights_held_in_8_bits_alone_give_near_logits() -> None:
    model, reference = fusible.convert(LLAMA.make()), logits(LLAMA.make(), INPUTS)
    fusible.pytorch.quantized_parameters.quantize_parameters(model)
    # Fourteen products, each with a weight that is off by 2^-4 / sqrt 3 in the mean.
    assert 0 < (logits(model, INPUTS) - reference).norm() / reference.norm() < (14**0.5) * 2**-4 / 3**0.5


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*pin_memory:UserWarning")
def test_trainer_trains_saves_and_resumes(tmp_path: Path) -> None:
    with without_nvidias_package():
        from transformers import Trainer, TrainingArguments

    rows = [{key: value[i] for key, value in LLAMA.inputs(seed).items()} for seed in range(3) for i in range(2)]
    options = {"per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "learning_rate": 1e-2, "save_steps": 2, "logging_steps": 1}
    made = TrainingArguments(str(tmp_path), max_steps=4, bf16=True, disable_tqdm=True, **options)
    trainer = Trainer(fusible.convert(LLAMA.make(), DELAYED), made, train_dataset=rows)
    trainer.train()
    told = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(told) == 4 and told[-1] < told[0]
    again = Trainer(fusible.convert(LLAMA.make(seed=7), DELAYED), made, train_dataset=rows)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    after = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
    assert max(abs(a - b) for a, b in zip(after[-2:], told[-2:], strict=True)) < 0.05 * told[0]
