"""Files of state dicts that NVIDIA's package writes, read without it, and files that are written for it; of its older versions, too."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from te_client import RECIPES_OF_CLIENT, package_on, recipe_for
from te_states import MODULES, OPTIONS, SIZE, stepped

from fusible.compat import read_state_dict, te_modules, write_state_dict
from fusible.compat.nvidia_state import read_pickled_state, read_state
from fusible.errors import CheckpointError, MissingFileError
from fusible.quantized import Float8CurrentScalingQuantizer, HybridQuantizer, IdentityQuantizer, QuantizedTensor
from fusible.tex import DType

LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in MODULES},
    "TransformerLayer, joined": ("TransformerLayer", {"fuse_qkv_params": True}),
    "MultiheadAttention": ("MultiheadAttention", {"input_layernorm": True}),
}
EACH = pytest.mark.parametrize("name", LAYERS)
ARGUMENTS = {**MODULES, "MultiheadAttention": (SIZE, 4)}
TRACES: list[Any] = []


@pytest.fixture
def te() -> Iterator[Any]:
    with package_on((10, 0)) as te:
        yield te


def made(of: Any, name: str) -> torch.nn.Module:
    cls, options = LAYERS[name]
    more = {"TransformerLayer": {"hidden_dropout": 0.0, "attention_dropout": 0.0}, "MultiheadAttention": {"attention_dropout": 0.0}}.get(cls, {})
    return getattr(of, cls)(*ARGUMENTS[cls], **options, **more)


def trained(te: Any, name: str) -> torch.nn.Module:
    module = made(te, name)
    for number in range(3):
        stepped(te, module, number)
    return module


def check_goes_on(te: Any, one: torch.nn.Module, other: torch.nn.Module) -> None:
    for number in range(3, 5):
        wanted = stepped(te, one, number)
        torch.testing.assert_close(stepped(te, other, number), wanted, rtol=2.0**-20, atol=2.0**-20 * wanted.abs().max().item())


def written(state: dict[str, Any], folder: Path, form: str) -> Path:
    path = folder / f"state.{form}"
    if form == "safetensors":
        save_file({key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "pt")
    return path


@EACH
@pytest.mark.parametrize("form", ["pt", "old", "safetensors"])
def test_what_the_package_writes_is_read_without_it(te: Any, name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = trained(te, name), made(te_modules, name)
    path = written(theirs.state_dict(), tmp_path, form)
    for module in [each for each in sys.modules if each.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, module)
    ours.load_state_dict(read_state_dict(path), strict=form != "safetensors")  # None has no place in safetensors
    monkeypatch.undo()
    check_goes_on(te, theirs, ours)


@EACH
def test_what_is_written_for_the_package_it_reads(te: Any, name: str, tmp_path: Path) -> None:
    ours, theirs = made(te_modules, name), made(te, name)
    for number in range(3):
        stepped(te, ours, number)
    write_state_dict(tmp_path / "ours.pt", ours.state_dict())
    held = torch.load(tmp_path / "ours.pt")  # with weights_only
    assert list(held) == list(theirs.state_dict())
    theirs.load_state_dict(held)
    check_goes_on(te, ours, theirs)


def test_python_itself_reads_the_states_that_are_written(te: Any) -> None:
    """As the package does where it is told that a checkpoint is trusted."""
    ours = made(te_modules, "LayerNormMLP")
    for number in range(3):
        stepped(te, ours, number)
    data = ours.state_dict()["_extra_state"].numpy().tobytes()
    state = pickle.loads(data)
    assert type(state["recipe"]) is type(recipe_for(te, "delayed")) and state["recipe"].amax_history_len == OPTIONS["amax_history_len"]
    assert torch.equal(state["scale_fwd"], read_state(data)["scale_fwd"])


# ---- older versions -----------------------------------------------------------------------------------------------------------------------------


def as_file(state: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    return file


def of_1x(state: dict[str, Any] | None) -> io.BytesIO:
    """As versions 1.x write it: without a recipe, with reciprocals of scales."""
    if state is None:
        return as_file(None)
    kept = {key: value for key, value in state.items() if key.startswith(("scale_", "amax_"))}
    inverse = {key.replace("scale", "scale_inv"): value.reciprocal() for key, value in kept.items() if key.startswith("scale_")}
    extra = {key: value for key, value in state["extra_fp8_variables"].items() if isinstance(value, bool | int)}
    return as_file({**kept, **inverse, "extra_fp8_variables": {**extra, "update_amax_and_scale_fwd": True}})


def of_first(state: dict[str, Any] | None) -> Any:
    """The first versions have no scales of outputs."""
    if state is None:
        return None
    places = {"fwd": [0, 1], "bwd": [0]}
    sizes = {"fwd": 3, "bwd": 2}

    def without_outputs(key: str) -> torch.Tensor:
        short = key[-3:]
        value = state[key].unflatten(-1, (-1, sizes[short]))[..., places[short]]
        return value.flatten(-2)

    return [*(without_outputs(key) for key in ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")), {}, True, 0]


AGES = {"1.x": of_1x, "the first": of_first}


def aged(module: torch.nn.Module, age: str) -> dict[str, Any]:
    """The state dict of a module as an older version has it: in 1.x every module has a file."""
    state = module.state_dict()
    for key, value in state.items():
        if key.endswith("_extra_state"):
            held = read_pickled_state(value.numpy().tobytes()) if isinstance(value, torch.Tensor) and value.numel() else None
            state[key] = AGES[age](held)
    return state


@pytest.mark.parametrize("age", AGES)
@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP", "TransformerLayer"])
@pytest.mark.parametrize("way", ["file", "dictionary"])
def test_older_states_are_read(te: Any, age: str, name: str, way: str, tmp_path: Path) -> None:
    theirs, ours = trained(te, name), made(te_modules, name)
    state = aged(theirs, age)
    if way == "file":
        torch.save(state, tmp_path / "aged.pt")
        state = read_state_dict(tmp_path / "aged.pt")
    assert str(ours.load_state_dict(state)) == "<All keys matched successfully>"
    check_goes_on(te, theirs, ours)


def test_an_old_file_is_made_a_present_one(te: Any, tmp_path: Path) -> None:
    """Which the package reads without being told that it is trusted, under Fusible; and with that, by itself."""
    theirs, other = trained(te, "TransformerLayer"), made(te, "TransformerLayer")
    torch.save(aged(theirs, "1.x"), tmp_path / "aged.pt")
    write_state_dict(tmp_path / "present.pt", read_state_dict(tmp_path / "aged.pt"))
    held = torch.load(tmp_path / "present.pt")
    assert all(value.dtype is torch.uint8 for key, value in held.items() if key.endswith("_extra_state"))
    other.load_state_dict(held)
    check_goes_on(te, theirs, other)


@pytest.mark.parametrize("recipe", RECIPES_OF_CLIENT[1:])
def test_a_recipe_without_scales_is_passed_over(te: Any, recipe: str) -> None:
    """Some versions write the recipe of a module that keeps nothing else."""
    state = made(te, "Linear").state_dict()
    alone = pickle.dumps({"recipe": recipe_for(te, recipe), "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": 1}})
    for data in (alone, pickle.dumps(None)):
        state["_extra_state"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        ours = made(te_modules, "Linear")
        assert str(ours.load_state_dict(state)) == "<All keys matched successfully>"
        assert not ours.state_dict()["_extra_state"].numel()


# ---- quantized parameters -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES_OF_CLIENT)
def test_quantized_parameters_go_both_ways(te: Any, recipe: str, tmp_path: Path) -> None:
    with te.quantized_model_init(recipe=recipe_for(te, recipe)):
        theirs = te.Linear(128, 96, params_dtype=torch.bfloat16)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pt")
    held = read_state_dict(tmp_path / "theirs.pt")
    weight: Any = theirs.weight
    assert isinstance(held["weight"], QuantizedTensor) and type(held["weight"]).__name__ == type(weight).__name__
    assert torch.equal(held["weight"].dequantize(), weight.dequantize())
    ours: Any = te_modules.Linear(128, 96, params_dtype=torch.bfloat16)
    ours.load_state_dict(held)
    assert torch.equal(ours.weight, weight.dequantize())

    write_state_dict(tmp_path / "ours.pt", held)
    again = torch.load(tmp_path / "ours.pt")["weight"]
    assert type(again) is type(weight.detach()) and torch.equal(again.dequantize(), weight.dequantize())
    assert again._data.equal(weight._data) if hasattr(weight, "_data") else again._rowwise_data.equal(weight._rowwise_data)
    if getattr(weight, "_quantizer", None) is not None and again._quantizer is not None:
        plain = {name: value for name, value in vars(weight._quantizer).items() if not isinstance(value, torch.Tensor)}
        assert {name: vars(again._quantizer)[name] for name in plain} == plain


def test_parameters_of_1x_are_made_by_a_method_of_their_class(tmp_path: Path) -> None:
    """``Float8Tensor._make_in_reduce_ex`` of four arguments, whose type is a number of the extension's enumeration."""
    data = Float8CurrentScalingQuantizer(DType.kFloat8E4M3)(torch.randn(32, 48))

    class Method:
        pass

    names = {"class": "transformer_engine.pytorch.float8_tensor Float8Tensor", "dtype": "transformer_engine_torch DType"}

    class Writer(vars(pickle)["_Pickler"]):  # type: ignore[misc]
        def save(self, obj: Any, save_persistent_id: bool = True) -> None:
            if not isinstance(obj, Method):
                super().save(obj, save_persistent_id)
                return
            one, other = (name.replace(" ", "\n").encode() + b"\n" for name in names.values())
            self.write(b"c__builtin__\ngetattr\n(c" + one + b"X\x12\x00\x00\x00_make_in_reduce_extR(")
            super().save(data._data)
            self.write(b"c" + other + b"K\x07\x85R")
            super().save(data._scale_inv)
            super().save(torch.bfloat16)
            self.write(b"tR")

    torch.save({"weight": Method()}, tmp_path / "old.pt", pickle_module=type("Module", (), {"Pickler": Writer, "__name__": "module"}))
    found = read_state_dict(tmp_path / "old.pt")["weight"]
    assert found.dtype is torch.bfloat16 and torch.equal(found.dequantize(dtype=torch.float32), data.dequantize(dtype=torch.float32))


