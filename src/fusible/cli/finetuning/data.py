"""The windows that a run trains on, and those that are held out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusible.cli.finetuning.options import FinetuneOptions
from fusible.errors import CheckpointError, expected
from fusible.models.text import ChatTemplate, Tokenizer
from fusible.models.training import Corpus, Windows, pack, read_documents, tokenize

__all__ = ["Data", "read_data", "tokenizer_folder"]


@dataclass(frozen=True, eq=False)
class Data:
    """``held_out``: None where nothing is. ``described``: for reports, and to recognize the data of a run that is resumed."""

    training: Windows
    held_out: Windows | None
    described: dict[str, Any]

    def check_same(self, saved: Any) -> None:
        """Raise ``CheckpointError`` unless this is the data that a saved run was trained on."""
        if saved != self.described:
            got, do = "others", "name the same files with --data and --eval-data, and the same --tokenizer"
            raise CheckpointError(expected("the documents and the tokenizer that the run was trained on", of="a resumed run", got=got, do=do))


def tokenizer_folder(options: FinetuneOptions) -> Path:
    """Where the tokenizer is."""
    place = Path(options.model)
    return Path(options.tokenizer) if options.tokenizer is not None else place.parent if options.from_config else place


def read_data(options: FinetuneOptions, tokenizer: Tokenizer) -> Data:
    """Read, tokenize, shuffle and pack the files. Raises ``FusibleError`` for files that cannot be read, and for fewer tokens than a window."""
    chat = ChatTemplate.from_folder(tokenizer_folder(options), tokenizer.special_tokens)

    def corpus(files: tuple[str, ...]) -> Corpus:
        return tokenize(read_documents([Path(file) for file in files], chat), tokenizer)

    training = corpus(options.data).shuffled(options.seed)
    held_out: Corpus | None = None
    if options.eval_data:
        held_out = corpus(options.eval_data)
    elif options.eval_share:
        training, held_out = training.split(options.eval_share)
    windows = pack(training, options.seq_len, "--data, what is held out left aside")
    option = "--eval-data" if options.eval_data else f"the --eval-share of {options.eval_share:g}"
    others = None if held_out is None else pack(held_out, options.seq_len, option)
    described = {"training": _described(training), "held_out": None if held_out is None else _described(held_out)}
    return Data(windows, others, described)


def _described(corpus: Corpus) -> dict[str, Any]:
    return {"documents": len(corpus.lengths), "tokens": len(corpus), "sha256": corpus.sha256}
