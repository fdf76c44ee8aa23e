"""Chat messages as clients send them, checked and put into the form that templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyserve.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a template takes tool calls: arguments as objects or as JSON texts, no content as null or as ""."""

    takes_objects: bool
    takes_null: bool


def prepare(messages: object, *, is_developer_known: bool) -> list[dict[str, Any]]:
    """A copy of `messages` that templates understand. Raises InvalidRequest naming the message at fault.

    Content becomes one text: null and missing are "" (beside tool calls they stay null, see `fit`), the texts of a
    list of parts are joined by newlines. The role `developer` becomes `system` unless the template knows it. Arguments
    of tool calls given as JSON become objects.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise _bad("messages", "expected a list with at least one message")
    prepared = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _bad(f"messages[{i}]", "expected an object")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise _bad(f"messages[{i}].role", "expected a string that is not empty")
        if role == "developer" and not is_developer_known:
            role = "system"
        copy = {**message, "role": role, "content": _content(message.get("content"), f"messages[{i}].content")}
        calls = copy.pop("tool_calls", None)
        if calls:
            copy["tool_calls"] = _tool_calls(calls, f"messages[{i}].tool_calls")
            copy["content"] = copy["content"] or None
        prepared.append(copy)
    return prepared


def fit(messages: list[dict[str, Any]], style: CallStyle) -> list[dict[str, Any]]:
    """`messages` from `prepare` with those that hold tool calls in the form that the template takes."""
    return [_fit(message, style) if "tool_calls" in message else message for message in messages]


def _fit(message: dict[str, Any], style: CallStyle) -> dict[str, Any]:
    calls = message["tool_calls"]
    if not style.takes_objects:
        calls = [_with_argument_text(call) for call in calls]
    content = message["content"] or (None if style.takes_null else "")
    return {**message, "tool_calls": calls, "content": content}


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _bad(where, "expected a string, a list of parts or null")
    return "\n".join(_part(part, f"{where}[{j}]") for j, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping):
        raise _bad(where, "expected an object")
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise _bad(f"{where}.type", f"{kind!r} is not supported; only text is")
    field = "refusal" if kind == "refusal" else "text"
    text = part.get(field)
    if not isinstance(text, str):
        raise _bad(f"{where}.{field}", "expected a string")
    return text


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise _bad(where, "expected a list")
    return [_tool_call(call, f"{where}[{j}]") for j, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise _bad(where, "expected an object")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _bad(f"{where}.function", "expected an object with a name")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: object) -> object:
    """The object in a JSON text; anything else as it is, since a model may have written broken arguments."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _with_argument_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _bad(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"Field '{where}': {what}", param="messages")
