"""What shows the server, and what guards it: health, metrics, slots, props, models, tokens, keys, CORS, loading."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pyserve.app import create_app
from pyserve.settings import Settings
from pyserve.types import Counters
from tests.http.asking import ask, chat, loaded_app
from tests.http.fake_engine import FakeEngine, FakeServed, starter, word

KEYS = Settings(api_keys=("first", "second"))


def get(path: str, **kwargs: Any) -> Any:
    response = ask("GET", path, **kwargs)
    assert response.status_code == 200
    return response.json()


def test_health_says_ok_and_how_old_the_last_step_is() -> None:
    shown = get("/health")
    assert shown["status"] == "ok" and 0 <= shown["last_step_age_ms"] < 1000 and shown["slots_idle"] == 4
    assert get("/v1/health", served=FakeServed(FakeEngine(is_stuck=True)))["status"] == "stuck"


def test_slots_show_state_parks_and_cells() -> None:
    engine = FakeEngine(num_open=1)
    busy, idle = get("/slots", served=FakeServed(engine))[:2]
    assert busy["is_processing"] and busy["cells"] == 4 and busy["next_token"][0]["n_decoded"] == 1
    assert not idle["is_processing"] and not idle["is_preempted"] and idle["n_preempt"] == 0 and idle["n_ctx"] == 1024
    assert "id_task" not in idle and busy["id_task"] == "task"
    engine.num_open = 4
    full = ask("GET", "/slots?fail_on_no_slot=1", served=FakeServed(engine))
    assert full.status_code == 503 and full.json()["error"]["message"] == "no slot available"


def test_props_say_slots_pool_and_parking() -> None:
    shown = get("/props")
    assert shown["total_slots"] == 4 and shown["default_generation_settings"]["n_ctx"] == 1024
    assert shown["pool"]["tokens"] == 1024 and shown["parking"]["budget_tokens"] == 100_000
    assert shown["parking"]["is_async"] is True and shown["parking"]["is_pinned"] is False
    assert shown["parking"]["copy_tuning"] == {"max_calls": 9}
    assert "<|im_start|>" in shown["chat_template"] and shown["eos_token"] == "<|im_end|>"


def test_models_are_listed_by_alias_and_found_by_every_name() -> None:
    settings = Settings(alias="zeta, team/alpha")
    shown = get("/v1/models", settings=settings)
    assert [one["id"] for one in shown["data"]] == ["team/alpha"] == [one["name"] for one in shown["models"]]
    assert shown["data"][0]["meta"]["n_ctx_train"] == 2048 and shown["data"][0]["max_model_len"] == 1024
    for name in ("zeta", "team/alpha"):
        assert get(f"/v1/models/{name}", settings=settings)["id"] == "team/alpha"
    missing = ask("GET", "/v1/models/other", settings=settings)
    assert missing.status_code == 404 and missing.json()["error"]["param"] == "model"
    assert chat(settings=settings).json()["model"] == "team/alpha"


def test_metrics_are_prometheus_text_with_llama_cpps_names() -> None:
    counters = Counters(preempts=3, resumes=2, steps=10, busy_slots=25, longest_sequence=99, generated_tokens=5)
    counters.observe("ttft_s", 0.03)
    response = ask("GET", "/metrics", served=FakeServed(FakeEngine(counters=counters)))
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    expected = {"n_preempt_total": 3, "n_resume_total": 2, "n_tokens_max": 99, "n_busy_slots_per_decode": 2.5}
    zero = dict.fromkeys(("requests_preempted", "preempt_ram_bytes", "requests_deferred"), 0)
    for name, value in (expected | zero).items():
        assert samples[f"llamacpp:{name}", None] == value
    assert samples["pyserve:time_to_first_token_seconds_count", None] == 1
    assert samples["pyserve:time_to_first_token_seconds_bucket", "+Inf"] == 1
    assert samples["pyserve:inter_token_seconds_count", None] == 0
    assert not any(name.endswith("_created") for name, _ in samples)


def test_tokens_there_and_back() -> None:
    assert ask("POST", "/tokenize", {"content": "Hello there"}).json() == {"tokens": [word("Hello"), word(" there")]}
    pieces = ask("POST", "/tokenize", {"content": "Aé", "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": 65, "piece": "A"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert ask("POST", "/tokenize", {}).json() == {"tokens": []}
    special = {"content": "<|im_end|>", "parse_special": False}
    assert len(ask("POST", "/tokenize", special).json()["tokens"]) == 10
    assert ask("POST", "/tokenize", {"prompt": "Hello"}).json()["count"] == 1
    assert ask("POST", "/detokenize", {"tokens": [word("Hello"), 195, 169]}).json()["content"] == "Helloé"
    assert ask("POST", "/detokenize", {"tokens": [-1]}).status_code == 400
    assert ask("POST", "/detokenize", {}).status_code == 400


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/apply-template"])
def test_a_long_text_does_not_hold_up_the_event_loop(path: str) -> None:
    served = FakeServed()
    threads: list[threading.Thread] = []

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: threads.append(threading.current_thread()) or method(*args, **kwargs)

    messages = [{"role": "user", "content": "a" * 20_000}]
    body = {"content": "a" * 20_000, "tokens": [97] * 20_000, "messages": messages}
    wanted = {"/tokenize": "content", "/detokenize": "tokens", "/apply-template": "messages"}[path]
    with (
        patch.object(served.tokenizer, "encode", noted(served.tokenizer.encode)),
        patch.object(served.tokenizer, "decode", noted(served.tokenizer.decode)),
        patch.object(served.chat_template, "render", noted(served.chat_template.render)),
    ):
        assert ask("POST", path, {wanted: body[wanted]}, served=served).status_code == 200
    assert threads and threading.current_thread() not in threads


def test_a_template_is_applied_and_its_tokens_counted() -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert ask("POST", "/apply-template", body).json() == {"prompt": text}
    counted = ask("POST", "/v1/chat/completions/input_tokens", body).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": 10 - 1}


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer first"},
        {"authorization": "bearer second"},
        {"Authorization": "first"},
        {"X-Api-Key": "second"},
    ],
)
def test_a_known_key_opens_in_every_form(headers: dict[str, str]) -> None:
    assert ask("GET", "/props", settings=KEYS, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer third"}, {"Authorization": "Bearer "}, {"X-Api-Key": "firs"},
     {"Authorization": "wrong", "X-Api-Key": "first"}, {"Authorization": "Bearer \u00e9"}],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/props", "/slots", "/metrics", "/v1/models/x", "/nope"])
def test_an_unknown_key_does_not(path: str, headers: dict[str, str]) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    response = ask("GET", path, settings=KEYS, headers=encoded)  # type: ignore[arg-type]
    assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/models", "/v1/models"])
def test_some_paths_are_open_to_all(path: str) -> None:
    assert ask("GET", path, settings=KEYS).status_code == 200


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/v1/models", 200), ("/", 200), ("/props", 401)])
@pytest.mark.parametrize("prefix", ["/llm", "/llm/"])
def test_a_prefix_changes_nothing_about_who_may_ask(prefix: str, path: str, status: int) -> None:
    """hypercorn --root-path: the scope's path has it, and the gate knows the paths below it."""
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    scope = {"type": "http", "method": "GET", "path": f"/llm{path}", "raw_path": b"", "root_path": prefix}
    rest = {"query_string": b"", "headers": [], "http_version": "1.1"}
    asyncio.run(loaded_app(settings=KEYS)({**scope, **rest}, receive, send))
    assert statuses[0] == status


