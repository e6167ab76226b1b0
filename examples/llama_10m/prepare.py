"""What ``fusible train --model`` needs for a Llama of 10 million parameters, made of the interpreter's documentation: ``prepare.py DIR``.

DIR gets ``config.json``, a tokenizer (byte-level BPE, 4,096 tokens), ``train.jsonl``, a topic a line, and every twelfth topic as ``held_out.jsonl``
and ``held_out.txt``. Nothing is downloaded; it takes some seconds. ``docs/quality.md`` says what comes of it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<s>", "</s>"]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts = [topics[name] for name in sorted(topics)]
    held_out = texts[5::12]
    training = [text for place, text in enumerate(texts) if place % 12 != 5]

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(training, trainers.BpeTrainer(vocab_size=4096, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False))
    made.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=1))

    for name, part in (("train", training), ("held_out", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    (folder / "held_out.txt").write_text("\n".join(held_out))
    shutil.copy(Path(__file__).with_name("config.json"), folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
