"""Chat templates render what transformers renders, and what they refuse is one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import CHATML, save_tokenizer
from transformers import AutoTokenizer

from fusible.errors import ArgumentError, CheckpointError
from fusible.models.text import ChatTemplate, Tokenizer

HEADERS = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{{- "Today: " + date_string + "\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
INST = """{{ bos_token }}{% for message in messages %}
  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
  {% endif %}
  {% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
  {% else %}
{% generation %}{{ ' ' ~ message['content'].strip() ~ ' ' ~ eos_token }}{% endgeneration %}

  {% endif %}
{% endfor %}"""
TURNS = """{%- for message in messages -%}
{%- if message.role == 'skip' -%}{%- continue -%}{%- elif message.role == 'end' -%}{%- break -%}{%- endif -%}
<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ message | tojson }}{{ message.content is string }}{{ message.name }}
{%- endfor -%}
{%- macro tail(text) -%}{{ text | upper }}{%- endmacro -%}
{%- set ns = namespace(count=0) -%}
{%- for message in messages | selectattr('role', 'equalto', 'user') -%}{%- set ns.count = ns.count + 1 -%}{%- endfor -%}
{{ tail('end') }} {{ ns.count }} {{ messages[-1].content[:4] }} {{ tools is none }}
"""
THINKING = """{%- if tools %}tools!{%- endif %}
{%- set last = (messages | length) - 1 %}
{%- for message in messages %}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') if '</think>' in message.content else message.content %}
{{- '<|im_start|>' ~ message.role ~ '\\n' }}{{ content }}{{ '<|im_end|>\\n' if loop.index0 != last or add_generation_prompt else '' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "inst": INST, "turns": TURNS, "thinking": THINKING}

CHATS = [
    [{"role": "user", "content": " Hi <b>& 'you' \n"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nx</think>\n\nfür"}, {"role": "user", "content": "c", "name": None}],
    [{"role": "system", "content": " S "}, {"role": "user", "content": "q"}, {"role": "skip", "content": "no"}, {"role": "end", "content": "no"}],
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", range(len(CHATS)))
@pytest.mark.parametrize("prompt", [True, False])
def test_templates_render_as_in_transformers(tmp_path: Path, name: str, chat: int, prompt: bool) -> None:
    theirs = save_tokenizer(tmp_path, chat_template=TEMPLATES[name])
    ours = ChatTemplate.from_folder(tmp_path, Tokenizer.from_folder(tmp_path).special_tokens)
    assert ours is not None
    more = {"enable_thinking": False} if chat else {}
    if name == "inst" and chat == 2:
        with pytest.raises(ArgumentError, match=r"messages: expected .*, got what it refuses \(Roles must alternate"):
            ours.render(CHATS[chat])
        return
    wanted = theirs.apply_chat_template(CHATS[chat], tokenize=False, add_generation_prompt=prompt, **more)
    assert ours.render(CHATS[chat], add_generation_prompt=prompt, **more) == wanted


@pytest.mark.parametrize("name", ["self", "more", "plain", "args", "kwargs", "context", "template", "environment"])
def test_a_variable_may_have_any_name(name: str) -> None:
    variables: dict[str, Any] = {name: "y"}
    shown = "" if name == "self" else f"{{{{ {name} }}}}"  # which is jinja2's own within a template
    assert ChatTemplate("{{ messages[0].content }}" + shown).render(CHATS[1], **variables) == ("ay" if shown else "a")


def test_where_a_template_is_found(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, chat_template=None)
    assert ChatTemplate.from_folder(tmp_path) is None
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    messages = [{"role": "user", "content": "x"}]
    for written, rendered in [
        ("one", "one"),
        ([{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}], "three"),
        ([{"name": "rag", "template": "four"}], "four"),
    ]:
        path.write_text(json.dumps({**config, "chat_template": written}))
        found = ChatTemplate.from_folder(tmp_path)
        assert found is not None and found.render(messages) == rendered
    (tmp_path / "chat_template.json").write_text('{"chat_template": "five {{ messages[0].content }}"}')
    assert ChatTemplate.from_folder(tmp_path).render(messages) == "five x"  # type: ignore[union-attr]
    (tmp_path / "chat_template.jinja").write_text("six")
    assert ChatTemplate.from_folder(tmp_path).render(messages) == "six"  # type: ignore[union-attr]


TOOLS = [{"type": "function", "function": {"name": "f", "description": "é <x>", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("form", ["files", "a list", "chat_template.json"])
@pytest.mark.parametrize("names", [["default", "tool_use"], ["default", "rag"], ["tool_use", "default", "rag"]])
@pytest.mark.parametrize("tools", [None, [], TOOLS])
def test_tools_take_the_template_of_tools_as_in_transformers(tmp_path: Path, form: str, names: list[str], tools: Any) -> None:
    templates = {name: f"{name} {{{{ tools | tojson }}}} {{{{ messages[0].content }}}}" for name in names}
    theirs = save_tokenizer(tmp_path, chat_template=templates)
    if form != "files":
        shutil.rmtree(tmp_path / "additional_chat_templates")
        (tmp_path / "chat_template.jinja").unlink()
        path = tmp_path / ("tokenizer_config.json" if form == "a list" else form)
        config = json.loads(path.read_text()) if path.exists() else {}
        listed = [{"name": name, "template": template} for name, template in templates.items()]
        path.write_text(json.dumps({**config, "chat_template": [*listed, {"name": [], "template": "x"}, {"name": "default"}, 3]}))
    ours = ChatTemplate.from_folder(tmp_path)
    assert ours is not None
    assert ours.render(CHATS[0], tools=tools) == theirs.apply_chat_template(CHATS[0], tools=tools, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize(
    "sent", [["reasoning_content"], ["thinking"], ["reasoning"], ["reasoning", "thinking"], ["thinking", "reasoning_content"], []]
)
def test_reasoning_is_told_by_each_name_as_in_transformers(tmp_path: Path, sent: list[str]) -> None:
    template = "{% for m in messages %}{{ m.role }} {{ m.reasoning_content }} {{ m.thinking }} {{ m.reasoning }}{% endfor %}"
    theirs, ours = save_tokenizer(tmp_path, chat_template=template), ChatTemplate(template)
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **{name: f"by {name}" for name in sent}}]
    assert ours.render(chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_a_template_has_the_special_tokens_of_a_model(tmp_path: Path) -> None:
    template = "{{ bos_token }} {{ image_token }} {{ boi_token }} {{ other_token }} {{ eos_token }}"
    save_tokenizer(tmp_path, chat_template=template)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for own in (
        {"image_token": "<i>"},
        {"boi_token": {"__type": "AddedToken", "content": "<b>"}, "image_token": "<i>", "add_bos_token": True},
        {"extra_special_tokens": {"image_token": "<i>"}, "other_token": "<o>"},
        {"model_specific_special_tokens": {"other_token": "<o>"}},
    ):
        path.write_text(json.dumps({**config, **own}))
        theirs, tokens = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_folder(tmp_path).special_tokens
        assert tokens == theirs.special_tokens_map
        ours = ChatTemplate.from_folder(tmp_path, tokens)
        assert ours is not None and ours.render(CHATS[0]) == theirs.apply_chat_template(CHATS[0], tokenize=False)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append({}) }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ 1 / 0 }}",
        "{{ nothing.more }}",
        "{{ 'x' + 1 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_what_a_template_may_not_do_is_one_sentence(template: str) -> None:
    with pytest.raises(ArgumentError, match=r"messages: expected a conversation that the chat template takes, got what it refuses \(") as caught:
        ChatTemplate(template).render([{"role": "user", "content": "x"}])
    assert "\n" not in str(caught.value)


def test_damaged_templates_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the chat template: expected a jinja2 template, got "):
        ChatTemplate("{% for %}")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: expected a jinja2 template, got bytes that are no UTF-8"):
        ChatTemplate.from_folder(tmp_path)
