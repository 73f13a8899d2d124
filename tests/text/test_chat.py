"""Chat templates: the same text as transformers, and errors instead of surprises."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models

from octavo.errors import InvalidRequestError, TokenizerError
from octavo.text.chat import ChatTemplate, chat_template
from octavo.text.tokenizer import FastTokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "blocks": """
    {%- set ns = namespace(last=-1) %}
    {{- bos_token }}
    {% for message in messages[::-1] %}
        {%- if message.role == 'user' %}
            {%- set ns.last = loop.index0 %}
            {%- break %}
        {%- endif %}
    {% endfor %}
    {%- for message in messages %}
        {%- if message.role not in ['system', 'user', 'assistant', 'tool', 'ipython'] %}
            {{- raise_exception('Unknown role: ' ~ message.role) }}
        {%- endif %}
        {%- if loop.index0 == 1 %}{% continue %}{% endif %}
{% if true %}
<|{{ message.role }}|>{{ message.content | trim }}{{ eos_token }}
{% endif %}
    {%- endfor %}
    {%- if tools %}{{ tools | tojson(indent=2) }}{{ tools | tojson }}{% endif %}
    {{- ns.last }}{% if pad_token is defined %}{{ pad_token }}{% endif %}
    {%- if unk_token is defined %}no{% endif %}
    {%- if documents %}{{ documents[0].title }}{% endif %}
    {%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
    {%- if add_generation_prompt %}<|assistant|>{% endif %}
""",
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}|{% endif %}"
        "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{% endfor %}"
    ),
}

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b>&</b> 'you' é 😀"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "2 + 2?\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "hm", "name": None},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "thinking": "why"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é < 1 & 'x'"}}]


def theirs(template: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<pad>": 2}))
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **SPECIAL)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
@pytest.mark.parametrize("generation", [False, True])
def test_equals_transformers(name: str, chat: list[dict[str, Any]], generation: bool) -> None:
    ours, reference = ChatTemplate(TEMPLATES[name], SPECIAL), theirs(TEMPLATES[name])
    thinking = {"enable_thinking": False, "documents": [{"title": "T", "text": ""}]}
    for more in ({}, {"tools": TOOLS}, thinking):
        arguments: dict[str, Any] = {"add_generation_prompt": generation} | more
        expected = reference.apply_chat_template(chat, tokenize=False, **arguments)
        assert ours.render(chat, **arguments) == expected


@pytest.mark.parametrize("name", ["chatml", "blocks"])
def test_final_message_can_be_continued(name: str) -> None:
    chat = [{"role": "user", "content": "x"}, {"role": "user", "content": "y"},
            {"role": "assistant", "content": "Once upon"}]  # fmt: skip
    expected = theirs(TEMPLATES[name]).apply_chat_template(
        chat, tokenize=False, continue_final_message=True
    )
    ours = ChatTemplate(TEMPLATES[name], SPECIAL)
    rendered = ours.render(chat, add_generation_prompt=False, continue_final_message=True)
    assert rendered == expected and rendered.endswith("Once upon")
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        ours.render(chat, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="drops the last message"):
        ChatTemplate("nothing").render(
            chat, add_generation_prompt=False, continue_final_message=True
        )


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    rendered = ChatTemplate("{{ messages[0].content }}").render(
        [{"role": "user", "content": parts}]
    )
    assert rendered == "one\ntwo"


def test_strftime_now() -> None:
    year = ChatTemplate("{{ strftime_now('%Y') }}").render(CHATS[0])
    assert len(year) == 4 and year.isdigit()


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages is empty"),
        ("hello", "must be a list of messages, got str"),
        ({"role": "user"}, "must be a list of messages, got dict"),
        (None, "got NoneType"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role must be one of system.*got None"),
        ([{"role": 3, "content": "x"}], "got 3"),
        ([{"role": "usr", "content": "x"}], r"messages\[0\]\.role 'usr' is known neither"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": None}], "has no content"),
        ([{"role": "user", "content": 5}], "must be text or a list of text parts, got 5"),
        ([CHATS[0][0], {"role": "user", "content": [{"type": "image_url"}]}],
         r"messages\[1\]\.content: only text parts are supported, got 'image_url'"),
    ],
)  # fmt: skip
def test_malformed_messages_are_refused_by_place(messages: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as caught:
        ChatTemplate(TEMPLATES["chatml"]).render(messages)
    assert caught.value.parameter == "messages"


def test_roles_the_template_names_are_accepted() -> None:
    chat = [{"role": "ipython", "content": "x"}]
    assert "<|ipython|>x" in ChatTemplate(TEMPLATES["blocks"], SPECIAL).render(chat)


def test_what_a_template_refuses_is_the_request_s_fault() -> None:
    chat = [{"role": "developer", "content": "x"}]
    with pytest.raises(InvalidRequestError, match="Unknown role: developer") as caught:
        ChatTemplate(TEMPLATES["blocks"], SPECIAL).render(chat)
    assert caught.value.parameter == "messages"


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% endif %}", "{{ x | nofilter }}"])
def test_template_that_does_not_compile(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be compiled") as caught:
        ChatTemplate(source)
    assert caught.value.parameter == "chat_template"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages[0].content() }}",
        "{{ missing.field }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_templates_are_kept_in_the_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate(source).render(CHATS[0])


def test_objects_with_methods_never_reach_a_template() -> None:
    class Danger:
        def run(self) -> str:
            return "ran"

    with pytest.raises(InvalidRequestError):
        ChatTemplate("{{ extra.run() }}").render(CHATS[0], extra=Danger())
    assert ChatTemplate("{{ extra }}").render(CHATS[0], extra=Danger()) == "<Danger>"


def tokenizer(**templates: str) -> FastTokenizer:
    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}))
    return FastTokenizer(backend, special_tokens=SPECIAL, chat_templates=templates)


def test_which_template_is_used() -> None:
    both = tokenizer(default="plain {{ bos_token }}", tool_use="tools")
    assert chat_template(both).render(CHATS[0]) == "plain <s>"
    assert chat_template(both, tools=True).render(CHATS[0]) == "tools"
    assert chat_template(both, "own {{ eos_token }}").render(CHATS[0]) == "own </s>"
    assert chat_template(tokenizer(default="x"), tools=True).render(CHATS[0]) == "x"
    assert chat_template(both, "tool_use").render(CHATS[0]) == "tools"
    with pytest.raises(InvalidRequestError, match=r"called 'rag'; it has: default, tool_use"):
        chat_template(both, "rag")


def test_tools_reach_the_template() -> None:
    source = "{% for t in tools %}{{ t.function.name }};{% endfor %}{{ messages[0].content }}"
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    assert ChatTemplate(source).render(CHATS[0], tools=[tool]).startswith("weather;")


def test_model_without_template_says_what_to_do() -> None:
    with pytest.raises(TokenizerError, match=r"no chat template.*generate\(\)"):
        chat_template(tokenizer())
    with pytest.raises(TokenizerError, match=r"called 'default' .it has rag"):
        chat_template(tokenizer(rag="x"))
