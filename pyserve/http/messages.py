"""A chat as the text of a prompt: which turn is continued, what the template sees, what is not supported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyserve.errors import InvalidRequest
from pyserve.http.schema import ChatBody
from pyserve.text.messages import prepare

if TYPE_CHECKING:
    from pyserve.text.chat import ChatTemplate

OWN_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token")


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The prompt's text, and the start of the answer that the client wrote itself (`prefill`)."""

    text: str
    prefill: str = ""
    is_prefill_asked: bool = False  # continue_final_message was sent, so the client wants the continuation only


def render_chat(body: ChatBody, template: ChatTemplate) -> RenderedChat:
    """The chat as one text. Raises InvalidRequest that names the message."""
    _check_unsupported(body)
    if body.messages is None:
        raise InvalidRequest("Field 'messages' is missing", param="messages")
    messages = prepare(body.messages, is_developer_known=True)  # the template knows whether it does
    if messages and _is_empty_answer(messages[-1]):
        messages.pop()
    if not messages:
        raise InvalidRequest("Field 'messages': expected at least one message", param="messages")
    continues = _continues(body, messages)
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    text = template.render(
        messages, add_generation_prompt=generates, continue_final_message=continues, **_arguments(body)
    )
    if not continues:
        return RenderedChat(text)
    return RenderedChat(text, messages[-1]["content"], body.continue_final_message is True)


def _check_unsupported(body: ChatBody) -> None:
    if body.tools and body.tool_choice != "none":
        raise InvalidRequest(
            "Field 'tools': tool calls are not supported yet; send tool_choice \"none\" to go without", param="tools"
        )
    if body.functions and body.function_call != "none":
        raise InvalidRequest("Field 'functions': function calls are not supported yet", param="functions")
    if body.modalities and any(modality != "text" for modality in body.modalities):
        raise InvalidRequest("Field 'modalities': only \"text\" is supported", param="modalities")


def _is_empty_answer(message: dict[str, Any]) -> bool:
    """Some clients send the answer that they wait for as an empty message."""
    return message["role"] == "assistant" and not message["content"] and not message.get("tool_calls")


def _continues(body: ChatBody, messages: list[dict[str, Any]]) -> bool:
    is_answer = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise InvalidRequest(
                "Fields 'add_generation_prompt' and 'continue_final_message' exclude each other",
                param="continue_final_message",
            )
        if not is_answer:
            raise InvalidRequest(
                "Field 'continue_final_message': the last message is no assistant's text",
                param="continue_final_message",
            )
    elif body.continue_final_message is False or body.add_generation_prompt or not is_answer:
        return False
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise InvalidRequest(
            "Field 'messages': two assistant messages at the end, expected at most one", param="messages"
        )
    return True


def _arguments(body: ChatBody) -> dict[str, Any]:
    """What else the template sees."""
    arguments = {key: value for key, value in (body.chat_template_kwargs or {}).items() if key not in OWN_ARGUMENTS}
    if body.reasoning_effort == "none":
        arguments.setdefault("enable_thinking", False)
    return arguments
