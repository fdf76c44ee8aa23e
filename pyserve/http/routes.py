"""Which path is answered by what."""

from __future__ import annotations

from starlette.routing import Route

from pyserve.http import admin, native, openai, pool, text_endpoints, web
from pyserve.http.errors import Handler, guarded

NOT_BUILT = (
    "/embeddings",
    "/embedding",
    "/v1/embeddings",
    "/rerank",
    "/reranking",
    "/v1/rerank",
    "/v1/reranking",
    "/infill",
)


def make_routes() -> list[Route]:
    """All routes. The order matters only for paths with parameters."""
    return [
        *_post("/v1/chat/completions", "/chat/completions", handler=openai.chat_completions),
        *_post(
            "/v1/chat/completions/input_tokens", "/chat/completions/input_tokens", handler=text_endpoints.input_tokens
        ),
        *_post("/v1/completions", handler=openai.completions),
        *_post("/completion", "/completions", handler=native.completion),
        *_post("/tokenize", handler=text_endpoints.tokenize),
        *_post("/detokenize", handler=text_endpoints.detokenize),
        *_post("/apply-template", handler=text_endpoints.apply_template),
        *(route for path, file in web.FILES.items() for route in _get(path, handler=web.asset(*file))),
        *_get("/health", "/v1/health", handler=admin.health),
        *_get("/metrics", handler=admin.show_metrics),
        *_get("/slots", handler=admin.slots),
        *_get("/pool", handler=pool.pool),
        *_get("/props", handler=admin.props),
        *_post("/props", handler=admin.props),
        *_get("/v1/models", "/models", handler=admin.models),
        *_get("/v1/models/{id:path}", "/models/{id:path}", handler=admin.model),
        *_post("/slots/{id}", *NOT_BUILT, handler=admin.not_supported),
    ]


def _get(*paths: str, handler: Handler) -> list[Route]:
    return [Route(path, guarded(handler), methods=["GET"]) for path in paths]


def _post(*paths: str, handler: Handler) -> list[Route]:
    return [Route(path, guarded(handler), methods=["POST"]) for path in paths]
