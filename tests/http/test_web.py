"""The page at `/` and what it draws: files and their headers, keys, loading, and GET /pool."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pyserve.app import create_app
from pyserve.http import web
from pyserve.http.pool import pool_object
from pyserve.settings import Settings
from pyserve.types import Counters, SlotSnapshot, Snapshot
from tests.http.asking import ask, loaded_app
from tests.http.fake_engine import FakeServed, starter

KEYS = Settings(api_keys=("first",))
FOLDER = Path(web.__file__).parent.parent / "web"
PAGE_PATHS = tuple(web.FILES)
SCRIPTS = "".join(path.read_text() for path in sorted(FOLDER.glob("*.js")))


class SnapshotOnly:
    """An engine whose every other attribute is out of bounds."""

    def __init__(self, snapshot: Snapshot, counters: Counters) -> None:
        self.snapshot = snapshot
        self.counters = counters


def full_snapshot() -> Snapshot:
    slots = (
        SlotSnapshot(0, "generating", is_processing=True, request_id="chat-a", cells=50, pages=(0, 1, 2, 9)),
        SlotSnapshot(
            1, "preempted", is_processing=True, is_preempted=True, request_id="chat-b", n_preempt=2, tier="ram",
            parked_bytes=4096, parked_ms=1234.56,
        ),
        SlotSnapshot(2, "prompt", is_processing=True, request_id="chat-c", cells=17, pages=(0, 7, 6)),
        SlotSnapshot(3),
    )  # fmt: skip
    cached = bytes(page in (0, 1, 3, 4, 8) for page in range(12))
    return Snapshot(
        slots=slots, num_waiting=3, page_size=16, num_pages=12, free_pages=3, cached_pages=3, held_pages=6,
        transfer_pages=0, cache_map=cached, parked_slots=(1,),
    )  # fmt: skip


def pool(snapshot: Snapshot) -> Any:
    counters = Counters(generated_tokens=7, prompt_tokens=11, preempts=2, resumes=1)
    served = FakeServed(SnapshotOnly(snapshot, counters))  # type: ignore[arg-type]
    response = ask("GET", "/pool", app=loaded_app(served))
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    return response.json()


@pytest.mark.parametrize("path", PAGE_PATHS)
def test_the_page_is_open_to_all_under_a_strict_policy(path: str) -> None:
    name, content_type = web.FILES[path]
    response = ask("GET", path, settings=KEYS)
    assert response.status_code == 200 and response.content == (FOLDER / name).read_bytes()
    assert response.headers["content-type"] == content_type
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';") and "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"


def test_the_page_is_asked_for_anew_and_not_sent_twice() -> None:
    first = ask("GET", "/")
    assert first.headers["cache-control"] == "no-cache"
    again = ask("GET", "/", headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304 and again.content == b"" and again.headers["etag"] == first.headers["etag"]
    assert ask("GET", "/", headers={"If-None-Match": '"other"'}).status_code == 200
    assert ask("GET", "/web/app.js").headers["etag"] != first.headers["etag"]


@pytest.mark.parametrize("path", ["/web/", "/web/index.html", "/web/../types.py", "/web/%2e%2e/types.py", "/web/x.js"])
def test_no_other_file_is_served(path: str) -> None:
    assert ask("GET", path).status_code == 404
    assert ask("GET", path, settings=KEYS).status_code == 401


def test_the_page_loads_while_the_model_does() -> None:
    app = create_app(Settings(), starter(FakeServed()))
    for path in PAGE_PATHS:
        assert ask("GET", path, app=app).status_code == 200
    assert ask("GET", "/pool", app=app).status_code == 503
    assert "progress" in ask("GET", "/health", app=app).json()


def test_every_file_of_the_folder_is_served_and_is_all_that_the_page_loads() -> None:
    assert {name for name, _ in web.FILES.values()} == {path.name for path in FOLDER.iterdir()}
    page = (FOLDER / "index.html").read_text()
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert loaded and all(f"/{path}" in web.FILES for path in loaded)
    imported = set(re.findall(r'from "\./(\w+\.js)"', SCRIPTS))
    assert imported == {"api.js", "chat.js", "pool.js"}
    everything = page + SCRIPTS + (FOLDER / "style.css").read_text()
    assert "//" not in re.sub(r"^\s*//.*$|; // .*$", "", everything, flags=re.MULTILINE), "something from elsewhere"


def test_the_policy_lets_the_page_run_and_a_model_writes_no_html() -> None:
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page), "inline code, which is blocked"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", SCRIPTS)


def test_the_scripts_find_what_they_look_for() -> None:
    page = (FOLDER / "index.html").read_text()
    wanted = set(re.findall(r'(?:byId|getElementById)\("([\w-]+)"\)', SCRIPTS))
    assert len(wanted) > 15 and wanted <= set(re.findall(r'\bid="([\w-]+)"', page))
    for path in re.findall(r'(?:getJson|call)\("([^"]+)"', SCRIPTS):
        method = "POST" if path.endswith("completions") else "GET"
        assert ask(method, f"/{path}", {}).status_code != 404, path


def test_pool_says_who_holds_which_page() -> None:
    shown = pool(full_snapshot())
    first, second, third, last = shown["slots"]
    assert first["pages"] == [[0, 3], [9, 1]] and first["request"] == "chat-a" and first["cells"] == 50
    assert third["pages"] == [[0, 1], [6, 2]], "a downward run is told by its lowest page as well"
    assert last["state"] == "idle" and last["pages"] == [] and last["request"] is None
    assert shown["cached_runs"] == [[3, 2], [8, 1]], "a page that a slot holds is not the cache's alone"
    assert (shown["num_pages"], shown["page_size"]) == (12, 16)
    assert (shown["free"], shown["cached"], shown["held"], shown["transfer"]) == (3, 3, 6, 0)
    assert shown["parked"] == [1] and shown["waiting"] == 3
    assert second["is_preempted"] and second["tier"] == "ram" and second["parked_ms"] == 1234.6
    assert second["n_preempt"] == 2 and second["parked_bytes"] == 4096
    assert shown["counters"] == {"generated_tokens": 7, "prompt_tokens": 11, "preempts": 2, "resumes": 1}


def test_pool_of_a_large_server_is_small() -> None:
    num_pages = 1 << 20
    slots = tuple(SlotSnapshot(i, "generating", pages=tuple(range(i * 1000, i * 1000 + 1000))) for i in range(16))
    cache_map = bytes(1000) + b"\1" * (num_pages - 1000)
    shown = pool_object(Snapshot(slots=slots, num_pages=num_pages, page_size=16, cache_map=cache_map), Counters())
    assert shown["cached_runs"] == [[16000, num_pages - 16000]] and shown["slots"][15]["pages"] == [[15000, 1000]]
    assert len(json.dumps(shown)) < 8192


def test_pool_wants_the_key() -> None:
    assert ask("GET", "/pool", settings=KEYS).status_code == 401
    assert ask("GET", "/pool", settings=KEYS, headers={"Authorization": "Bearer first"}).status_code == 200
