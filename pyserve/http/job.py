"""A checked request: what the engine is asked, and how the client wants the answer."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyserve.errors import ContextExceeded, InvalidRequest
from pyserve.http import sampling
from pyserve.http.prompts import TokenPrompt
from pyserve.http.schema import GenerationBody
from pyserve.types import SequenceRequest

if TYPE_CHECKING:
    from pyserve.generation import Generation
    from pyserve.http.state import ServerState

ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Job:
    """One request. Its sequences are the prompts in order, the choices of a prompt side by side."""

    id: str
    requests: tuple[SequenceRequest, ...]
    num_choices: int
    stops: tuple[str, ...]
    min_tokens: int
    is_stream: bool
    include_usage: bool
    continuous_usage: bool
    include_preemption: bool
    timings_per_token: bool
    return_tokens: bool
    return_progress: bool
    comments: bool
    ping_interval_s: float
    prompt_field: str = "prompt"  # of the body, for errors
    echoes: tuple[str, ...] = ()  # per prompt: text that goes before the answer

    def echo(self, index: int) -> str:
        """The text before the answer of the sequence `index`."""
        return self.echoes[index // self.num_choices] if self.echoes else ""


def make_job(
    body: GenerationBody,
    prompts: list[TokenPrompt],
    state: ServerState,
    *,
    prefix: str,
    num_logprobs: int | None,
    prompt_logprobs: int | None = None,
    prompt_field: str = "prompt",
    echoes: tuple[str, ...] = (),
) -> Job:
    """Check the fields that all generating endpoints share. Raises InvalidRequest."""
    _check_constraints(body)
    tokenizer = state.served.tokenizer
    count = sampling.num_choices(body, state.served.engine.limits.num_slots)
    params = sampling.sampling_params(body, tokenizer, num_logprobs)
    limit = sampling.max_tokens(body)
    requests = tuple(
        SequenceRequest(
            prompt=prompt.tokens,
            sampling=sampling.for_choice(params, choice),
            max_tokens=limit,
            stop_tokens=tokenizer.eog_ids,
            prompt_logprobs=prompt_logprobs,
            cache_prompt=body.cache_prompt is not False,
        )
        for prompt in prompts
        for choice in range(count)
    )
    options = body.stream_options
    interval_s = state.settings.sse_ping_interval_s if body.sse_ping_interval is None else body.sse_ping_interval
    return Job(
        id=prefix + "".join(secrets.choice(ALPHABET) for _ in range(32)),
        requests=requests,
        num_choices=count,
        stops=sampling.stop_strings(body),
        min_tokens=body.min_tokens or 0,
        is_stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        include_preemption=bool(options and options.include_preemption),
        timings_per_token=bool(body.timings_per_token),
        return_tokens=bool(body.return_tokens or body.return_token_ids),
        return_progress=bool(body.return_progress),
        comments=state.settings.sse_comments and body.sse_comments is not False,
        ping_interval_s=max(interval_s, 0.05) if interval_s > 0 else -1.0,
        prompt_field=prompt_field,
        echoes=echoes,
    )


def submit(job: Job, state: ServerState) -> Generation:
    """Start it. Raises ContextExceeded, which names the prompt's field, or Unavailable; then nothing was started."""
    try:
        return state.served.engine.submit(job.requests, job.id)
    except ContextExceeded as error:
        error.param = job.prompt_field
        if len(job.requests) > job.num_choices:
            lens = [len(each.prompt) for each in job.requests[:: job.num_choices]]
            error.message = f"Field '{job.prompt_field}[{lens.index(error.n_prompt_tokens)}]': {error.message}"
        raise


def _check_constraints(body: GenerationBody) -> None:
    """Grammars are not built yet, and silence about a wish for one would be a wrong answer."""
    if body.grammar:
        raise InvalidRequest("Field 'grammar': grammars are not supported yet", param="grammar")
    if body.json_schema:
        raise InvalidRequest("Field 'json_schema': schemas are not supported yet", param="json_schema")
    if body.response_format is None:
        return
    kind = body.response_format.get("type")
    if kind in ("json_object", "json_schema"):
        raise InvalidRequest(f"Field 'response_format': type \"{kind}\" is not supported yet", param="response_format")
    if kind != "text":
        raise InvalidRequest("Field 'response_format.type': expected \"text\"", param="response_format")
