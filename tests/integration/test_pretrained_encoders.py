"""``from_pretrained`` of encoders, and of encoders with decoders: padding, heads, gradients and held weights, against transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_families import OPERAND, WORDS
from pretrained_models import DECODERS, FAMILIES, drawn, given, reference, saved, told
from test_evaluate import with_tokenizer
from test_pretrained import FP32, close

import fusible
from fusible.cli import main
from fusible.errors import ArgumentError, CheckpointError, ShapeError
from fusible.models import EncoderModel, from_pretrained
from fusible.models.checkpoints import open_checkpoint, write_checkpoint
from fusible.models.weight_formats import WEIGHT_FORMATS
from fusible.quantized import QuantizedTensor

OTHERS = [name for name in FAMILIES if name not in DECODERS]
BERTS = [name for name in OTHERS if name.startswith("bert")]
HELD = [name for name, recipe in WEIGHT_FORMATS.items() if recipe is not None]
ROUNDED = {"nvfp4": OPERAND["nvfp4"], "mxfp4": 2.0**-2}
"""The largest relative error of a weight of 4 bits; of 8 bits it is that of the others."""
SINUSOIDS = "model.encoder.embed_positions.weight"
"""What transformers does not train where it makes a model, and would where it loads one."""
LENGTHS = torch.tensor([24, 9], dtype=torch.int32)


def as_stored(model: Any) -> dict[str, torch.Tensor]:
    """The parameters by the checkpoint's names, of quantized ones the values."""
    found = {name: tensor.detach() for name, tensor in model.stored_parameters()}
    return {name: tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.contiguous() for name, tensor in found.items()}


@pytest.mark.parametrize("name", OTHERS)
def test_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, (ours, inputs) = from_pretrained(saved(name, tmp_path), trainable=True), given(name)
    theirs = type(reference(name)).from_pretrained(tmp_path / name).eval()
    assert model.training and all(p.requires_grad for p in model.parameters())
    outputs = model(*ours), told(theirs(**inputs))
    weights = torch.randn(outputs[1].shape, generator=torch.Generator().manual_seed(2))
    for module, output in zip((model, theirs), outputs, strict=True):
        (output * weights).sum().backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    wanted, found = open_checkpoint(tmp_path / "gradients"), as_stored(model)
    found = {parameter: gradient for parameter, gradient in found.items() if parameter != SINUSOIDS}
    largest = max(wanted.tensor(parameter).abs().max().item() for parameter in found)
    for parameter, gradient in found.items():
        # Of a sum over tokens; where all of it cancels (biases of keys), what is left is rounding of the others.
        torch.testing.assert_close(gradient, wanted.tensor(parameter), rtol=2e-4, atol=1e-5 * largest, msg=parameter)


