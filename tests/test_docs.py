"""The README's tables say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from pyserve.http.routes import NOT_BUILT, make_routes
from pyserve.http.web import FILES
from pyserve.settings import settings_table

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
ENDPOINT_ROW = re.compile(r"^\| `(GET|POST) (/\S*)` \|", re.MULTILINE)
# The same answers under names that some clients use; the table has one name of each.
ALIASES = {"/chat/completions", "/chat/completions/input_tokens", "/completions", "/models", "/v1/health"}
ALIASES |= set(FILES) - {"/"}
REFUSED = {("POST", "/props")} | {("POST", path) for path in NOT_BUILT}


def test_the_readme_has_the_table_of_settings() -> None:
    assert settings_table() in README, f"the README's table of flags should be:\n{settings_table()}"


def test_the_readme_names_every_endpoint_and_no_other() -> None:
    served = {
        (method, route.path)
        for route in make_routes()
        for method in (route.methods or set()) - {"HEAD", "OPTIONS"}
        if route.path not in ALIASES and "{" not in route.path
    }
    assert set(ENDPOINT_ROW.findall(README)) == served - REFUSED
