"""Programs that are written for Tripy, and import it as ``nvtripy``: they run unmodified, and compute what torch does in float64."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import tripy_twins as twins
from doc_pages import ROOT
from torch import nn
from torch.nn import functional as F
from tripy_segment_twin import Segmenter

PROGRAMS = ROOT / "tests" / "integration" / "tripy_programs"
EPSILON = 2.0**-23


def ran(name: str, tmp_path: Path, *options: int) -> tuple[dict[str, np.ndarray], str]:
    """What a program has written, and what it has printed."""
    out = tmp_path / "out.npz"
    command = [sys.executable, "-W", "error", "-m", "fusible", "run", "--tripy", str(PROGRAMS / f"{name}.py"), str(out), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    with np.load(out) as found:
        return dict(found), done.stdout


def agrees(got: np.ndarray, exact: torch.Tensor, narrow: torch.Tensor) -> None:
    """``got`` is as near to float64 as torch itself in float32, to a factor of 16 for the other order of its sums."""
    error = max((narrow.double() - exact).abs().max().item(), EPSILON * exact.abs().max().item())
    np.testing.assert_allclose(got, exact.numpy(), rtol=0, atol=16 * error)
    assert 16 * error < 1e-3 * exact.abs().max().item()


def loaded(twin: nn.Module, found: dict[str, np.ndarray], at: str = "") -> tuple[nn.Module, nn.Module]:
    """The twin in float64 and in float32, with the weights that a program has written, each of them used. ``at``: where their names begin."""
    own = {name[len(at) :]: torch.from_numpy(value) for name, value in found.items() if name.startswith(at) and "." in name}
    missing, unexpected = twin.load_state_dict(own, strict=False)
    assert not unexpected and all(name.endswith("num_batches_tracked") for name in missing)
    return copy.deepcopy(twin).double().eval(), twin.eval()


def test_the_programs_know_tripy_alone() -> None:
    for path in PROGRAMS.glob("*.py"):
        imports = [line.split()[1] for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
        assert "nvtripy" in imports and set(imports) <= {"math", "sys", "numpy", "nvtripy", "torch"}


def gpt(weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """The logits of ``gpt.py`` by torch, in the dtype of ``weights``."""
    heads, width = 4, 48

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (width,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    x = weights["transformer.wte.weight"][tokens] + weights["transformer.wpe.weight"][: tokens.shape[1]]
    for i in range(2):
        at = f"transformer.h.{i}"
        parts = linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn").chunk(3, -1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(mixed, f"{at}.attn.c_proj")
        x = x + linear(F.gelu(linear(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc")), f"{at}.mlp.c_proj")
    return linear(norm(x, "transformer.ln_f"), "lm_head")


def test_a_gpt_generates_what_torch_does(tmp_path: Path) -> None:
    found, said = ran("gpt", tmp_path)
    logits, tokens = found.pop("logits"), torch.from_numpy(found.pop("tokens")).long()
    narrow = {name: torch.from_numpy(value) for name, value in found.items()}
    wide = {name: value.double() for name, value in narrow.items()}
    assert tokens.shape == (1, 10) and logits.shape == (1, 9, 61)
    agrees(logits, gpt(wide, tokens[:, :-1]), gpt(narrow, tokens[:, :-1]))
    for length in range(5, 10):
        assert gpt(wide, tokens[:, :length])[0, -1].argmax() == tokens[0, length]
    assert f"tokens: {tokens.tolist()}" in said and "Executable(tokens: " in said


def windows(weights: dict[str, torch.Tensor], image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of ``windows.py`` by torch, in the dtype of ``weights``: a window at a time."""
    side, heads, width = 4, 2, 16
    x = F.conv2d(image, weights["patch.weight"], weights["patch.bias"], padding=1).permute(0, 2, 3, 1)
    for i in range(2):
        at = f"blocks.{i}"
        normal = F.layer_norm(x, (width,), weights[f"{at}.norm.weight"], weights[f"{at}.norm.bias"])
        tall, wide = (math.ceil(n / side) * side for n in x.shape[1:3])
        padded = F.pad(normal, (0, 0, 0, wide - x.shape[2], 0, tall - x.shape[1]))
        mixed = torch.empty_like(padded)
        for row in range(0, tall, side):
            for column in range(0, wide, side):
                block = padded[:, row : row + side, column : column + side].reshape(1, side * side, width)
                qkv = F.linear(block, weights[f"{at}.qkv.weight"], weights[f"{at}.qkv.bias"]).reshape(1, side * side, 3, heads, -1)
                q, k, v = (qkv[:, :, n].transpose(1, 2) for n in range(3))
                out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1, side, side, width)
                mixed[:, row : row + side, column : column + side] = F.linear(out, weights[f"{at}.proj.weight"], weights[f"{at}.proj.bias"])
        x = x + mixed[:, : x.shape[1], : x.shape[2]]
    fine = F.conv2d(x.permute(0, 3, 1, 2), weights["neck.weight"], weights["neck.bias"])
    pooled = fine.mean((2, 3), keepdim=True)
    return torch.where(fine > pooled, fine, fine.min()), pooled.flatten(1)