@pytest.mark.parametrize("path", ["/props", "/v1/models", "/nope"])
def test_a_body_that_nobody_wants_is_read_to_its_end(path: str) -> None:
    """Otherwise hypercorn stops reading the connection and does not see it close."""
    chunks = [{"type": "http.request", "body": b"x" * 65536, "more_body": left > 0} for left in reversed(range(30))]
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return chunks.pop(0)

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": b"", "query_string": b"", "headers": []}
    asyncio.run(loaded_app(settings=KEYS)({**scope, "root_path": "", "http_version": "1.1"}, receive, send))
    assert chunks == [] and statuses[0] in (401, 404, 405)


def test_cors_reflects_the_origin_also_on_errors_and_before_keys() -> None:
    origin = {"Origin": "https://page.example"}
    for method, path, status in (("GET", "/health", 200), ("GET", "/nope", 401), ("OPTIONS", "/v1/completions", 200)):
        response = ask(method, path, settings=KEYS, headers=origin)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == "https://page.example"
        assert response.headers["access-control-allow-credentials"] == "true"
    assert response.content == b"" and "POST" in response.headers["access-control-allow-methods"]
    assert "access-control-allow-origin" not in ask("GET", "/health").headers


@pytest.mark.parametrize(
    ("origins", "origin", "is_allowed"),
    [
        ("localhost", "http://localhost:3000", True),
        ("localhost", "http://[::1]:8080", True),
        ("localhost", "https://localhost.evil.example", False),
        ("https://a.example", "https://a.example", True),
        ("https://a.example", "https://b.example", False),
        ("localhost", "http://[bad", False),
    ],
)
def test_cors_origins_can_be_narrowed(origins: str, origin: str, is_allowed: bool) -> None:
    response = ask("GET", "/health", settings=Settings(cors_origins=origins), headers={"Origin": origin})
    assert ("access-control-allow-origin" in response.headers) == is_allowed


def test_while_the_model_loads_every_path_is_503_and_health_says_how_far() -> None:
    app = create_app(Settings(), starter(FakeServed()))
    state = app.make()
    state.load_stage, state.load_fraction = "packing weights", 0.5
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/nope"), ("GET", "/slots")):
        response = ask(method, path, app=app)
        assert response.status_code == 503 and response.json()["error"]["message"] == "Loading model"
        assert response.json()["error"]["type"] == "unavailable_error"
    health = ask("GET", "/health", app=app)
    assert health.status_code == 503
    assert health.json()["progress"] == {"stage": "packing weights", "fraction": 0.5}
    assert ask("OPTIONS", "/v1/models", app=app).status_code == 200
