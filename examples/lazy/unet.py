"""A small diffusion U-Net, and a few denoising steps with it.

    python examples/lazy/unet.py --steps 8

One program, compiled once, predicts the noise in a sample at a time ``t`` that is an input. The loop around it is DDIM's without added noise
(Song et al., 2021): from the predicted noise follows the clean sample, and from both the sample at an earlier time.
"""

import argparse
import math

import numpy as np
from seeded_weights import seeded_weights

import fusible.lazy as tp

CHANNELS, WIDTH, GROUPS, TIME = 3, 16, 4, 32
SIZE, TIMES = 16, 1000
SAME = ((1, 1), (1, 1))


def embed_time(t: tp.Tensor) -> tp.Tensor:
    """``[N]`` to ``[N, TIME]``: cosines and sines of ``t`` at frequencies that fall from 1 towards 1e-4."""
    half = TIME // 2
    frequencies = tp.exp(tp.arange(half) * (-math.log(10000.0) / half))
    angles = t.unsqueeze(1) * frequencies
    return tp.concatenate([tp.cos(angles), tp.sin(angles)], dim=1)


class ResidualBlock(tp.Module):
    """Two convolutions of normalized, activated inputs beside the identity; the time moves each channel in between."""

    def __init__(self, inward: int, outward: int) -> None:
        self.norm1 = tp.GroupNorm(GROUPS, inward)
        self.conv1 = tp.Conv(inward, outward, (3, 3), padding=SAME)
        self.time = tp.Linear(TIME, outward)
        self.norm2 = tp.GroupNorm(GROUPS, outward)
        self.conv2 = tp.Conv(outward, outward, (3, 3), padding=SAME)
        self.skip = tp.Conv(inward, outward, (1, 1)) if inward != outward else tp.Sequential()

    def forward(self, x: tp.Tensor, time: tp.Tensor) -> tp.Tensor:
        y = self.conv1(tp.silu(self.norm1(x)))
        y = y + self.time(tp.silu(time)).unsqueeze(2).unsqueeze(3)
        return self.skip(x) + self.conv2(tp.silu(self.norm2(y)))


class Attention(tp.Module):
    """Self-attention of one head over the positions of an image."""

    def __init__(self, width: int) -> None:
        self.norm = tp.GroupNorm(GROUPS, width)
        self.qkv = tp.Linear(width, 3 * width)
        self.out = tp.Linear(width, width)

    def forward(self, x: tp.Tensor) -> tp.Tensor:
        positions = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(positions).split(3, dim=2)
        weights = tp.softmax(q @ k.transpose(1, 2) / math.sqrt(x.shape[1]), dim=2)
        return x + self.out(weights @ v).transpose(1, 2).reshape(x.shape)


class UNet(tp.Module):
    """A sample ``[N, CHANNELS, H, W]`` at times ``[N]`` to the noise in it. The resolution is halved once; sizes are even."""

    def __init__(self) -> None:
        self.time = tp.Sequential(tp.Linear(TIME, TIME), tp.silu, tp.Linear(TIME, TIME))
        self.stem = tp.Conv(CHANNELS, WIDTH, (3, 3), padding=SAME)
        self.down = ResidualBlock(WIDTH, WIDTH)
        self.shrink = tp.Conv(WIDTH, 2 * WIDTH, (3, 3), (2, 2), SAME)
        self.middle = [ResidualBlock(2 * WIDTH, 2 * WIDTH), ResidualBlock(2 * WIDTH, 2 * WIDTH)]
        self.attention = Attention(2 * WIDTH)
        self.grow = tp.ConvTranspose(2 * WIDTH, WIDTH, (2, 2), (2, 2))
        self.up = ResidualBlock(2 * WIDTH, WIDTH)
        self.norm = tp.GroupNorm(GROUPS, WIDTH)
        self.head = tp.Conv(WIDTH, CHANNELS, (3, 3), padding=SAME)

    def forward(self, x: tp.Tensor, t: tp.Tensor) -> tp.Tensor:
        time = self.time(embed_time(t))
        fine = self.down(self.stem(x), time)
        coarse = self.middle[0](self.shrink(fine), time)
        coarse = self.middle[1](self.attention(coarse), time)
        joined = tp.concatenate([self.grow(coarse), fine], dim=1)
        return self.head(tp.silu(self.norm(self.up(joined, time))))


def make_model(seed: int = 0) -> UNet:
    model = UNet()
    model.load_state_dict(seeded_weights(model, seed))
    return model


def signal() -> np.ndarray:
    """What part of the variance of a sample at each time is signal: a product of ``1 - beta`` for betas from 1e-4 to 0.02."""
    return np.cumprod(1 - np.linspace(1e-4, 0.02, TIMES))


def denoise(predict: tp.Executable, x: np.ndarray, steps: int) -> list[np.ndarray]:
    """The samples after each step from pure noise ``x`` on; images are within -1 and 1."""
    kept = signal()
    times = np.linspace(TIMES - 1, 0, steps, dtype=int)
    samples = []
    for now, then in zip(times, [*times[1:], None], strict=True):
        noise = predict(tp.Tensor(x), tp.Tensor([float(now)])).numpy()
        clean = np.clip((x - math.sqrt(1 - kept[now]) * noise) / math.sqrt(kept[now]), -1, 1)
        earlier = 1.0 if then is None else kept[then]
        x = (math.sqrt(earlier) * clean + math.sqrt(1 - earlier) * noise).astype(np.float32)
        samples.append(x)
    return samples


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args(arguments)

    infos = [tp.InputInfo((1, CHANNELS, SIZE, SIZE), tp.float32), tp.InputInfo((1,), tp.float32)]
    predict = tp.compile(make_model(), args=infos)
    noise = np.random.default_rng(1).standard_normal((1, CHANNELS, SIZE, SIZE)).astype(np.float32)
    print("The weights are random, so no picture appears; what a step does to the sample's size can be seen:")
    for step, sample in enumerate(denoise(predict, noise, options.steps), 1):
        print(f"step {step}: standard deviation {sample.std():8.3f}")


if __name__ == "__main__":
    main()
