"""Endpoints about text and tokens: tokenize, detokenize, apply-template, the count of a chat's tokens."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyserve.errors import InvalidRequest
from pyserve.http.messages import render_chat
from pyserve.http.openai import chat_tokens, prepare
from pyserve.http.prompts import check_tokens
from pyserve.http.schema import ChatBody, DetokenizeBody, TokenizeBody, decode, read_body
from pyserve.http.shapes import json_response, token_bytes
from pyserve.http.state import ServerState


async def tokenize(request: Request) -> Response:
    """POST /tokenize: llama.cpp's `content`, or vLLM's `prompt` or `messages`."""
    state: ServerState = request.app.state.server
    return await prepare(await read_body(request), lambda data: json_response(_tokenize(data, state)))


async def detokenize(request: Request) -> Response:
    """POST /detokenize."""
    state: ServerState = request.app.state.server
    return await prepare(await read_body(request), lambda data: json_response(_detokenize(data, state)))


async def apply_template(request: Request) -> Response:
    """POST /apply-template: the text of a chat's prompt."""
    state: ServerState = request.app.state.server
    template = state.served.chat_template
    chat = await prepare(await read_body(request), lambda data: render_chat(decode(data, ChatBody), template))
    return json_response({"prompt": chat.text})


async def input_tokens(request: Request) -> Response:
    """POST /v1/chat/completions/input_tokens."""
    state: ServerState = request.app.state.server
    prompt, _ = await prepare(await read_body(request), lambda data: chat_tokens(decode(data, ChatBody), state))
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})


def _tokenize(data: bytes, state: ServerState) -> dict[str, Any]:
    body = decode(data, TokenizeBody)
    tokenizer = state.served.tokenizer
    if body.messages is not None:
        prompt, _ = chat_tokens(ChatBody(messages=body.messages), state)
        return _counted(list(prompt.tokens), body, state)
    text = body.content if body.content is not None else body.prompt or ""
    add_special = body.content is None if body.add_special is None else body.add_special
    tokens = tokenizer.encode(
        text, add_special=add_special and bool(text), parse_special=body.parse_special is not False
    )
    if body.content is None and body.prompt is not None:
        return _counted(tokens, body, state)
    return {"tokens": [_with_piece(token, state) for token in tokens] if body.with_pieces else tokens}


def _detokenize(data: bytes, state: ServerState) -> dict[str, Any]:
    tokenizer = state.served.tokenizer
    tokens = decode(data, DetokenizeBody).tokens
    if tokens is None:
        raise InvalidRequest("Field 'tokens' is missing", param="tokens")
    text = tokenizer.decode(check_tokens(tokens, tokenizer, "tokens"), include_special=True)
    return {"content": text, "prompt": text}


def _counted(tokens: list[int], body: TokenizeBody, state: ServerState) -> dict[str, Any]:
    served = state.served
    strings = [served.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": served.engine.limits.context_len,
        "tokens": tokens,
        "token_strs": strings,
    }


def _with_piece(token: int, state: ServerState) -> dict[str, Any]:
    """The token with its text, or with its bytes where they are no text by themselves."""
    data = token_bytes(token, state.served.tokenizer)
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}