def test_windows_of_images_of_any_size_give_what_torch_does(tmp_path: Path) -> None:
    found, said = ran("windows", tmp_path)
    narrow = {name: torch.from_numpy(value) for name, value in found.items() if "." in name}
    wide = {name: value.double() for name, value in narrow.items()}
    for i in range(3):
        image = torch.from_numpy(found[f"image{i}"])
        for name, exact, near in zip(("mask", "pooled"), windows(wide, image.double()), windows(narrow, image), strict=True):
            agrees(found[f"{name}{i}"], exact, near)
    assert "images: 3" in said


@pytest.mark.parametrize(("width", "side"), [(8, 32), pytest.param(32, 96, marks=pytest.mark.slow)])
def test_a_resnet_50_classifies_as_torch_does(width: int, side: int, tmp_path: Path) -> None:
    found, said = ran("resnet50", tmp_path, width, side)
    wide, narrow = loaded(twins.ResNet50(width), found)
    assert sum(isinstance(m, nn.Conv2d) for m in wide.modules()) == 53
    with torch.no_grad():
        for name, images in (("logits2", "images2"), ("logits3", "images3"), ("eager", "images3")):
            x = torch.from_numpy(found[images])[: len(found[name])]
            exact = wide(x.double())
            agrees(found[name], exact, narrow(x))
    assert f"class: {exact.argmax(1).tolist()} of 2 batches" in said


@pytest.mark.parametrize(("width", "side"), [(8, 8), pytest.param(32, 16, marks=pytest.mark.slow)])
def test_a_diffusion_pipeline_draws_what_torch_does(width: int, side: int, tmp_path: Path) -> None:
    found, said = ran("diffusion", tmp_path, width, side)
    wide, narrow = loaded(twins.Diffusion(width), found)
    tokens, noise = torch.from_numpy(found["tokens"]).long(), torch.from_numpy(found["noise"])
    with torch.no_grad():
        exact, near = wide(tokens, noise.double(), (801, 401, 1), 3.0), narrow(tokens, noise, (801, 401, 1), 3.0)
    agrees(found["eager"], exact[0], near[0])
    agrees(found["image"], exact[2], near[2])
    assert f"image: (1, 3, {2 * side}, {2 * side}) after 3 steps" in said


@pytest.mark.parametrize(("width", "scale"), [(8, 1), pytest.param(32, 3, marks=pytest.mark.slow)])
def test_videos_are_segmented_as_by_torch(width: int, scale: int, tmp_path: Path) -> None:
    found, said = ran("segment", tmp_path, width, scale)
    wide, narrow = loaded(Segmenter(width), found)
    points, labels = torch.from_numpy(found["points"]), torch.from_numpy(found["labels"]).long()
    for video, length in enumerate((3, 1)):
        frames = [torch.from_numpy(found[f"frame{video}-{i}"]) for i in range(length)]
        with torch.no_grad():
            exact, near = wide([x.double() for x in frames], points.double(), labels), narrow(frames, points, labels)
        for i in range(length):
            for name, of, approximate in zip(("masks", "scores"), exact[i], near[i], strict=True):
                agrees(found[f"{name}{video}-{i}"], of, approximate)
    assert f"frames: 3 remembered: 3 masks: (1, 3, {6 * scale}, {8 * scale})" in said and "frames: 1 remembered: 1" in said


@pytest.mark.parametrize("name", ["gpt", "windows"])
def test_without_the_name_a_program_finds_no_tripy(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAMS / f"{name}.py"), str(tmp_path / "out.npz")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "No module named 'nvtripy'" in done.stderr
