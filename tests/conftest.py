"""What every test needs: the extension, built once before the workers start, and torch on one thread, since the tests
share few cores.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

NEEDS_TORCH = ("ops", "engine", "models", "http", "e2e")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Builds before xdist starts its workers, so that one process does and shows its progress. tests/pure alone needs
    no build.
    """
    is_worker = hasattr(session.config, "workerinput")
    if is_worker or not any(_may_need_torch(argument) for argument in session.config.args):
        return
    import pyserve.ops  # noqa: F401


def _may_need_torch(argument: str) -> bool:
    path = Path(argument.split("::")[0]).resolve()
    below = path.parts[len(Path(__file__).resolve().parent.parts) :]
    return not below or below[0] in NEEDS_TORCH


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        import torch
    except ImportError:  # tests/pure runs without
        return
    torch.set_num_threads(1)
