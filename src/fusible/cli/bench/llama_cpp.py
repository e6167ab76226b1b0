"""llama.cpp, from the packages that bring it, with the weights of ``PlainDecoder``: a GGUF file of them in its own formats, and tokens from it."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fusible.cli.bench.plain import DecoderShape, PlainDecoder

__all__ = ["PACKAGES", "Times", "TokenSource", "installed", "write_gguf"]

_BYTES = 256
_SPECIAL = ("<unk>", "<s>", "</s>")


class Times(NamedTuple):
    """Seconds of a prompt, mean seconds of a further token, and the first token."""

    prompt: float
    token: float
    first: int


class TokenSource(Protocol):
    """Goes on from a prompt by ``count`` tokens, each the likeliest one; ``count`` is at least 2."""

    def generate(self, prompt: Sequence[int], count: int) -> Times: ...


class _FromRegistry:
    """``xllamacpp``, the library as its wheel has it. Its own clock counts from the first token on, which comes with the prompt."""

    def __init__(self, file: Path, context: int, threads: int) -> None:
        library = importlib.import_module("xllamacpp")
        params = library.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_parallel, params.warmup, params.verbosity = context, 1, False, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self._server = library.Server(params)

    def generate(self, prompt: Sequence[int], count: int) -> Times:
        asked = {"prompt": list(prompt), "n_predict": count, "temperature": 0, "cache_prompt": False, "ignore_eos": True, "logprobs": 1}
        found = self._server.handle_completions(asked)
        times, first = found["timings"], found["choices"][0]["logprobs"]["content"][0]["id"]
        return Times(times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3 / (times["predicted_n"] - 1), first)


class _Built:
    """``llama_cpp``, which pip builds for the machine from the source of ``llama-cpp-python``."""

    def __init__(self, file: Path, context: int, threads: int) -> None:
        library = importlib.import_module("llama_cpp")
        self._model = library.Llama(str(file), n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)

    def generate(self, prompt: Sequence[int], count: int) -> Times:
        model = self._model
        model.reset()
        began = time.perf_counter()
        model.eval(list(prompt))
        token = first = model.sample(temp=0.0)
        after = time.perf_counter()
        for _ in range(count - 1):
            model.eval([token])
            token = model.sample(temp=0.0)
        return Times(after - began, (time.perf_counter() - after) / (count - 1), first)


PACKAGES: dict[str, Callable[[Path, int, int], TokenSource]] = {"xllamacpp": _FromRegistry, "llama_cpp": _Built}
"""By the module that a package is imported as: a model in it, from a file, for a context of so many tokens, on so many threads."""


def installed(name: str) -> bool:
    """Whether there is such a module; one that cannot be imported says why when it is."""
    return importlib.util.find_spec(name) is not None


def write_gguf(file: Path, decoder: PlainDecoder, format_name: str) -> None:
    """The decoder's weights as a model of llama.cpp, in ``format_name``, "Q8_0" or "Q4_0"; norms in fp32. Its words are bytes, and numbers: nobody
    reads what it says."""
    gguf = importlib.import_module("gguf")
    shape, quantization = decoder.shape, gguf.GGMLQuantizationType[format_name]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.groups)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_rope_freq_base(shape.base)
    writer.add_rope_dimension_count(shape.width)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{format_name}"])
    _write_words(writer, gguf.TokenType, shape.vocabulary)
    for name, weight in _tensors(decoder).items():
        if weight.dim() == 1:
            writer.add_tensor(name, weight.float().numpy())
        else:
            writer.add_tensor(name, gguf.quants.quantize(weight.float().numpy(), quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_words(writer: Any, types: Any, vocabulary: int) -> None:
    numbered = vocabulary - len(_SPECIAL) - _BYTES
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(_BYTES)), *(f"w{i}" for i in range(numbered))])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([types.UNKNOWN, types.CONTROL, types.CONTROL, *[types.BYTE] * _BYTES, *[types.NORMAL] * numbered])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _tensors(decoder: PlainDecoder) -> dict[str, Tensor]:
    shape = decoder.shape
    keys = shape.groups * shape.width
    found = {"token_embd.weight": decoder.embedding, "output_norm.weight": decoder.gamma, "output.weight": decoder.head}
    for place, layer in enumerate(decoder.layers):
        q, k, v = layer.qkv.split((shape.hidden, keys, keys))
        gate, up = layer.up.chunk(2)
        parts = {
            "attn_norm": layer.gammas[0],
            "attn_q": _neighbours(q, shape),
            "attn_k": _neighbours(k, shape),
            "attn_v": v,
            "attn_output": layer.project,
            "ffn_norm": layer.gammas[1],
            "ffn_gate": gate,
            "ffn_up": up,
            "ffn_down": layer.down,
        }
        found |= {f"blk.{place}.{name}.weight": weight for name, weight in parts.items()}
    return found


def _neighbours(weight: Tensor, shape: DecoderShape) -> Tensor:
    """The rows of each head in another order: those of a pair that is rotated together are neighbours there, and half a head apart here."""
    return torch.stack(weight.view(-1, 2, shape.width // 2, shape.hidden).unbind(1), 2).reshape(weight.shape)
