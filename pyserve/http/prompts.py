"""The forms that a prompt may have, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyserve.errors import ContextExceeded, InvalidRequest
from pyserve.http.schema import Prompt

if TYPE_CHECKING:
    from pyserve.http.state import ServerState
    from pyserve.text.tokenizer import Tokenizer

# How many bytes of text a token may stand for on average, in bytes of the longest token: more than one, because some
# vocabularies normalise a text before they cut it.
SHRINKAGE = 4


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """One prompt. `num_added` tokens at its start (BOS) were not asked for and are not echoed."""

    tokens: tuple[int, ...]
    num_added: int = 0


def completion_prompts(prompt: Prompt | None, state: ServerState) -> list[TokenPrompt]:
    """A string, token ids, a mix of both, or a list of strings and lists of ids. Raises InvalidRequest.

    What can never be served is refused before the work: millions of prompts, a text beyond any context.
    """
    tokenizer = state.served.tokenizer
    if prompt is None:
        raise InvalidRequest("Field 'prompt' is missing", param="prompt")
    if isinstance(prompt, str):
        check_text_size(prompt, state, "prompt")
        return [_text(prompt, tokenizer, "prompt")]
    if not prompt:
        raise InvalidRequest("Field 'prompt': expected at least one prompt", param="prompt")
    for index, part in enumerate(prompt):
        if isinstance(part, str):
            check_text_size(part, state, f"prompt[{index}]")
    if any(isinstance(part, int) for part in prompt):
        return [_mixed(prompt, tokenizer)]
    most = state.settings.max_queue + state.served.engine.limits.num_slots
    if len(prompt) > most:
        raise InvalidRequest(f"Field 'prompt': expected at most {most} prompts, got {len(prompt)}", param="prompt")
    return [_one(part, tokenizer, f"prompt[{index}]") for index, part in enumerate(prompt)]


def chat_prompt(text: str, state: ServerState) -> TokenPrompt:
    """A rendered chat: special tokens are read as such, and BOS is added unless the template wrote it."""
    tokenizer = state.served.tokenizer
    check_text_size(text, state, "messages")
    tokens = tokenizer.encode(text)
    bos = tokenizer.bos_id
    if tokenizer.adds_bos and bos is not None and tokens[:1] != [bos]:
        tokens = [bos, *tokens]
    if not tokens:
        raise InvalidRequest("Field 'messages': the prompt is empty", param="messages")
    return TokenPrompt(tuple(tokens))


def check_text_size(text: str, state: ServerState, field: str) -> None:
    """Raises ContextExceeded for a text that cannot fit, whatever its tokens are, before memory is spent on them."""
    context_len = state.served.engine.limits.context_len
    most = context_len * state.served.tokenizer.longest_token_bytes * SHRINKAGE
    if len(text) <= most:
        return
    least = len(text) * context_len // most
    message = f"Field '{field}': at least {least} tokens and a conversation may have {context_len}: shorten it"
    raise ContextExceeded(message, n_prompt_tokens=least, n_ctx=context_len, param=field.split("[", 1)[0])


def check_tokens(tokens: Sequence[int], tokenizer: Tokenizer, field: str) -> tuple[int, ...]:
    """Token ids that exist. Raises InvalidRequest."""
    for token in tokens:
        if not 0 <= token < tokenizer.vocab_size:
            name = field.split("[", 1)[0]
            raise InvalidRequest(f"Field '{field}': no token has the id {token}", param=name)
    return tuple(tokens)


def _one(part: str | int | list[int], tokenizer: Tokenizer, field: str) -> TokenPrompt:
    if isinstance(part, str):
        return _text(part, tokenizer, field)
    assert not isinstance(part, int)
    return _checked(list(part), 0, tokenizer, field)


def _text(text: str, tokenizer: Tokenizer, field: str) -> TokenPrompt:
    tokens = tokenizer.encode(text)
    num_added = 0
    if tokenizer.adds_bos and tokenizer.bos_id is not None:
        tokens, num_added = [tokenizer.bos_id, *tokens], 1
    return _checked(tokens, num_added, tokenizer, field)


def _mixed(parts: Sequence[str | int | list[int]], tokenizer: Tokenizer) -> TokenPrompt:
    tokens: list[int] = []
    for index, part in enumerate(parts):
        if isinstance(part, list):
            raise InvalidRequest(f"Field 'prompt[{index}]': expected integer or string, got list", param="prompt")
        tokens += [part] if isinstance(part, int) else tokenizer.encode(part)
    return _checked(tokens, 0, tokenizer, "prompt")


def _checked(tokens: list[int], num_added: int, tokenizer: Tokenizer, field: str) -> TokenPrompt:
    if not tokens:
        raise InvalidRequest(f"Field '{field}': the prompt is empty", param="prompt")
    return TokenPrompt(check_tokens(tokens, tokenizer, field), num_added)
