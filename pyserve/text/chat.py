"""Chat messages to the one text that the model was trained to continue, by the Jinja template in the model's file.

A rendering sees the variables that Hugging Face's templates expect: `messages`, `tools`, `documents`,
`add_generation_prompt`, `bos_token`, `eos_token`, and whatever the request adds (`enable_thinking` and the like).
A model without a template gets CHATML, the layout that most chat models share.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from pyserve.errors import InvalidRequest, ModelFileError
from pyserve.text import messages as chat_messages
from pyserve.text import sandbox
from pyserve.text.folder_vocabulary import read_json
from pyserve.text.messages import CallStyle

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ChatTemplate:
    """One model's chat template, compiled. Safe to share between threads."""

    def __init__(self, source: str | None, *, bos: str | None, eos: str | None) -> None:
        """`bos`, `eos`: the texts of these tokens. Raises ModelFileError for a source that is no template."""
        self.is_default = source is None
        self.source = CHATML if source is None else source
        self._tokens = {"bos_token": bos or "", "eos_token": eos or ""}
        try:
            self._template = sandbox.compile_template(self.source)
        except TemplateSyntaxError as error:
            raise ModelFileError(f"chat template, line {error.lineno}: {_one_line(error)}") from error
        except Exception as error:  # a source that is no template at all can fail anywhere in the compiler
            raise ModelFileError(f"chat template: {_one_line(error)}") from error

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        /,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. It holds the template's own BOS text if the template writes one.

        `continue_final_message` ends the text right after the last message's content, for the model to go on with,
        and opens no further turn. Raises InvalidRequest (param `messages`) for messages that the template refuses or
        fails on.
        """
        prepared = chat_messages.prepare(messages, is_developer_known="developer" in self.source)
        mark = ""
        if continue_final_message:
            # The space tells whether the template trims what it shows.
            mark = f"continue-{secrets.token_hex(8)} "
            prepared[-1] = {**prepared[-1], "content": (prepared[-1]["content"] or "") + mark}
        if any("tool_calls" in message for message in prepared):
            prepared = chat_messages.fit(prepared, self._call_style)
        wants_turn = add_generation_prompt and not continue_final_message
        text = self._render(prepared, {**kwargs, "tools": tools or None, "add_generation_prompt": wants_turn})
        return _cut_at(mark, text, prepared[-1]["content"]) if mark else text

    def _render(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        try:
            return self._template.render({"documents": None, **self._tokens, **variables, "messages": messages})
        except sandbox.TemplateRefusal as error:
            raise InvalidRequest(str(error), param="messages") from error
        except Exception as error:  # the template is a stranger's program; whatever it raises is about these messages
            message = f"the model's chat template fails on these messages: {_one_line(error)}"
            raise InvalidRequest(message, param="messages") from error

    @cached_property
    def _call_style(self) -> CallStyle:
        """How the template takes tool calls, found out by trying: the first way that it neither fails on nor shows in
        Python's notation. Most take objects; some paste the arguments as text, and some cannot do without a content.
        """
        function = {"name": "probe", "arguments": {"pyserve_key": "value"}}
        call = {"id": "call00000", "type": "function", "function": function}
        asking: dict[str, Any] = {"role": "user", "content": "probe"}
        probe = [asking, {"role": "assistant", "content": None, "tool_calls": [call]}]
        for takes_objects in (True, False):
            for takes_null in (True, False):
                style = CallStyle(takes_objects, takes_null)
                try:
                    text = self._render(
                        chat_messages.fit(probe, style), {"tools": None, "add_generation_prompt": False}
                    )
                except InvalidRequest:
                    continue
                if "'pyserve_key'" not in text and not (takes_null and "None" in text):
                    return style
        return CallStyle(takes_objects=True, takes_null=False)


def source_in_gguf(metadata: Mapping[str, object]) -> str | None:
    """The chat template in a GGUF file's metadata."""
    source = metadata.get("tokenizer.chat_template")
    return source if isinstance(source, str) and source else None


def source_in_folder(folder: Path | str) -> str | None:
    """The chat template of a Hugging Face folder: chat_template.jinja, or a value in tokenizer_config.json."""
    path = Path(folder) / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{path} cannot be read: {error}") from error
    for name in ("tokenizer_config.json", "chat_template.json"):
        source = read_json(Path(folder) / name).get("chat_template")
        if isinstance(source, list):  # several templates with names
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if isinstance(source, str) and source:
            return source
    return None


def _cut_at(mark: str, text: str, content: str) -> str:
    """`text` up to `mark`, which stands at the end of the last message's `content`."""
    end = text.rfind(mark.rstrip())
    if end < 0:
        message = "the model's chat template does not show the last message, so it cannot be continued"
        raise InvalidRequest(message, param="messages")
    is_trimmed = not text.startswith(mark, end)
    has_text = bool(content.removesuffix(mark).strip())
    return text[:end].rstrip() if is_trimmed and has_text else text[:end]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