def test_what_the_package_has_not_is_not_written(tmp_path: Path) -> None:
    tensor = HybridQuantizer(rowwise_quantizer=Float8CurrentScalingQuantizer(DType.kFloat8E4M3), columnwise_quantizer=IdentityQuantizer())(
        torch.randn(32, 32)
    )
    with pytest.raises(CheckpointError, match=r"^a checkpoint for NVIDIA's package: expected tensors .*, got a HybridQuantizedTensor; dequantize it"):
        write_state_dict(tmp_path / "x.pt", {"weight": tensor})
    assert not (tmp_path / "x.pt").exists()


# ---- files of others ------------------------------------------------------------------------------------------------------------------------------


def trace(*args: Any) -> None:
    TRACES.append(args)


class Payload:
    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = function, args

    def __reduce__(self) -> Any:
        return self.reduced


def payloads() -> dict[str, Any]:
    return {
        "function": Payload(trace, 1),
        "system": Payload(os.system, "true"),
        "getattr": Payload(getattr, DType, "kByte"),
        "in a file": {"x._extra_state": as_file(Payload(trace, 1))},
        "in a pickle": {"x._extra_state": torch.frombuffer(bytearray(pickle.dumps(Payload(trace, 1))), dtype=torch.uint8)},
        "a module": {"model": torch.nn.Linear(2, 2)},
    }


