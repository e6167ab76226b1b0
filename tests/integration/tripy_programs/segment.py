"""Segmentation of video written for Tripy: an encoder of images of any size, attention to a memory that grows by a frame at a time, a mask decoder.

It knows nothing of Fusible: ``fusible run --tripy segment.py OUT`` runs it, and OUT holds the weights, the frames and their masks. ``WIDTH`` and
``SCALE`` may follow OUT: 8 channels and frames of 24 x 32 unless given.
"""

import math
import sys

import numpy as np
import nvtripy as tp

WINDOW, HEADS, MASKS, TABLE = 4, 2, 3, 5


def heads(x):
    return tp.transpose(tp.reshape(x, (x.shape[0], -1, HEADS, x.shape[2] // HEADS)), 1, 2)


def attend(q, k, v):
    weights = tp.softmax(q @ tp.transpose(k, 2, 3) / math.sqrt(q.shape[3]), dim=-1)
    return tp.flatten(tp.transpose(weights @ v, 1, 2), 2)


def partition(x, side):
    """[batch, height, width, channels] as windows, padded to whole ones, and their number in each direction."""
    batch, height, width, channels = x.shape
    below, beside = (side - height % side) % side, (side - width % side) % side
    x = tp.pad(x, [(0, 0), (0, below), (0, beside), (0, 0)])
    rows, columns = (height + below) / side, (width + beside) / side
    x = tp.permute(tp.reshape(x, (batch, rows, side, columns, side, channels)), (0, 1, 3, 2, 4, 5))
    return tp.reshape(x, (batch * rows * columns, side, side, channels)), (rows, columns)


def unpartition(x, side, grid, shape):
    batch, height, width, _ = shape
    rows, columns = grid
    channels = x.shape[3]
    x = tp.permute(tp.reshape(x, (batch, rows, columns, side, side, channels)), (0, 1, 3, 2, 4, 5))
    return tp.reshape(x, (batch, rows * side, columns * side, channels))[:, :height, :width, :]


def pooled(x):
    """[batch, height, width, channels] at half the resolution: the largest of each 2 x 2."""
    return tp.permute(tp.maxpool(tp.permute(x, (0, 3, 1, 2)), kernel_dims=(2, 2), stride=(2, 2)), (0, 2, 3, 1))


class Mlp(tp.Module):
    def __init__(self, inward, hidden, outward):
        super().__init__()
        self.fc1, self.fc2 = tp.Linear(inward, hidden), tp.Linear(hidden, outward)

    def forward(self, x):
        return self.fc2(tp.gelu(self.fc1(x)))


class HieraBlock(tp.Module):
    """Attention within windows, or everywhere (``window`` 0); where ``outward`` is wider its queries are pooled, which halves the resolution."""

    def __init__(self, inward, outward, window):
        super().__init__()
        self.window, self.outward = window, outward
        self.norm1, self.norm2 = tp.LayerNorm(inward), tp.LayerNorm(outward)
        self.qkv, self.proj, self.mlp = tp.Linear(inward, 3 * outward), tp.Linear(outward, outward), Mlp(outward, 2 * outward, outward)
        self.skip = tp.Linear(inward, outward) if inward != outward else None

    def attention(self, x):
        batch, _height, _width, _ = x.shape
        q, k, v = tp.split(self.qkv(x), 3, dim=-1)
        if self.skip is not None:
            q = pooled(q)
        mixed = attend(*(heads(tp.flatten(part, 1, 2)) for part in (q, k, v)))
        return self.proj(tp.reshape(mixed, (batch, q.shape[1], q.shape[2], self.outward)))

    def forward(self, x):
        y, side = self.norm1(x), self.window
        if self.skip is not None:
            x = pooled(self.skip(y))
        if side:
            y, grid = partition(y, side)
        y = self.attention(y)
        if side:
            y = unpartition(y, side // 2 if self.skip is not None else side, grid, x.shape)
        x = x + y
        return x + self.mlp(self.norm2(x))


class ImageEncoder(tp.Module):
    def __init__(self, width):
        super().__init__()
        self.patch = tp.Conv(3, width, (7, 7), padding=[(3, 3), (3, 3)], stride=(4, 4))
        self.table = tp.Tensor(np.zeros((1, width, TABLE, TABLE), np.float32))
        self.fine = [HieraBlock(width, width, WINDOW)]
        self.coarse = [HieraBlock(width, 2 * width, WINDOW), HieraBlock(2 * width, 2 * width, 0)]
        self.lateral = [tp.Conv(width, 2 * width, (1, 1)), tp.Conv(2 * width, 2 * width, (1, 1))]

    def forward(self, image):
        x = self.patch(image)
        places = tp.resize(self.table, mode="cubic", output_shape=x.shape)
        x = tp.permute(x + places, (0, 2, 3, 1))
        for block in self.fine:
            x = block(x)
        fine = self.lateral[0](tp.permute(x, (0, 3, 1, 2)))
        for block in self.coarse:
            x = block(x)
        coarse = self.lateral[1](tp.permute(x, (0, 3, 1, 2)))
        return fine + tp.resize(coarse, mode="nearest", output_shape=fine.shape), coarse


def rotated(x, height, width, times=1):
    """Rotary positions in the plane: the first half of a head's channels turns with the row, the second with the column. ``times``: frames."""
    half = x.shape[3] // 2
    rates = tp.exp(tp.arange(half // 2) * (-math.log(100.0) / (half // 2)))
    rows = tp.reshape(tp.expand(tp.unsqueeze(tp.arange(height), 1), (height, width)), (-1, 1))
    columns = tp.reshape(tp.expand(tp.unsqueeze(tp.arange(width), 0), (height, width)), (-1, 1))
    angles = tp.concatenate([rows * rates, columns * rates], dim=1)
    angles = tp.reshape(tp.expand(tp.unsqueeze(angles, 0), (times, -1, -1)), (1, 1, -1, half))
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = tp.stack([even * tp.cos(angles) - odd * tp.sin(angles), even * tp.sin(angles) + odd * tp.cos(angles)], dim=-1)
    return tp.flatten(turned, 3)


class Projections(tp.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v, self.out = (tp.Linear(width, width) for _ in range(4))

    def forward(self, x, keys, values):
        return self.out(attend(heads(self.q(x)), heads(self.k(keys)), heads(self.v(values))))


class MemoryAttention(tp.Module):
    """The features of a frame [1, width, height, across], and what is remembered of others [frames, height * across, width]."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (tp.LayerNorm(width) for _ in range(3))
        self.own, self.cross, self.mlp = Projections(width), Projections(width), Mlp(width, 2 * width, width)

    def forward(self, features, memory):
        _, width, height, across = features.shape
        x = tp.transpose(tp.flatten(features, 2), 1, 2)
        for norm, part, source in ((self.norm1, self.own, None), (self.norm2, self.cross, memory)):
            y = norm(x)
            frames = 1 if source is None else source.shape[0]
            source = y if source is None else tp.reshape(source, (1, -1, width))
            q = rotated(heads(part.q(y)), height, across)
            k = rotated(heads(part.k(source)), height, across, frames)
            x = x + part.out(attend(q, k, heads(part.v(source))))
        x = x + self.mlp(self.norm3(x))
        return tp.reshape(tp.transpose(x, 1, 2), features.shape)


class MaskDecoder(tp.Module):
    """Masks at the resolution of ``fine`` and their scores, for points (row, column from 0 to 1) with labels."""

    def __init__(self, width):
        super().__init__()
        self.tokens, self.labels, self.rates = tp.Embedding(1 + MASKS, width), tp.Embedding(2, width), tp.Linear(2, width // 2, bias=False)
        self.norm1, self.norm2, self.norm3, self.norm4 = (tp.LayerNorm(width) for _ in range(4))
        self.own, self.to_image, self.to_tokens = Projections(width), Projections(width), Projections(width)
        self.mlp, self.scores = Mlp(width, 2 * width, width), Mlp(width, width, MASKS)
        self.grow, self.hyper = tp.ConvTranspose(width, width, (2, 2), stride=(2, 2)), [Mlp(width, width, width) for _ in range(MASKS)]

    def places(self, points):
        angles = self.rates(2.0 * points - 1.0) * (2 * math.pi)
        return tp.concatenate([tp.sin(angles), tp.cos(angles)], dim=-1)

    def forward(self, coarse, fine, points, labels):
        _, width, height, across = coarse.shape
        prompts = self.places(points) + self.labels(labels)
        tokens = tp.concatenate([tp.unsqueeze(self.tokens.weight, 0), prompts], dim=1)
        rows = tp.expand(tp.unsqueeze((tp.arange(height) + 0.5) / height, 1), (height, across))
        columns = tp.expand(tp.unsqueeze((tp.arange(across) + 0.5) / across, 0), (height, across))
        places = tp.reshape(self.places(tp.stack([rows, columns], dim=-1)), (1, -1, width))
        image = tp.transpose(tp.flatten(coarse, 2), 1, 2)
        x = self.norm1(tokens + self.own(tokens, tokens, tokens))
        x = self.norm2(x + self.to_image(x, image + places, image))
        x = self.norm3(x + self.mlp(x))
        image = self.norm4(image + self.to_tokens(image + places, x + tokens, x))
        grown = tp.gelu(self.grow(tp.reshape(tp.transpose(image, 1, 2), coarse.shape)) + fine)
        weights = tp.stack([self.hyper[i](x[:, 1 + i]) for i in range(MASKS)], dim=1)
        masks = tp.reshape(weights @ tp.flatten(grown, 2), (1, MASKS, fine.shape[2], fine.shape[3]))
        return masks, tp.sigmoid(self.scores(x[:, 0]))


class MemoryEncoder(tp.Module):
    def __init__(self, width):
        super().__init__()
        self.shrink, self.fuse, self.out = (
            tp.Conv(1, width, (2, 2), stride=(2, 2)),
            tp.Conv(width, width, (3, 3), padding=[(1, 1), (1, 1)], groups=width),
            tp.Conv(width, width, (1, 1)),
        )

    def forward(self, coarse, mask):
        x = self.out(tp.gelu(self.fuse(coarse + self.shrink(tp.sigmoid(mask)))))
        return tp.transpose(tp.flatten(x, 2), 1, 2)


class Segmenter(tp.Module):
    def __init__(self, width):
        super().__init__()
        self.encoder, self.attention = ImageEncoder(width), MemoryAttention(2 * width)
        self.decoder, self.memory = MaskDecoder(2 * width), MemoryEncoder(2 * width)


def compiled(model, width, scale):
    """The four parts, for frames of any size and any number of frames to remember. All compile ahead for the first size that comes."""
    height, across = tp.NamedDimension("height", 2, 3 * scale, 32), tp.NamedDimension("across", 2, 4 * scale, 32)
    tall, wide = tp.NamedDimension("tall", 4, 6 * scale, 64), tp.NamedDimension("wide", 4, 8 * scale, 64)
    coarse, fine = (1, 2 * width, height, across), (1, 2 * width, tall, wide)
    floats = {name: tp.InputInfo(shape, dtype=tp.float32) for name, shape in (("coarse", coarse), ("fine", fine), ("mask", (1, 1, tall, wide)))}
    points = tp.InputInfo((1, (1, 2, 4), 2), dtype=tp.float32), tp.InputInfo((1, (1, 2, 4)), dtype=tp.int32)
    frames = tp.InputInfo((1, 3, (16, 24 * scale, 256), (16, 32 * scale, 256)), dtype=tp.float32)
    memory = tp.InputInfo(((1, 1, 7), (4, 12 * scale * scale, 1024), 2 * width), dtype=tp.float32)
    return (
        tp.compile(model.encoder, args=[frames]),
        tp.compile(model.attention, args=[floats["coarse"], memory]),
        tp.compile(model.decoder, args=[floats["coarse"], floats["fine"], *points]),
        tp.compile(model.memory, args=[floats["coarse"], floats["mask"]]),
    )


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
    width, scale = (int(n) for n in (*sys.argv[2:], 8, 1)[:2])
    model, numbers = Segmenter(width), np.random.default_rng(2)
    found = dict(seeded(model, numbers))
    encode, remember, decode, note = compiled(model, width, scale)
    points = numbers.random((1, 2, 2)).astype(np.float32)
    labels = np.array([[1, 0]], np.int32)
    found |= {"points": points, "labels": labels}
    for video, (size, length) in enumerate((((24 * scale, 32 * scale), 3), ((40 * scale, 24 * scale), 1))):
        bank = []
        for i in range(length):
            frame = numbers.standard_normal((1, 3, *size)).astype(np.float32)
            fine, coarse = encode(tp.Tensor(frame).eval())
            if bank:
                coarse = remember(coarse, tp.concatenate(bank, dim=0).eval())
            masks, scores = decode(coarse, fine, tp.Tensor(points).eval(), tp.Tensor(labels).eval())
            best = tp.argmax(scores, dim=1).tolist()[0]
            bank.append(note(coarse, masks[:, best : best + 1].eval()))
            at = f"{video}-{i}"
            found |= {f"frame{at}": frame, f"masks{at}": np.from_dlpack(masks), f"scores{at}": np.from_dlpack(scores)}
        print("frames:", length, "remembered:", len(bank), "masks:", masks.shape)
    np.savez(sys.argv[1], **found)


if __name__ == "__main__":
    main()
