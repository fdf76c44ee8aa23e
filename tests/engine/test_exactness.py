"""The same request gives the same tokens and the same log-probabilities, bit for bit, whatever happens around it
(R36-R38).

Random workloads on random pools, parked again and again by force and by pressure, against each request alone.
Log-probabilities are compared as floats: a logit that differs in its last bit is seen, also where the token is the
same.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pyserve.models.load import Model, load
from pyserve.types import SamplingParams, SequenceRequest
from tests.engine.workload import Outcome, run
from tools.make_tiny_model import make_gguf

FORCED_PARKS = 1000
SAMPLINGS = (
    SamplingParams(temperature=0.0, num_logprobs=2),
    SamplingParams(temperature=1.2, top_k=0, top_p=1.0, min_p=0.0, num_logprobs=1),
    SamplingParams(temperature=0.7, repeat_penalty=1.3, frequency_penalty=0.2, num_logprobs=1),
)


# Heads of 32 dimensions: those whose bf16 a processor multiplies in pairs, if it can.
@pytest.fixture(scope="module", params=[("F32", 32), ("Q4_1", 16)], ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    kind, head_dim = request.param
    path = tmp_path_factory.mktemp("exact") / "tiny.gguf"
    make_gguf(path, type=kind, head_dim=head_dim, seed=8)
    return load(path, max_tokens=600, max_samples=600, max_positions=512, num_threads=2)


def random_request(source: random.Random, shared: tuple[int, ...]) -> SequenceRequest:
    own = tuple(source.randrange(3, 96) for _ in range(source.randrange(1, 60)))
    prompt = (shared[: source.choice([0, 0, 20, 33])] + own)[:90]
    sampling = replace(source.choice(SAMPLINGS), seed=source.randrange(1 << 40))
    return SequenceRequest(prompt, sampling, max_tokens=source.randrange(20, 70))


def seen(outcome: Outcome) -> object:
    assert outcome.error is None
    return outcome.tokens, outcome.logprobs


def test_a_thousand_parks_change_no_bit(model: Model) -> None:
    source = random.Random(1)
    shared = tuple(source.randrange(3, 96) for _ in range(40))
    num_parks = 0
    while num_parks < FORCED_PARKS:
        requests = [random_request(source, shared) for _ in range(source.randrange(2, 7))]
        page_size = source.choice([1, 4, 16, 64])
        kv_type = source.choice(["f32", "f16", "bf16"])
        together = run(
            model,
            [[request] for request in requests],
            ctx_size=source.randrange(192, 420),
            parallel=source.randrange(1, 7),
            page_size=page_size,
            kv_type=kv_type,
            batch_size=source.choice([7, 32, 512]),
            preempt_every=source.choice([2, 3, 5]),
            preempt_async=source.choice([True, False]),
            preempt_planner=source.choice([True, True, False]),
        )
        alone = [run(model, [[r]], ctx_size=512, parallel=1, kv_type=kv_type).outcomes[0] for r in requests]
        assert [seen(outcome) for outcome in together.outcomes] == [seen(outcome) for outcome in alone]
        assert together.preempts == together.resumes
        num_parks += together.preempts