@pytest.mark.parametrize("name", payloads())
def test_nothing_of_a_file_is_run(name: str, tmp_path: Path) -> None:
    TRACES.clear()
    torch.save(payloads()[name], tmp_path / "x.pt")
    if name == "in a pickle":  # it is read where it is loaded
        module = te_modules.Linear(4, 4)
        held = {f"{key.removeprefix('x.')}": value for key, value in read_state_dict(tmp_path / "x.pt").items()}
        with pytest.raises(CheckpointError, match="^the extra state of a module: expected tensors"):
            module.load_state_dict({**module.state_dict(), **held})
    else:
        with pytest.raises(
            CheckpointError, match=r"expected (tensors, plain values and quantized|members of enumerations).*nothing of it was run\.$"
        ):
            read_state_dict(tmp_path / "x.pt")
    assert TRACES == []


def test_the_sentence_names_what_was_refused(tmp_path: Path) -> None:
    torch.save({"x": Payload(os.system, "true"), "y": 1}, tmp_path / "x.pt")
    with pytest.raises(
        CheckpointError, match=r"got what torch reads for no weights \(Trying to load unsupported GLOBAL \w+\.system whose module \w+ is"
    ):
        read_state_dict(tmp_path / "x.pt")
    torch.save({"x": Payload(trace, 1)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"\(Unsupported global: GLOBAL test_te_files\.trace\); use an intact"):
        read_state_dict(tmp_path / "x.pt")


@pytest.mark.parametrize("form", ["pt", "old", "safetensors"])
def test_a_damaged_file_is_told(form: str, tmp_path: Path) -> None:
    path = written({"weight": torch.ones(64, 64)}, tmp_path, form)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=rf"^{path}: expected tensors.*, got .*; use an intact checkpoint"):
        read_state_dict(path)
    with pytest.raises(MissingFileError, match="none.pt: expected a file"):
        read_state_dict(tmp_path / "none.pt")


@pytest.mark.parametrize("extra", [3.0, as_file({"scale_fwd": torch.ones(3)}), [torch.ones(3)]], ids=["number", "half", "short list"])
def test_a_state_of_no_version_is_told(extra: Any) -> None:
    module = te_modules.Linear(4, 4)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"^the _extra_state of Linear: expected (a uint8 tensor, or the file|scales and amaxes)"):
        module.load_state_dict({"weight": torch.zeros(4, 4), "bias": torch.zeros(4), "_extra_state": extra})
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_other_things_of_a_training_are_kept_as_they_are(tmp_path: Path) -> None:
    held = {"model": OrderedDict(weight=torch.ones(2)), "step": 3, "names": ["a", {"b": torch.zeros(1)}], "lr": 0.1}
    torch.save(held, tmp_path / "x.pt")
    found = read_state_dict(tmp_path / "x.pt")
    assert found["step"] == 3 and found["lr"] == 0.1 and torch.equal(found["model"]["weight"], torch.ones(2)) and found["names"][0] == "a"
    assert isinstance(found["model"], OrderedDict) and torch.equal(found["names"][1]["b"], torch.zeros(1))
