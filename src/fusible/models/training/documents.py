"""``read_documents``: what a model is to learn, of files of text, JSON lines and Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fusible.errors import ArgumentError, expected
from fusible.files import parse_json, read_file
from fusible.models.text import ChatTemplate
from fusible.models.text.libraries import library
from fusible.models.text.unicode import check_unicode

__all__ = ["Document", "read_documents"]

_FIELDS = "text, messages, or prompt and completion"


@dataclass(frozen=True)
class Document:
    """A text. ``learned``: the stretches of it, ``(first, behind the last)`` in characters, whose tokens are to be foretold; None for all.

    ``whole``: whether the tokenizer puts around it what stands around a text, and a token of its end behind it; a chat template has its own.
    """

    text: str
    learned: tuple[tuple[int, int], ...] | None = None
    whole: bool = True


def read_documents(paths: Sequence[Path], chat: ChatTemplate | None = None) -> Iterator[Document]:
    """The documents of files, in order, empty ones left out.

    A ``.txt`` is one document. A line of a ``.jsonl``, or a row of a ``.parquet`` (which needs pyarrow), is one that has ``text``; or ``prompt`` and
    ``completion``, of which the second is learned; or ``messages``, put together by the template ``chat``, of which the assistant's are learned:
    with the ``tools`` that stand beside them, as a list or as the JSON of one.

    Raises ``ArgumentError`` for another kind of file, and for one that cannot be read; ``CheckpointError`` for lines that are no JSON;
    ``MissingModuleError`` where pyarrow is wanted and missing.
    """
    for path in paths:
        if path.suffix not in _READERS:
            raise ArgumentError(expected(f"a file of {', '.join(_READERS)}", of=str(path), got=repr(path.suffix), do="convert it"))
        for document in _READERS[path.suffix](path, chat):
            if document.text:
                yield document


def _content(path: Path) -> bytes:
    return read_file(path, do="name another file", error=ArgumentError, missing=ArgumentError)


def _decoded(content: bytes, of: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ArgumentError(expected("a text in UTF-8", of=of, got="other bytes", do="convert it")) from None


def _text(path: Path, chat: ChatTemplate | None) -> Iterator[Document]:
    yield Document(_decoded(_content(path), str(path)))


def _json_lines(path: Path, chat: ChatTemplate | None) -> Iterator[Document]:
    for number, line in enumerate(_content(path).split(b"\n"), 1):
        if line.strip():
            of = f"line {number} of {path}"
            yield _of_record(parse_json(line, of=of, do="repair the line", unbounded=True), of, chat)


def _parquet(path: Path, chat: ChatTemplate | None) -> Iterator[Document]:
    for number, row in enumerate(_rows(path), 1):
        yield _of_record(_without_nulls(row), f"row {number} of {path}", chat)


def _without_nulls(value: Any) -> Any:
    """A value of Parquet: its objects have all fields of their column, those that nobody has written as nulls."""
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file of Parquet. Pages are decoded when it is their turn: what pyarrow finds wrong there, an ``OSError`` too, is the file's
    fault."""
    arrow, reader = library("pyarrow", extra="parquet"), library("pyarrow", extra="parquet", module="pyarrow.parquet")
    content = arrow.BufferReader(_content(path))
    try:
        file = reader.ParquetFile(content)
        names = set(file.schema_arrow.names)
        wanted = [name for name in ("text", "messages", "tools", "prompt", "completion") if name in names]
        for batch in file.iter_batches(columns=wanted):
            yield from batch.to_pylist()
    except (arrow.ArrowException, OSError, ValueError, ArithmeticError) as error:
        raise ArgumentError(expected("a file of Parquet", of=str(path), got=f"damaged content ({error})", do="name another file")) from None


_READERS = {".txt": _text, ".jsonl": _json_lines, ".parquet": _parquet}


def _of_record(record: Any, of: str, chat: ChatTemplate | None) -> Document:
    document = _document(record, of, chat)
    check_unicode(document.text, of)
    return document


def _document(record: Any, of: str, chat: ChatTemplate | None) -> Document:
    if isinstance(record, Mapping):
        if isinstance(record.get("messages"), list):
            return _of_messages(record["messages"], _tools(record.get("tools"), of), of, chat)
        prompt, completion, text = (record.get(name) for name in ("prompt", "completion", "text"))
        if isinstance(prompt, str) and isinstance(completion, str):
            return Document(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))
        if isinstance(text, str):
            return Document(text)
    got = f"an object of {', '.join(map(repr, record)) or 'nothing'}" if isinstance(record, Mapping) else f"a {type(record).__name__}"
    raise ArgumentError(expected(f"an object with {_FIELDS}", of=of, got=got[:200], do="convert the file"))


def _tools(value: Any, of: str) -> list[Any] | None:
    """The tools of a conversation, or None; some data sets have the JSON of them."""
    tools = parse_json(value, of=f"tools of {of}", do="repair it", unbounded=True) if isinstance(value, str) else value
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ArgumentError(expected("a list of objects, or the JSON of one", of=f"tools of {of}", got=f"a {type(tools).__name__}", do="repair them"))
    return tools


def _of_messages(messages: Sequence[Any], tools: list[Any] | None, of: str, chat: ChatTemplate | None) -> Document:
    """A conversation as its template writes it. What the assistant says is found as what the text has more with a message than up to it."""
    if chat is None:
        raise ArgumentError(expected("a tokenizer with a chat template", of=of, got="messages and no template", do="give text, or another tokenizer"))
    messages = [_message(message, of) for message in messages]
    render = partial(chat.render, tools=tools)
    text, learned = render(messages, add_generation_prompt=False), list[tuple[int, int]]()
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, through = render(messages[:place]), render(messages[: place + 1], add_generation_prompt=False)
        if not (text.startswith(through) and through.startswith(before)):
            wanted = "a chat template whose text grows with each message"
            raise ArgumentError(expected(wanted, of=of, got="one that changes what came before", do="give the conversation as text"))
        learned.append((len(before), len(through)))
    return Document(text, tuple(learned), whole=False)


def _message(message: Any, of: str) -> Mapping[str, Any]:
    """A message with a role, and a text as its content, of which parts are put together. One that calls tools may have none."""
    if isinstance(message, Mapping) and isinstance(message.get("role"), str):
        content = message.get("content")
        if isinstance(content, str) or (content is None and message.get("tool_calls")):
            return message
        parts = content if isinstance(content, list) else [None]
        texts = [part["text"] for part in parts if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)]
        if len(texts) == len(parts):
            return {**message, "content": "".join(texts)}
    raise ArgumentError(expected("messages that have a role and a content", of=of, got="others", do="repair them"))
