"""The examples of the lazy compiler: they run without torch, and agree with the same networks in torch."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import lazy_torch_twins as twins
import numpy as np
import pytest
import torch
from doc_pages import ROOT

import fusible.lazy as tp

EXAMPLES = ROOT / "examples" / "lazy"
FILES = {path.stem for path in EXAMPLES.glob("*.py")}


@pytest.fixture(scope="module")
def example() -> Iterator[Callable[[str], ModuleType]]:
    """The modules of the examples, which import one another as scripts of one folder do."""
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module
    sys.path.remove(str(EXAMPLES))
    for name in FILES:
        sys.modules.pop(name, None)


def test_each_runs_from_a_shell_without_torch() -> None:
    program = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "for name in ('mlp', 'nanogpt', 'resnet', 'unet'):\n"
        "    sys.argv = [name]\n"
        "    print('###', name)\n"
        f"    runpy.run_path({str(EXAMPLES)!r} + '/' + name + '.py', run_name='__main__')\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == "", done.stderr[-4000:]
    said = dict(part.split("\n", 1) for part in done.stdout.split("### ")[1:])
    assert "==== Trace IR ====" in said["mlp"] and "it gives the same: True" in said["mlp"]
    assert "120,576 parameters" in said["nanogpt"] and "b'To be, or not to be" in said["nanogpt"]
    assert said["resnet"].count("likeliest classes") == 2
    assert said["unet"].count("standard deviation") == 8


def agrees(got: np.ndarray, twin: torch.nn.Module, model: tp.Module, *inputs: torch.Tensor) -> None:
    """``got`` is what the twin computes in float64 with the weights of ``model``, as near as the twin itself comes in float32.

    Sums are taken in another order there: sixteen times its error are allowed, and no less than one epsilon of the largest output.
    """
    state = {name: torch.from_dlpack(t) for name, t in model.state_dict().items()}
    missing, unexpected = twin.load_state_dict(state, strict=False)
    assert not unexpected and all(name.endswith("num_batches_tracked") for name in missing)
    with torch.no_grad():
        narrow = twin.eval()(*inputs).double().numpy()
        exact = twin.double()(*(x.double() if x.is_floating_point() else x for x in inputs)).numpy()
    error = max(np.abs(narrow - exact).max(), 2.0**-23 * np.abs(exact).max())
    np.testing.assert_allclose(got, exact, rtol=0, atol=16 * error)
    assert 16 * error < 1e-3 * np.abs(exact).max()


def test_mlp_is_that_of_torch_and_fewer_bits_cost_more(example: Callable[[str], Any]) -> None:
    mlp = example("mlp")
    model = mlp.make_model()
    x = np.random.default_rng(3).standard_normal((5, mlp.FEATURES)).astype(np.float32)
    exact = model(tp.Tensor(x)).numpy()
    agrees(exact, twins.MLP(mlp.FEATURES, mlp.HIDDEN, mlp.CLASSES), model, torch.from_numpy(x))
    errors = [np.abs(mlp.quantized(model, of)(tp.Tensor(x)).numpy() - exact).max() for of in (tp.int8, tp.float8, tp.int4)]
    # The largest error of a weight is 1/254, 1/16 of it or 1/14 of the largest in its row; they average out over a row of 64.
    assert 0 < errors[0] < errors[1] < errors[2] < 0.25 * np.abs(exact).max()


def test_resnet_is_that_of_torch(example: Callable[[str], Any]) -> None:
    resnet = example("resnet")
    model = resnet.make_model()
    image = resnet.make_image()
    forward = tp.compile(model, args=[tp.InputInfo(image.shape, tp.float32)])
    agrees(forward(image).numpy(), twins.ResNet(resnet.WIDTHS, resnet.CLASSES), model, torch.from_numpy(image))


def test_the_models_of_unet_predict_the_same_noise(example: Callable[[str], Any]) -> None:
    unet = example("unet")
    model = unet.make_model()
    x = np.random.default_rng(4).standard_normal((2, unet.CHANNELS, 8, 12)).astype(np.float32)
    times = np.array([3.0, 500.0], np.float32)
    forward = tp.compile(model, args=[tp.InputInfo(x.shape, tp.float32), tp.InputInfo((2,), tp.float32)])
    twin = twins.UNet(unet.CHANNELS, unet.WIDTH, unet.GROUPS, unet.TIME)
    agrees(forward(x, times).numpy(), twin, model, torch.from_numpy(x), torch.from_numpy(times))


def test_unet_s_loop_finds_the_image_where_the_noise_is_known(example: Callable[[str], Any]) -> None:
    unet = example("unet")
    rng = np.random.default_rng(5)
    image = rng.uniform(-1, 1, (1, 3, 4, 4))
    kept = unet.signal()

    class Known:
        """The noise that is in a sample of ``image``."""

        def __call__(self, x: tp.Tensor, t: tp.Tensor) -> Any:
            part = kept[int(t.item())]
            return torch.from_numpy((x.numpy() - np.sqrt(part) * image) / np.sqrt(1 - part))

    noise = rng.standard_normal(image.shape)
    samples = unet.denoise(Known(), (np.sqrt(kept[-1]) * image + np.sqrt(1 - kept[-1]) * noise).astype(np.float32), 5)
    # Samples are rounded to float32 after each step, and the noise in one is divided by its size, at least 1e-2 before the last.
    np.testing.assert_allclose(samples[-1], image, rtol=0, atol=100 * 2.0**-23)
    assert len(samples) == 5 and np.abs(samples[2] - image).max() > 0.1


def test_nanogpt_s_check_compares_with_torch(example: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    nanogpt = example("nanogpt")
    twin = example("nanogpt_torch")
    config = nanogpt.Config()
    model = nanogpt.make_model(config)
    forward = nanogpt.compile_forward(model, config)
    for count in (1, 17, 64):
        tokens = np.random.default_rng(count).integers(0, config.vocabulary, (1, count), np.int32)
        agrees(forward(tokens).numpy(), twin.TorchGPT(config), model, torch.from_numpy(tokens))
    nanogpt.main(["--check"])
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed.startswith("largest deviation of the logits from torch's: ") and float(printed.split()[-4]) < 64 * 2.0**-23


def test_nanogpt_continues_a_prompt_as_torch_does_beyond_the_context(example: Callable[[str], Any]) -> None:
    nanogpt = example("nanogpt")
    twin = example("nanogpt_torch")
    config = nanogpt.Config()
    model = nanogpt.make_model(config)
    lengths: list[int] = []

    def theirs(tokens: tp.Tensor) -> torch.Tensor:
        lengths.append(tokens.shape[1])
        return torch.from_numpy(twin.torch_logits(model, config, tokens.numpy()))

    prompt = list(b"a prompt that is nearly as long as the context of sixty-four")
    ours = nanogpt.generate(nanogpt.compile_forward(model, config), config, prompt, 8)
    assert ours == nanogpt.generate(theirs, config, prompt, 8)
    assert lengths == [60, 61, 62, 63, 64, 64, 64, 64]
    assert ours[: len(prompt)] == prompt and len(ours) == len(prompt) + 8 > config.context
