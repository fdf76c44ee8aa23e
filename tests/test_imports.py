"""The import directions and the fences, read from the source by `ast`: nothing here imports pyserve."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pyserve"

# A module may import from its own layer and from lower ones. Folders count as one module.
LAYERS = (
    ("histogram", "errors", "log", "host_memory", "connection"),
    ("types", "disk_folder"),
    ("text", "settings", "metrics"),
    ("plan", "pool", "prefix", "sequence", "page_runs"),
    ("policy", "decoding", "calm"),
    ("view",),
    ("census", "planner", "integrity", "residents", "incoming"),
    ("ledger", "rates"),
    ("ops",),
    ("sampler",),
    (
        "models",
        "slot_sampling",
        "kv_store",
        "host_arena",
        "disk_tier",
        "parked",
        "copies",
        "tiers",
        "host_room",
        "park",
    ),
    ("runner",),
    ("generation", "steps", "copy_watch"),
    ("task",),
    ("snapshot", "transfers", "company"),
    ("beside",),
    ("engine",),
    ("handle",),
    ("serving",),
    ("http",),
    ("app",),
    ("__main__",),
)
FENCES = {
    "torch": {"ops", "models", "sampler", "kv_store", "host_arena", "disk_tier", "tiers", "runner", "slot_sampling"},
    "starlette": {"http", "app"},
    "hypercorn": {"__main__", "connection"},
    "asyncio": {
        "engine",
        "generation",
        "handle",
        "serving",
        "steps",
        "copy_watch",
        "park",
        "http",
        "app",
        "connection",
        "__main__",
    },
}
# What the pure core may import from outside: no torch, no clock, no input or output.
PURE = {
    "plan", "pool", "prefix", "sequence", "page_runs", "policy", "decoding", "calm", "view", "census", "residents",
    "incoming", "planner", "integrity", "ledger",
}  # fmt: skip
PURE_MAY_IMPORT = {
    "__future__", "abc", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq", "itertools",
    "math", "msgspec", "operator", "typing",
}  # fmt: skip
TEXT_MAY_IMPORT = {"errors", "types", "text"}
CYCLES_BY_CONTRACT = {("plan", "sequence")}  # the plan's rows name their sequences
RUNTIME_PACKAGES = {
    "torch", "numpy", "starlette", "hypercorn", "orjson", "prometheus_client", "gguf", "safetensors", "tokenizers",
    "jinja2", "msgspec", "ninja",
}  # fmt: skip


def module_of(path: Path) -> str:
    """`ops` for pyserve/ops/kv.py, `pool` for pyserve/pool.py, "" for the package's own `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def origin_of(node: ast.ImportFrom, path: Path) -> tuple[str, ...]:
    """The parts of the absolute name that a `from` import names, relative ones resolved."""
    parts = tuple(node.module.split(".")) if node.module else ()
    if node.level:
        parts = path.relative_to(ROOT).parts[: -node.level] + parts
    return parts


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, full dotted names, at the top or within functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(".".join((*origin_of(node, path), alias.name)) for alias in node.names)
    return names


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def internal(path: Path) -> set[str]:
    """Modules of pyserve that a file imports, its own left out."""
    found = {name.split(".")[1] for name in imports_of(path) if name.startswith("pyserve.")}
    return {name for name in found if name in ALL_MODULES} - {module_of(path)}


def external(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports_of(path)} - {"pyserve"}


ALL_MODULES = {module_of(path) for path in sources()}
LAYER_OF = {name: number for number, layer in enumerate(LAYERS) for name in layer}


def test_every_module_has_a_layer() -> None:
    assert sorted(ALL_MODULES - {""} - set(LAYER_OF)) == []


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    module = module_of(path)
    for other in internal(path):
        if (module, other) not in CYCLES_BY_CONTRACT:
            assert LAYER_OF[other] <= LAYER_OF[module], f"{module} may not import {other}"


@pytest.mark.parametrize("package", sorted(FENCES))
def test_a_fenced_package_is_imported_only_where_it_may_be(package: str) -> None:
    importers = {module_of(path) for path in sources() if package in external(path)}
    assert importers <= FENCES[package]


def test_the_core_is_pure() -> None:
    for path in sources():
        if module_of(path) in PURE:
            allowed = PURE_MAY_IMPORT | ({"numpy"} if module_of(path) == "page_runs" else set())
            assert external(path) <= allowed, path


def test_text_knows_errors_and_types_alone() -> None:
    for path in sources():
        if module_of(path) == "text":
            assert internal(path) <= TEXT_MAY_IMPORT, path


def test_no_two_modules_of_a_layer_import_each_other() -> None:
    edges = {(module_of(path), other) for path in sources() for other in internal(path)} - CYCLES_BY_CONTRACT
    assert sorted((a, b) for a, b in edges if (b, a) in edges and a < b) == []


def test_only_declared_packages_are_imported() -> None:
    allowed = RUNTIME_PACKAGES | set(sys.stdlib_module_names)
    for path in sources():
        assert external(path) <= allowed, path
