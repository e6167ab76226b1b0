"""Documents, their tokens, packed windows and their order."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import CHATML, save_tokenizer, trained
from tokenizers import processors

from fusible.errors import ArgumentError, CheckpointError, FusibleError, MissingModuleError
from fusible.models.text import ChatTemplate, Tokenizer
from fusible.models.training import Corpus, Cosine, Document, Order, pack, read_documents, tokenize
from fusible.models.training.packing import IGNORED

TURNS = ("user", "Why?"), ("assistant", "So."), ("user", "Oh"), ("assistant", "Because of é.")
TALK = [{"role": role, "content": content} for role, content in TURNS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(made)
    return made


def test_documents_of_every_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo é")
    lines = [{"text": "three"}, {"prompt": "2+2=", "completion": "4", "id": 7}, {"text": ""}, {"messages": TALK}]
    (tmp_path / "b.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    found = list(read_documents([tmp_path / "a.txt", tmp_path / "b.jsonl"], ChatTemplate(CHATML)))
    assert found[:3] == [Document("one\n\ntwo é"), Document("three"), Document("2+2=4", ((4, 5),))]
    talk = found[3]
    assert len(found) == 4 and talk.text == ChatTemplate(CHATML).render(TALK, add_generation_prompt=False) and not talk.whole
    assert [talk.text[a:b] for a, b in talk.learned or ()] == ["So.<|im_end|>\n", "Because of é.<|im_end|>\n"]


def test_parquet_is_read_by_pyarrow_and_missed_without(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        path.write_bytes(b"")
        with pytest.raises(MissingModuleError, match=r"pyarrow.*install fusible\[parquet\]"):
            list(read_documents([path]))
        return
    parquet.write_table(arrow.Table.from_pylist([{"text": "one", "id": 1}, {"text": "two", "id": 2}]), path)
    assert list(read_documents([path])) == [Document("one"), Document("two")]
    path.write_bytes(b"PAR1 nothing")
    with pytest.raises(ArgumentError, match="a file of Parquet"):
        list(read_documents([path]))
    rows = [{"text": f"hello world {i} " * 20} for i in range(60)]
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    content = path.read_bytes()
    assert len(list(read_documents([path]))) == 60
    for first in range(0, len(content) - 40, 40):  # a page is decoded when it is its turn
        path.write_bytes(content[:first] + b"\xff" * 40 + content[first + 40 :])
        try:
            assert len(list(read_documents([path]))) <= 60
        except ArgumentError as error:
            assert str(path) in str(error) and "damaged content" in str(error), first
    path.write_bytes(content[:20] + b"\xff" * 40 + content[60:])
    with pytest.raises(ArgumentError, match=r"a\.parquet: expected a file of Parquet, got damaged content"):
        list(read_documents([path]))


PARTS = [{"type": "text", "text": "So"}, {"type": "text", "text": "."}]


def _talk(content: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": content}]}).encode()


BAD: dict[str, tuple[str, bytes | None, str]] = {
    "kind": ("a.csv", b"x", r"a\.csv: expected a file of \.txt, \.jsonl, \.parquet"),
    "missing": ("a.txt", None, r"a\.txt: expected a file that can be read"),
    "bytes": ("a.txt", b"\xff\xfe", "expected a text in UTF-8"),
    "json": ("a.jsonl", b'{"text": "a"}\n{"text"', r"line 2 of .*a\.jsonl: expected JSON"),
    "record": ("a.jsonl", b'{"body": "a"}', "line 1 .*expected an object with text, messages, or prompt and completion, got an object of 'body'"),
    "number": ("a.jsonl", b"7", "got a int"),
    "no template": ("a.jsonl", json.dumps({"messages": TALK}).encode(), "a tokenizer with a chat template"),
}
HALF = r"^line 2 of .*a\.jsonl: expected characters of Unicode, got half of a surrogate pair; .*\.$"
OTHERS = r"^line 1 of .*a\.jsonl: expected messages that have a role and a content, got others; repair them\.$"
BAD_RECORDS = {
    "half a pair": (b'{"text": "a"}\n{"text": "\\ud800a"}', HALF),
    "half a pair in a prompt": (b'{"text": "a"}\n{"prompt": "\\ud800a", "completion": "b"}', HALF),
    "half a pair in a completion": (b'{"text": "a"}\n{"prompt": "a", "completion": "b\\udc00"}', HALF),
    "half a pair in a message": (b'{"text": "a"}\n{"messages": [{"role": "user", "content": "\\udfffa"}]}', HALF),
    "no content": (b'{"messages": [{"role": "user"}]}', OTHERS),
    "no role": (b'{"messages": [{"content": "a"}]}', OTHERS),
    "content of null": (_talk(None), OTHERS),
    "content of a number": (_talk(5), OTHERS),
    "content of an object": (_talk({"text": "a"}), OTHERS),
    "a picture": (_talk([*PARTS, {"type": "image", "image": "a"}]), OTHERS),
    "a part of a number": (_talk([{"type": "text", "text": 5}]), OTHERS),
    "a message of text": (b'{"messages": ["a"]}', OTHERS),
    "tools of numbers": (b'{"messages": [{"role": "user", "content": "a"}], "tools": [5]}', "tools of line 1 of .*: expected a list of objects"),
    "one tool": (b'{"messages": [{"role": "user", "content": "a"}], "tools": {}}', "tools of line 1 of .*: expected a list of objects, .* a dict"),
    "a number as the text of tools": (b'{"messages": [{"role": "user", "content": "a"}], "tools": "3"}', "tools of line 1 of .*, got .* int"),
}


@pytest.mark.parametrize("case", BAD_RECORDS)
def test_bad_records_are_named_by_their_line(case: str, tmp_path: Path) -> None:
    content, sentence = BAD_RECORDS[case]
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ArgumentError, match=sentence):
        list(read_documents([tmp_path / "a.jsonl"], ChatTemplate(CHATML)))


def test_parts_of_a_content_are_one_text_and_a_call_of_tools_needs_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(_talk(PARTS) + b"\n" + _talk("So."))
    one, other = read_documents([tmp_path / "a.jsonl"], ChatTemplate(CHATML))
    assert one == other
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [*TALK[:1], call]}))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content or m.tool_calls[0].function.name }}\n{% endfor %}"
    (found,) = read_documents([tmp_path / "a.jsonl"], ChatTemplate(template + "{% if add_generation_prompt %}assistant: {% endif %}"))
    assert [found.text[a:b] for a, b in found.learned or ()] == ["look\n"]


TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"where": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "sum", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}},
]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"where": "here"}}}]}
WITH_TOOLS = (
    "{{ tools | tojson if tools else 'none' }}{% for m in messages %}<{{ m.role }}>{{ m.tool_calls[0].function.arguments | tojson if m.tool_calls"
    " else m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("tools", [TOOLS, [], None, json.dumps(TOOLS)])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_tools_beside_messages_are_those_of_the_template(tmp_path: Path, name: str, tools: object) -> None:
    other = {**CALL, "tool_calls": [{"function": {"name": "sum", "arguments": {"a": 1}}}]}
    records = [{"messages": [TALK[0], one], **({} if tools is None else {"tools": tools})} for one in (CALL, other)]
    if name == "a.jsonl":
        (tmp_path / name).write_text("\n".join(map(json.dumps, records)))
    else:
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(records), tmp_path / name)
    found = list(read_documents([tmp_path / name], ChatTemplate(WITH_TOOLS)))
    shown = json.dumps(TOOLS) if tools else "none"
    assert [json.loads(one.text.partition("<")[0]) if tools else one.text.partition("<")[0] for one in found] == [TOOLS if tools else shown] * 2
    assert [one.text[a:b] for one in found for a, b in one.learned or ()] == ['{"where": "here"}', '{"a": 1}']


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named_in_a_sentence(case: str, tmp_path: Path) -> None:
    name, content, sentence = BAD[case]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ArgumentError, CheckpointError), match=sentence):
        list(read_documents([tmp_path / name]))


def test_a_template_that_rewrites_what_came_before_is_refused(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if not loop.last %}[cut]{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}))
    with pytest.raises(ArgumentError, match="a chat template whose text grows with each message"):
        list(read_documents([tmp_path / "a.jsonl"], ChatTemplate(template)))


def test_tokens_of_what_the_assistant_says_are_learned_and_no_others(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    text = ChatTemplate(CHATML).render(TALK, add_generation_prompt=False)
    first = text.index("So."), text.index("So.") + len("So.<|im_end|>\n")
    corpus = tokenize([Document(text, (first,), whole=False), Document("plain")], tokenizer)
    count = int(corpus.lengths[0])
    assert corpus.tokens[:count].tolist() == tokenizer.encode(text, special=False)
    assert tokenizer.decode(corpus.tokens[:count][corpus.learned[:count]].tolist(), skip_special=False) == text[slice(*first)]
    assert corpus.learned[count:].all() and corpus.tokens[-1] == tokenizer.token_of("</s>")
    with pytest.raises(ArgumentError, match="nothing but empty ones"):
        tokenize([], tokenizer)


_AROUND = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
POST_PROCESSORS = {
    "none": None,
    "byte level": processors.ByteLevel(trim_offsets=False),
    "trimming": processors.ByteLevel(trim_offsets=True),
    "roberta": processors.RobertaProcessing(("</s>", 2), ("<s>", 1), trim_offsets=True, add_prefix_space=False),
    "trimming, around": processors.Sequence([processors.ByteLevel(trim_offsets=True), _AROUND]),
    "around": _AROUND,
}


@pytest.mark.parametrize("name", POST_PROCESSORS)
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        *itertools.product(["", "Say:\n", "Say:  "], ["\n\n    x\n\n🙂 ok\n", "<s> a  "]),
        *itertools.product(["", "Say:\n<s>"], ["   ", " <s> a  "]),
    ],
)
def test_spaces_of_a_completion_are_learned_and_what_stands_around_is_not(name: str, prompt: str, completion: str) -> None:
    """Whatever the post-processor makes of the places. No token has a part of both, prompt and completion."""
    library = tokenizers.Tokenizer.from_str(json.dumps(json.loads(trained().to_str()) | {"post_processor": None}))
    plain = Tokenizer(library)
    assert plain.encode(prompt + completion, special=False) == plain.encode(prompt, special=False) + plain.encode(completion, special=False)
    if POST_PROCESSORS[name] is not None:
        library.post_processor = POST_PROCESSORS[name]
    tokenizer = Tokenizer(library, {"eos_token": "</s>"})
    corpus = tokenize([Document(prompt + completion, ((len(prompt), len(prompt + completion)),))], tokenizer)
    assert corpus.tokens.tolist()[: len(tokenizer.encode(prompt + completion))] == tokenizer.encode(prompt + completion)
    around = name in ("roberta", "trimming, around", "around")
    first = [False] * around + [False] * len(plain.encode(prompt, special=False))
    assert corpus.learned.tolist() == [*first, *[True] * len(plain.encode(completion, special=False)), not around]


def test_places_are_those_of_the_text_with_its_spaces() -> None:
    library = trained()
    library.post_processor = POST_PROCESSORS["trimming, around"]
    found, places = Tokenizer(library).encode_places("a  b\n c ")
    assert found == Tokenizer(library).encode("a  b\n c ") and places[0] is places[-1] is None
    assert "".join("a  b\n c "[slice(*place)] for place in places if place) == "a  b\n c "
    with pytest.raises(ArgumentError, match="the text: expected characters of Unicode"):
        Tokenizer(library).encode_places("\ud800a")


def of_lengths(lengths: list[int]) -> Corpus:
    total = sum(lengths)
    return Corpus(torch.arange(total, dtype=torch.int32), torch.arange(total) % 3 != 0, torch.tensor(lengths))


documents = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(documents, st.integers(0, 5), st.floats(0.0, 0.5))
def test_shuffled_documents_stay_whole_and_a_share_is_held_out(lengths: list[int], seed: int, share: float) -> None:
    corpus = of_lengths(lengths)
    shuffled = corpus.shuffled(seed)
    parts = sorted(part.tolist() for part in shuffled.tokens.split(shuffled.lengths.tolist()))
    assert parts == [part.tolist() for part in corpus.tokens.split(lengths)]
    assert torch.equal(shuffled.learned, shuffled.tokens % 3 != 0)
    assert corpus.shuffled(seed).sha256 == shuffled.sha256
    kept, held = corpus.split(share)
    assert len(held) == round(share * len(corpus)) and torch.equal(torch.cat([kept.tokens, held.tokens]), corpus.tokens)
    for part in (kept, held):
        assert int(part.lengths.sum()) == len(part.tokens) == len(part.learned) and (part.lengths > 0).all()


@given(documents, st.integers(1, 7))
def test_windows_foretell_the_next_token_of_the_same_document(lengths: list[int], length: int) -> None:
    """Tokens are their own places in the text, so what follows a token is it plus 1, but at the end of a document."""
    corpus = of_lengths(lengths)
    ends = set(torch.tensor(lengths).cumsum(0).tolist())
    wanted = [(place, place + 1 if (place + 1) % 3 else IGNORED) for place in range(len(corpus)) if place + 1 not in ends]
    chunks = [wanted[i : i + length] for i in range(0, len(wanted) - length + 1, length)]
    chunks = [chunk for chunk in chunks if any(target != IGNORED for _, target in chunk)]
    if not chunks:
        with pytest.raises(ArgumentError, match="a window"):
            pack(corpus, length)
        return
    windows = pack(corpus, length)
    assert len(windows) == len(chunks) and windows.learned == sum(target != IGNORED for chunk in chunks for _, target in chunk)
    batch = windows.batch(torch.arange(len(windows)))
    assert list(zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True)) == [pair for chunk in chunks for pair in chunk]
    for number, part in enumerate(batch.tokens.split(batch.seq_lens.tolist())):
        assert part.diff().eq(1).all() and len(part) <= length, number  # one document, and one window
    assert len(batch.seq_lens) == sum(1 + sum(b != a + 1 for (a, _), (b, _) in itertools.pairwise(c)) for c in chunks)


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 3))
def test_every_epoch_has_every_window_once(count: int, batch: int, seed: int) -> None:
    order = Order(count, seed)
    places = torch.cat([order.places(step, batch) for step in range(math.ceil(3 * count / batch))])[: 3 * count].view(3, count)
    assert all(sorted(epoch.tolist()) == list(range(count)) for epoch in places)
    assert torch.equal(Order(count, seed).places(2, batch), order.places(2, batch))
    if count > 5:
        assert len({tuple(epoch.tolist()) for epoch in places}) > 1


def test_the_learning_rate_is_a_cosine_behind_a_warm_up() -> None:
    rate = Cosine(2.0, 4, 100, 0.1)
    assert rate(0) == pytest.approx(0.5 * (0.1 + 0.9), rel=1e-12) and rate(50) == pytest.approx(2 * 0.55) and rate(100) == rate(500) == 0.2
    assert Cosine(1.0, 0, 10)(0) == 1.0
    for wrong in ((-1.0, 0, 1), (1.0, -1, 1), (1.0, 0, 0), (math.inf, 0, 1)):
        with pytest.raises(FusibleError):
            Cosine(*wrong)
