"""Chat messages -> prompt text, by a model's own Jinja template, rendered as transformers does.

Templates come with models from strangers: they run in Jinja's sandbox and see plain data only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidRequestError, TokenizerError
from octavo.text.folder_files import DEFAULT_TEMPLATE
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import jinja2

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles every template may be given; others only when the template itself names them."""
NAME = re.compile(r"[\w-]+")
"""What names a template; as a template it would be a constant."""
_BLOCK = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
_TOOLS = re.compile(r"\btools\b")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTINUE = "<|octavo: the message goes on here|>"

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled template. Raises `InvalidRequestError` when it is no valid Jinja."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        import jinja2

        if not isinstance(source, str):
            raise InvalidRequestError(
                f"chat_template must be Jinja text, got {type(source).__name__}",
                parameter="chat_template",
            )
        self.source = source
        self.knows_tools = any(_TOOLS.search(block) for block in _BLOCK.findall(source))
        """Whether it does something with tools, as far as can be seen."""
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"the chat template cannot be compiled: {error}", parameter="chat_template"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text, special tokens written out (encode it without adding any).

        add_generation_prompt: end with the head of an assistant's message. continue_final_message:
        end inside the last message instead, so that the model goes on with it. variables: whatever
        else the template knows (`enable_thinking`). Raises `InvalidRequestError` for messages that
        are malformed or that the template refuses.
        """
        chat = [self._message(i, m) for i, m in enumerate(_checked_list(messages))]
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequestError(
                    "add_generation_prompt and continue_final_message exclude each other",
                    parameter="continue_final_message",
                )
            chat[-1]["content"] = f"{chat[-1].get('content') or ''}{_CONTINUE}"
        rendered = self._render(
            messages=chat,
            tools=_plain(tools),
            documents=_plain(documents),
            add_generation_prompt=add_generation_prompt,
            **_plain(variables),
        )
        return _cut(rendered) if continue_final_message else rendered

    def _render(self, **variables: Any) -> str:
        try:
            # what the caller passes wins over the tokenizer's own special tokens
            return self._template.render(**(self._special_tokens | variables))
        except RecursionError as error:
            raise InvalidRequestError(
                "the chat template recurses without end", parameter="chat_template"
            ) from error
        except Exception as error:
            # raise_exception means the messages, and so does all else a template trips over
            raise InvalidRequestError(
                f"the chat template refuses the messages: {error}", parameter="messages"
            ) from error

    def _message(self, index: int, message: Any) -> dict[str, Any]:
        """Checked and rebuilt from plain data; keys with None are dropped, as transformers does."""
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise _bad(f"{where} must be an object with role and content, got {message!r}")
        fields = {k: _plain(v) for k, v in message.items() if v is not None}
        role = fields.get("role")
        if not isinstance(role, str) or not role:
            raise _bad(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}")
        if role not in ROLES and not any(q + role + q in self.source for q in "'\""):
            raise _bad(
                f"{where}.role {role!r} is known neither to octavo ({', '.join(ROLES)}) nor to the "
                "model's chat template"
            )
        if "content" in fields:
            fields["content"] = _content(where, fields["content"])
        elif not any(key in fields for key in ("tool_calls", *_REASONING)):
            raise _bad(f"{where} has no content")
        reasoning = next((fields[key] for key in _REASONING if key in fields), None)
        if reasoning is not None:
            fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
        return fields


def chat_template(
    tokenizer: Tokenizer, source: str | None = None, tools: bool = False
) -> ChatTemplate:
    """The template to use: `source` when given, otherwise the tokenizer's.

    source: Jinja text, or the name of one of the model's templates. tools: prefer the model's
    template for tools where it has two. Raises `TokenizerError` when the model has none,
    `InvalidRequestError` when it has none of that name.
    """
    templates = tokenizer.chat_templates
    if source is not None and NAME.fullmatch(source):
        if source not in templates:
            raise InvalidRequestError(
                f"the model has no chat template called {source!r}; it has: "
                f"{', '.join(templates) or 'none'}",
                parameter="chat_template",
            )
        source = templates[source]
    if source is None:
        source = templates.get("tool_use") if tools else None
        source = source or templates.get(DEFAULT_TEMPLATE)
    if source is None:
        others = ", ".join(templates)
        raise TokenizerError(
            "the model has no chat template"
            + (f" called {DEFAULT_TEMPLATE!r} (it has {others})" if others else "")
            + ": use generate() or /v1/completions with a plain prompt, pass chat_template, or "
            "take an instruct model"
        )
    return ChatTemplate(source, tokenizer.special_tokens)


def _checked_list(messages: Any) -> Sequence[Any]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise _bad(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise _bad("messages is empty: give at least one message")
    return messages


def _content(where: str, content: Any) -> str:
    """Text, or the text parts of an OpenAI content list, one to a line."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(f"{where}.content must be text or a list of text parts, got {content!r}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise _bad(f"{where}.content: only text parts are supported, got {kind or part!r}")
    return "\n".join(texts)


def _cut(rendered: str) -> str:
    """Everything before the mark; templates that trim messages lose the space before it too."""
    at = rendered.rfind(_CONTINUE)
    if at < 0:
        raise InvalidRequestError(
            "the chat template drops the last message, so it cannot be continued",
            parameter="continue_final_message",
        )
    return rendered[:at]


def _plain(value: Any) -> Any:
    """Rebuilt from JSON types: methods of richer objects are no business of a template's."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return f"<{type(value).__name__}>"


def _bad(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, parameter="messages")


def _environment() -> jinja2.Environment:
    """Options, filters and functions that templates on the hub rely on."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what an assistant said, for training; here it is transparent."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> Node | list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own escapes HTML
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