@pytest.mark.parametrize("recipe", [fusible.DelayedScaling(), fusible.MXFP8BlockScaling()], ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("name", ["bert", "vit", "whisper", "t5"])
def test_a_trainable_model_trains_under_a_recipe(name: str, recipe: fusible.Recipe, tmp_path: Path) -> None:
    """And does not write to the file that it came from."""
    folder = saved(name, tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    model, plain, (ours, _) = from_pretrained(folder, recipe, trainable=True), from_pretrained(folder), given(name)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.05), []
    labels = torch.randint(2, model(*ours).shape[:-1], generator=torch.Generator().manual_seed(3))
    for _ in range(4):
        outputs = model(*ours)
        loss = fusible.CrossEntropyLoss()(outputs.flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[3] < losses[2] < losses[1] < losses[0]
    with torch.no_grad():  # the recipe is at work: it rounds
        assert not torch.equal(from_pretrained(folder, recipe, trainable=True)(*ours), plain(*ours))
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("name", OTHERS)
def test_held_weights_are_those_of_a_model_of_their_values(name: str, held: str, tmp_path: Path) -> None:
    """And as far from the weights as the format rounds."""
    model, (ours, inputs) = from_pretrained(saved(name, tmp_path), WEIGHT_FORMATS[held]), given(name)
    plain: Any = from_pretrained(tmp_path / name)
    quantized = [p for p in model.parameters() if isinstance(p, QuantizedTensor)]
    stacks = [plain.body] if isinstance(plain, EncoderModel) else [plain.encoder, plain.decoder, plain.memory]
    linears = [p for stack in stacks for p in stack.parameters() if p.dim() == 2]
    assert len(quantized) == len(linears) > 0
    values, config = as_stored(model), open_checkpoint(tmp_path / name).config
    write_checkpoint(tmp_path / "values", config, values)
    theirs = type(reference(name)).from_pretrained(tmp_path / "values").eval()
    with torch.no_grad():
        found, wanted = model(*ours), told(theirs(**inputs))
        torch.testing.assert_close(found, wanted, rtol=0, atol=96**0.5 * 2.0**-20 * wanted.abs().max().item())
        exact = plain(*ours)
    error = ((found - exact).norm() / exact.norm()).item()
    # Each product's error is independent, and adds no more to the stream than that holds already.
    assert 2.0**-10 < error < math.sqrt(len(linears)) * ROUNDED.get(held, 2.0**-4)


@pytest.mark.parametrize("name", BERTS)
def test_padding_takes_no_part(name: str, tmp_path: Path) -> None:
    """As lengths, as a mask, and packed; with types of tokens."""
    model, tokens, types = from_pretrained(saved(name, tmp_path)), drawn(2, 24), torch.randint(2, (2, 24))
    mask = torch.arange(24) < LENGTHS[:, None]
    with torch.no_grad():
        wanted = told(reference(name)(tokens, attention_mask=mask.long(), token_type_ids=types))
        found = model(tokens, LENGTHS, types)
        packed = model(tokens[mask], LENGTHS, types[mask])
        assert torch.equal(model(tokens, mask, types), found)
    if wanted.dim() == 3:
        assert not found[~mask].any()
        close(found[mask], wanted[mask], FP32)
        close(packed, wanted[mask], FP32)
    else:
        close(found, wanted, FP32)
        close(packed, wanted, FP32)


def test_hidden_states_and_what_a_pooler_makes_of_them(tmp_path: Path) -> None:
    model, tokens = from_pretrained(saved("bert_model", tmp_path)), drawn(2, 24)
    assert isinstance(model, EncoderModel)
    with torch.no_grad():
        wanted = reference("bert_model")(tokens)
        hidden = model.encode(tokens)
        close(hidden, wanted.last_hidden_state, FP32)
        close(model.pool(hidden), wanted.pooler_output, FP32)
        close(model.pool(hidden.flatten(0, 1), torch.tensor([24, 24])), wanted.pooler_output, FP32)
        same = from_pretrained(saved("bert", tmp_path))
        assert isinstance(same, EncoderModel)
        close(same.encode(tokens), reference("bert").bert(tokens).last_hidden_state, FP32)
        seeing, (ours, theirs) = from_pretrained(saved("vit_model", tmp_path)), given("vit_model")
        assert isinstance(seeing, EncoderModel)
        close(seeing.pool(seeing(*ours)), reference("vit_model")(**theirs).pooler_output, FP32)
    with pytest.raises(ArgumentError, match="pool: expected a model with a pooler, got one without"):
        same.pool(hidden)


def test_older_names_of_norms_are_read(tmp_path: Path) -> None:
    folder = saved("bert", tmp_path)
    checkpoint = open_checkpoint(folder)
    older = {name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta") for name in checkpoint.names}
    write_checkpoint(tmp_path / "older", checkpoint.config, {older[name]: checkpoint.tensor(name) for name in checkpoint.names})
    assert any(name.endswith("gamma") for name in open_checkpoint(tmp_path / "older").names)
    tokens = drawn(2, 24)
    with torch.no_grad():
        assert torch.equal(from_pretrained(tmp_path / "older")(tokens), from_pretrained(folder)(tokens))


def test_a_head_of_the_table_is_one_parameter(tmp_path: Path) -> None:
    model: Any = from_pretrained(saved("bert", tmp_path), trainable=True)
    tables = [p for p in model.parameters() if p.shape == (WORDS, 64) and p is not model.inputs.positions.weight]
    assert len(tables) == 1


def test_calls_that_do_not_fit_are_one_sentence(tmp_path: Path) -> None:
    model = from_pretrained(saved("bert_classifier", tmp_path))
    with pytest.raises(ShapeError, match=r"tokens of an encoder: expected \[batch, seq\], or \[tokens\] with seq_lens, got \[4\]"):
        model(drawn(4))
    with pytest.raises(ArgumentError, match="a sequence: expected at most 128 tokens, got 129"):
        model(drawn(1, 129))
    with pytest.raises(ShapeError, match=r"token_types: expected \[1, 8\], as the tokens are, got \[8\]"):
        model(drawn(1, 8), None, torch.zeros(8, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="seq_lens: expected at least one token in each sequence, got 0"):
        model(drawn(4), torch.tensor([4, 0]))
    seeing = from_pretrained(saved("vit", tmp_path))
    with pytest.raises(ShapeError, match=r"pixels of a model that sees: expected \[batch, 3, 16, 16\], got \[1, 3, 16, 8\]"):
        seeing(torch.zeros(1, 3, 16, 8))
    with pytest.raises(ArgumentError, match="a call of a model that sees: expected pixels alone, got seq_lens"):
        seeing(torch.zeros(1, 3, 16, 16), LENGTHS)


CHANGES: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "another head",
        "bert",
        {"architectures": ["BertForQuestionAnswering"]},
        "architectures of config.json of a bert model: expected one of BertModel, BertForMaskedLM, BertForSequenceClassification, got BertForQ.*; "
        "load it by transformers, and convert it by fusible.convert",
    ),
    ("no architecture", "bert", {"architectures": None}, "architectures of config.json of a bert model: expected one of BertModel, .*, got none"),
    ("relative positions", "bert", {"position_embedding_type": "relative_key"}, "position_embedding_type .* of a bert model: expected 'absolute'"),
    ("a decoder", "bert", {"is_decoder": True}, "is_decoder .*: expected False, got True"),
    ("another activation", "bert", {"hidden_act": "mish"}, "hidden_act of config.json of a bert model: expected one of gelu, gelu_new"),
    ("another head of pictures", "vit", {"architectures": ["ViTForMaskedImageModeling"]}, "expected one of ViTModel, ViTForImageClassification, got"),
    ("parts of patches", "vit", {"patch_size": 3}, r"patch_size of config.json of a vit model: expected divisors of image_size, \(16, 16\), got 3"),
    ("three sizes", "vit", {"image_size": [1, 2, 3]}, r"image_size .*: expected an integer of at least 1, or two, got \[1, 2, 3\]"),
    ("another picture", "vit", {"image_size": 8}, r"position_embeddings: expected shape \[1, 5, 64\], as config.json says, got \[1, 17, 64\]"),
    ("another pooler", "vit_model", {"pooler_act": "relu"}, "pooler_act .*: expected 'tanh', got 'relu'"),
    ("another end of speech", "whisper", {"architectures": ["WhisperForAudioClassification"]}, "expected WhisperForConditionalGeneration, got Whi"),
    ("an encoder alone", "t5", {"architectures": ["T5EncoderModel"]}, "of a t5 model: expected T5ForConditionalGeneration, got T5EncoderModel"),
    (
        "another gate",
        "t5",
        {"feed_forward_proj": "gated-mish"},
        "feed_forward_proj of .* a t5 model: expected gated-, or not, and one of gelu, .*, got",
    ),
    ("no token", "t5", {"eos_token_id": "end"}, "eos_token_id of config.json of a t5 model: expected a token, or several, got 'end'"),
    ("other labels", "bert_classifier", {"id2label": {"0": "a"}}, r"classifier.weight: expected shape \[1, 64\], as config.json says, got \[5, 64\]"),
]


@pytest.mark.parametrize(("name", "changes", "message"), [row[1:] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_a_config_that_does_not_fit_is_one_sentence(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=message) as caught:
        from_pretrained(folder)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def commands(folder: Path) -> dict[str, list[str]]:
    """Those that go on from text."""
    text, documents = folder.parent / "text.txt", folder.parent / "documents.jsonl"
    text.write_text("abcd " * 200)
    documents.write_text('{"text": "abcd"}\n' * 40)
    given = ["--data", str(documents), "--out", str(folder.parent / "out"), "--seq-len", "16"]
    return {
        "generate": ["generate", str(folder), "--prompt", "abc"],
        "serve": ["serve", str(folder), "--port", "0"],
        "evaluate": ["evaluate", str(folder), "--text", str(text), "--window", "32"],
        "train": ["train", "--model", str(folder), *given],
        "train config.json": ["train", "--model", str(folder / "config.json"), "--tokenizer", str(folder), *given],
    }


GO_ON = ["generate", "serve", "evaluate", "train", "train config.json"]


@pytest.mark.parametrize(
    ("name", "command"), [(name, command) for name in ("bert", "vit", "whisper", "t5") for command in GO_ON if (name, command) != ("t5", "generate")]
)
def test_commands_that_go_on_from_text_refuse_in_one_sentence(name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_tokenizer(saved(name, tmp_path))
    assert main(commands(folder)[command]) == 2
    of = "config.json" if "config" in command else f"DIR {folder}"
    wanted = f"{of}: expected a causal language model, got a {name} model; call it from Python, as fusible.from_pretrained gives it.\n"
    assert capsys.readouterr().err == wanted
