"""``export_program``: programs of ``torch.export`` compute what the models do, on other sizes, and where Fusible is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from convert_families import WORDS, transformers
from exported_models import FORMATS, bound, elsewhere
from pretrained_models import DECODERS, FAMILIES, drawn, given, reference, saved

import fusible
from fusible.compat import te_modules
from fusible.errors import ArgumentError, DTypeError
from fusible.models import export_program, from_pretrained

QUICK = ["gemma2_window", "gpt2"]
OTHER_SIZES = [drawn(3, 11), drawn(1, 2, seed=4)]
"""Not those that a program was traced with."""


def _check(program: Any, model: Any) -> None:
    for tokens in OTHER_SIZES:
        with torch.no_grad():
            found, want = program.module()(tokens), model(tokens)
        want = getattr(want, "logits", want)
        torch.testing.assert_close(found, want, rtol=0, atol=bound(want))


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in DECODERS if name not in QUICK)])
def test_a_family_is_a_program_of_any_size(name: str, tmp_path: Path) -> None:
    model = from_pretrained(saved(name, tmp_path))
    program = export_program(model)
    _check(program, model)
    assert not any("fusible" in str(node.target) for node in program.graph.nodes)


def _others() -> list[Any]:
    quick = ("bert", "vit_model", "whisper", "t5")
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in FAMILIES if name not in DECODERS]


@pytest.mark.parametrize("name", _others())
def test_an_encoder_is_a_program_of_any_size(name: str, tmp_path: Path) -> None:
    """Of other pictures, speech and tokens than its own examples, which are few and 0."""
    model, (ours, _) = from_pretrained(saved(name, tmp_path), FORMATS["mxfp8"], dtype=torch.float32), given(name)
    program = export_program(model)
    for inputs in (ours, [value[:1] for value in ours]):
        with torch.no_grad():
            found, want = program.module()(*inputs), model(*inputs)
        torch.testing.assert_close(found, want, rtol=0, atol=bound(want))
    assert not any("fusible" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "nvfp4"), ("mixtral", "mxfp8"), *(pytest.param("llama", name, marks=pytest.mark.slow) for name in FORMATS if name != "nvfp4")],
)
def test_weights_stay_in_their_format(family: str, name: str, tmp_path: Path) -> None:
    model = from_pretrained(saved(family, tmp_path), FORMATS[name], dtype=torch.float32)
    before, parameters = model(OTHER_SIZES[0]), dict(model.named_parameters())
    program = export_program(model)
    _check(program, model)
    held = sum(tensor.nbytes for tensor in program.state_dict.values())
    # a tile's scale is repeated for its lines, one of 4 bytes for 128 elements; those of MXFP8 are of 2 bytes, and not padded
    assert held <= 1.1 * fusible.parameter_bytes(model)
    now = dict(model.named_parameters())
    assert now.keys() == parameters.keys() and all(now[own] is parameters[own] for own in now) and not list(model.buffers())
    assert torch.equal(model(OTHER_SIZES[0]), before)


@pytest.mark.parametrize("name", ["mxfp8", pytest.param("bf16", marks=pytest.mark.slow), pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_a_saved_program_runs_where_fusible_is_not(name: str, tmp_path: Path) -> None:
    model = from_pretrained(saved("qwen3", tmp_path), FORMATS[name], dtype=torch.float32)
    torch.export.save(export_program(model), tmp_path / "model.pt2")
    for found, tokens in zip(elsewhere("program", tmp_path / "model.pt2", OTHER_SIZES), OTHER_SIZES, strict=True):
        want = model(tokens)
        torch.testing.assert_close(found, want, rtol=0, atol=bound(want))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's about its own code
@pytest.mark.parametrize("name", FORMATS)
def test_a_compiled_package_runs_where_fusible_is_not(name: str, tmp_path: Path) -> None:
    model = from_pretrained(saved("llama", tmp_path), FORMATS[name], dtype=torch.float32)
    inductor = pytest.importorskip("torch._inductor")
    inductor.aoti_compile_and_package(export_program(model), package_path=str(tmp_path / "model.pt2"))
    for found, tokens in zip(elsewhere("package", tmp_path / "model.pt2", OTHER_SIZES), OTHER_SIZES, strict=True):
        want = model(tokens)
        torch.testing.assert_close(found, want, rtol=0, atol=bound(want))


def _converted(name: str, recipe: fusible.Recipe | None) -> Any:
    model = DECODERS[name].make(dtype=torch.float32).eval()
    model.load_state_dict(reference(name).state_dict())
    return fusible.convert(model, recipe)


@pytest.mark.parametrize("name", ["qwen2", pytest.param("gpt2", marks=pytest.mark.slow), pytest.param("mixtral", marks=pytest.mark.slow)])
def test_a_converted_model_is_a_program(name: str) -> None:
    model = _converted(name, None)
    _check(export_program(model, drawn(2, 8)), model)


@pytest.mark.parametrize("recipe", [fusible.DelayedScaling(), pytest.param(fusible.Float8CurrentScaling(), marks=pytest.mark.slow)], ids=str)
def test_a_recipe_quantizes_in_the_program(recipe: fusible.Recipe) -> None:
    model = _converted("llama", recipe)
    for seed in range(2):  # delayed scaling has seen something
        model.train()(drawn(2, 8, seed=seed)).logits.sum().backward()
    model.eval()
    program = export_program(model, drawn(2, 8))
    tokens = OTHER_SIZES[0]
    with torch.no_grad():
        found, want, exact = program.module()(tokens), model(tokens).logits, reference("llama")(tokens).logits
    # A number that lies between two codes may fall to the other one, as programs divide by scales; without the quantization of activations the
    # programs would be apart by as much as that changes, some 0.7 of the whole.
    assert (found - want).norm() < 0.5 * (want - exact).norm()
    weight = next(p for name, p in model.named_parameters() if name.endswith("mlp.up_proj.weight"))
    assert not any(tensor.shape == weight.shape and tensor.dtype is torch.float32 for tensor in program.state_dict.values())


@pytest.mark.slow
def test_held_weights_of_a_converted_model_stay(tmp_path: Path) -> None:
    model = fusible.quantize_parameters(_converted("llama", None), recipe=FORMATS["mxfp8"])
    program = export_program(model, drawn(2, 8))
    _check(program, model)
    assert sum(tensor.dtype is torch.float8_e4m3fn for tensor in program.state_dict.values()) == 2 * 7


def test_torch_export_itself_takes_a_model_in_high_precision(tmp_path: Path) -> None:
    model = from_pretrained(saved("llama", tmp_path))
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    with torch.no_grad():
        _check(torch.export.export(model, (drawn(2, 8),), dynamic_shapes=(sizes,)), model)


def test_torch_export_itself_keeps_operators_of_fusibles_for_8_bits(tmp_path: Path) -> None:
    small = from_pretrained(saved("llama", tmp_path), FORMATS["fp8"])
    with torch.no_grad():
        program, want = torch.export.export(small, (drawn(2, 8),)), small(drawn(2, 8))
        torch.testing.assert_close(program.module()(drawn(2, 8)), want, rtol=0, atol=bound(want))  # small products are torch's there
    assert any("fusible" in str(node.target) for node in program.graph.nodes)


def test_layers_by_nvidias_names_are_exported() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(te_modules.LayerNormLinear(32, 64, device="cpu"), te_modules.LayerNormMLP(64, 96, device="cpu", activation="swiglu"))
    x = torch.randn(8, 32)
    with torch.no_grad():
        program, want = export_program(model.eval(), x), model(x)
        torch.testing.assert_close(program.module()(x), want, rtol=0, atol=bound(want))
    assert not any("fusible" in str(node.target) for node in program.graph.nodes)


def test_bf16_is_rounded_where_the_model_rounds(tmp_path: Path) -> None:
    model = from_pretrained(saved("llama", tmp_path), dtype=torch.bfloat16)
    tokens = OTHER_SIZES[0]
    with torch.no_grad():
        found, want = export_program(model).module()(tokens), model(tokens)
    exact = reference("llama")(tokens).logits
    assert found.dtype is torch.bfloat16
    assert (found.float() - want.float()).norm() < (want.float() - exact).norm() * 2**0.5 * 1.1  # two independent roundings at most


class _Odd(torch.nn.Module):
    def __init__(self, *modules: torch.nn.Module) -> None:
        super().__init__()
        self.body = fusible.Sequential(*modules)

    def forward(self, x: torch.Tensor, seq_lens: torch.Tensor | None = None) -> torch.Tensor:
        return self.body(x, seq_lens)


def test_what_no_program_has_is_one_sentence(tmp_path: Path) -> None:
    x = torch.randn(2, 8, 32)
    model = from_pretrained(saved("llama", tmp_path))
    linear = _Odd(fusible.Linear(32, 32)).eval()
    dropout = _Odd(fusible.Linear(32, 32), fusible.Dropout(0.1)).eval()
    dropout.body[1].train()
    lengths = torch.tensor([8, 8], dtype=torch.int32)
    for wrong, inputs, error, text in [
        (model.train(), (), ArgumentError, r"a model to export: expected inference, got one in training mode; call model.eval\(\) first\."),
        (linear, (), ArgumentError, r"a model to export: expected an example of each input, got none; .*\."),
        (3, (), DTypeError, r"a model to export: expected an nn.Module, got a int; give the model itself\."),
        (linear, (3,), DTypeError, r"the inputs of a model to export: expected tensors, got a int; give examples\."),
        (linear, (x, lengths), ArgumentError, r"an exported call of Linear: expected whole sequences of one length, got seq_lens; .*\."),
        (dropout, (x,), ArgumentError, r"a model to export: expected one that drops nothing, got Dropout\(.*\); call model.eval\(\) first\."),
    ]:
        with pytest.raises(error, match=text):
            export_program(wrong, *inputs)  # type: ignore[arg-type]
    with fusible.autocast(recipe=fusible.MXFP8BlockScaling()), pytest.raises(ArgumentError, match=r"expected delayed or current scaling, got e4m3"):
        export_program(linear, x)
    assert linear.body[0].weight is not None  # it is put back where an export fails


def test_a_program_refuses_what_is_longer_than_its_context(tmp_path: Path) -> None:
    model: Any = from_pretrained(saved("gpt2", tmp_path))
    program = export_program(model)
    with pytest.raises(Exception, match=str(model.context)):
        program.module()(torch.zeros(1, model.context + 1, dtype=torch.int64))


transformers.logging.set_verbosity_error()
assert WORDS > 3
