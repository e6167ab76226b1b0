"""A stable diffusion pipeline written for Tripy: a text encoder, a U-Net that attends to it, a scheduler with guidance, and an image decoder.

It knows nothing of Fusible: ``fusible run --tripy diffusion.py OUT`` runs it, and OUT holds the weights, the noise, the image and what the first step
of the same modules gives without compiling. ``WIDTH`` and ``SIDE`` may follow OUT: 8 channels and latents of 8 x 8 unless given.
"""

import math
import sys

import numpy as np
import nvtripy as tp

WORDS, LENGTH, TEXT, HEADS, GROUPS, LATENT = 50, 12, 16, 2, 4, 4
STEPS, GUIDANCE, TRAINED = (801, 401, 1), 3.0, 1000


def attend(q, k, v, mask=None):
    """Attention over [batch, length, width] by heads."""
    batch, length, width = q.shape

    def split(x):
        return tp.transpose(tp.reshape(x, (batch, -1, HEADS, width // HEADS)), 1, 2)

    scores = split(q) @ tp.transpose(split(k), 2, 3) / math.sqrt(width // HEADS)
    weights = tp.softmax(scores if mask is None else scores + mask, dim=-1)
    return tp.reshape(tp.transpose(weights @ split(v), 1, 2), (batch, length, width))


class Attention(tp.Module):
    def __init__(self, width, source=None, bias=False):
        super().__init__()
        self.to_q = tp.Linear(width, width, bias=bias)
        self.to_k, self.to_v = (tp.Linear(source or width, width, bias=bias) for _ in range(2))
        self.to_out = tp.Linear(width, width)

    def forward(self, x, source=None, mask=None):
        source = x if source is None else source
        return self.to_out(attend(self.to_q(x), self.to_k(source), self.to_v(source), mask))


class TextLayer(tp.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = tp.LayerNorm(TEXT), tp.LayerNorm(TEXT)
        self.attention = Attention(TEXT, bias=True)
        self.fc1, self.fc2 = tp.Linear(TEXT, 4 * TEXT), tp.Linear(4 * TEXT, TEXT)

    def forward(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)
        y = self.fc1(self.norm2(x))
        return x + self.fc2(y * tp.sigmoid(1.702 * y))


class TextEncoder(tp.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = tp.Embedding(WORDS, TEXT), tp.Embedding(LENGTH, TEXT)
        self.layers = [TextLayer() for _ in range(2)]
        self.norm = tp.LayerNorm(TEXT)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(tp.arange(LENGTH, dtype=tp.int32))
        mask = tp.triu(tp.full((LENGTH, LENGTH), -float("inf")), diagonal=1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


def same(inward, outward, stride=1):
    return tp.Conv(inward, outward, (3, 3), padding=[(1, 1), (1, 1)], stride=(stride, stride))


class Residual(tp.Module):
    def __init__(self, inward, outward, time=None):
        super().__init__()
        self.norm1, self.norm2 = tp.GroupNorm(GROUPS, inward), tp.GroupNorm(GROUPS, outward)
        self.conv1, self.conv2 = same(inward, outward), same(outward, outward)
        self.time = tp.Linear(time, outward) if time else None
        self.skip = tp.Conv(inward, outward, (1, 1)) if inward != outward else None

    def forward(self, x, time=None):
        y = self.conv1(tp.silu(self.norm1(x)))
        if self.time is not None:
            y = y + tp.unsqueeze(tp.unsqueeze(self.time(tp.silu(time)), -1), -1)
        return (x if self.skip is None else self.skip(x)) + self.conv2(tp.silu(self.norm2(y)))


class SpatialTransformer(tp.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.proj_in, self.proj_out = tp.GroupNorm(GROUPS, width), tp.Conv(width, width, (1, 1)), tp.Conv(width, width, (1, 1))
        self.norm1, self.norm2, self.norm3 = (tp.LayerNorm(width) for _ in range(3))
        self.self_attention, self.cross_attention = Attention(width), Attention(width, TEXT)
        self.gate, self.out = tp.Linear(width, 8 * width), tp.Linear(4 * width, width)

    def forward(self, x, text):
        batch, width, height, across = x.shape
        y = tp.transpose(tp.flatten(self.proj_in(self.norm(x)), 2), 1, 2)
        y = y + self.self_attention(self.norm1(y))
        y = y + self.cross_attention(self.norm2(y), text)
        value, gate = tp.split(self.gate(self.norm3(y)), 2, dim=-1)
        y = y + self.out(value * tp.gelu(gate))
        return x + self.proj_out(tp.reshape(tp.transpose(y, 1, 2), (batch, width, height, across)))


class Upsample(tp.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = same(width, width)

    def forward(self, x):
        return self.conv(tp.resize(x, mode="nearest", scales=(1, 1, 2, 2)))


class UNet(tp.Module):
    def __init__(self, width):
        super().__init__()
        self.width, time = width, 4 * width
        self.time1, self.time2 = tp.Linear(width, time), tp.Linear(time, time)
        self.conv_in = same(LATENT, width)
        self.down, self.down_attention, self.shrink = Residual(width, width, time), SpatialTransformer(width), same(width, width, 2)
        self.middle1, self.middle_attention = Residual(width, 2 * width, time), SpatialTransformer(2 * width)
        self.middle2, self.grow = Residual(2 * width, 2 * width, time), Upsample(2 * width)
        self.up, self.up_attention = Residual(3 * width, width, time), SpatialTransformer(width)
        self.norm_out, self.conv_out = tp.GroupNorm(GROUPS, width), same(width, LATENT)

    def forward(self, latents, timestep, text):
        half = self.width // 2
        angles = tp.unsqueeze(timestep, 1) * tp.exp(tp.arange(half) * (-math.log(10000.0) / half))
        time = self.time2(tp.silu(self.time1(tp.concatenate([tp.cos(angles), tp.sin(angles)], dim=1))))
        fine = self.down_attention(self.down(self.conv_in(latents), time), text)
        coarse = self.middle_attention(self.middle1(self.shrink(fine), time), text)
        coarse = self.grow(self.middle2(coarse, time))
        x = self.up_attention(self.up(tp.concatenate([coarse, fine], dim=1), time), text)
        return self.conv_out(tp.silu(self.norm_out(x)))


class PixelAttention(tp.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = tp.GroupNorm(GROUPS, width)
        self.q, self.k, self.v, self.out = (tp.Conv(width, width, (1, 1)) for _ in range(4))

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (tp.flatten(part(y), 2) for part in (self.q, self.k, self.v))
        weights = tp.softmax(tp.transpose(q, 1, 2) @ k / math.sqrt(x.shape[1]), dim=-1)
        return x + self.out(tp.reshape(v @ tp.transpose(weights, 1, 2), x.shape))


class Decoder(tp.Module):
    def __init__(self, width):
        super().__init__()
        self.post, self.conv_in = tp.Conv(LATENT, LATENT, (1, 1)), same(LATENT, 2 * width)
        self.middle1, self.attention, self.grow = Residual(2 * width, 2 * width), PixelAttention(2 * width), Upsample(2 * width)
        self.up, self.norm_out, self.conv_out = Residual(2 * width, width), tp.GroupNorm(GROUPS, width), same(width, 3)

    def forward(self, latents):
        x = self.attention(self.middle1(self.conv_in(self.post(latents / 0.18215))))
        return self.conv_out(tp.silu(self.norm_out(self.up(self.grow(x)))))


class Pipeline(tp.Module):
    def __init__(self, width):
        super().__init__()
        self.text, self.unet, self.decoder = TextEncoder(), UNet(width), Decoder(width)


def stepped(latents, noise, alpha, previous):
    """A deterministic step of the scheduler: from the share ``alpha`` of the image in the latents to ``previous``, by guided noise."""
    without, with_text = tp.split(noise, 2, dim=0)
    guided = without + GUIDANCE * (with_text - without)
    image = (latents - math.sqrt(1 - alpha) * guided) / math.sqrt(alpha)
    return math.sqrt(previous) * image + math.sqrt(1 - previous) * guided


def shares():
    """The share of the image before each step and after it."""
    kept = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, TRAINED) ** 2)
    at = [float(kept[t]) for t in STEPS]
    return list(zip(at, [*at[1:], 1.0], strict=True))


def seeded(model, numbers):
    """Numbers for every parameter, of a size that keeps the activations'."""
    values = {}
    for name, parameter in model.state_dict().items():
        shape = tuple(parameter.shape)
        scale = np.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.1
        scaling = "norm" in name.split(".")[-2] and name.endswith("weight")
        values[name] = (numbers.standard_normal(shape) * scale + scaling).astype(np.float32)
    model.load_state_dict({name: tp.Tensor(value) for name, value in values.items()})
    return values


def main():
    width, side = (int(n) for n in (*sys.argv[2:], 8, 8)[:2])
    pipeline, numbers = Pipeline(width), np.random.default_rng(21)
    weights = seeded(pipeline, numbers)
    tokens = numbers.integers(0, WORDS, (2, LENGTH)).astype(np.int32)
    noise = numbers.standard_normal((1, LATENT, side, side)).astype(np.float32)

    encode = tp.compile(pipeline.text, args=[tp.InputInfo((2, LENGTH), dtype=tp.int32)])
    predict = tp.compile(
        pipeline.unet,
        args=[
            tp.InputInfo((2, LATENT, side, side), dtype=tp.float32),
            tp.InputInfo((2,), dtype=tp.float32),
            tp.InputInfo((2, LENGTH, TEXT), dtype=tp.float32),
        ],
    )
    decode = tp.compile(pipeline.decoder, args=[tp.InputInfo((1, LATENT, side, side), dtype=tp.float32)])

    text, latents = encode(tp.Tensor(tokens)), tp.Tensor(noise)
    for timestep, (alpha, previous) in zip(STEPS, shares(), strict=True):
        both = tp.concatenate([latents, latents], dim=0).eval()
        predicted = predict(both, tp.Tensor([float(timestep)] * 2).eval(), text)
        latents = stepped(latents, predicted, alpha, previous).eval()
    image = decode(latents)

    first = tp.Tensor(noise)
    predicted = pipeline.unet(tp.concatenate([first, first], dim=0), tp.full((2,), float(STEPS[0])), pipeline.text(tp.Tensor(tokens)))
    eager = pipeline.decoder(stepped(first, predicted, *shares()[0]))
    print("image:", image.shape, "after", len(STEPS), "steps")
    np.savez(sys.argv[1], **weights, tokens=tokens, noise=noise, image=np.from_dlpack(image), eager=np.from_dlpack(eager))


if __name__ == "__main__":
    main()
