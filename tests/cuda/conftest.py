"""The emulated device, one for each test, of one build."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda.device import Device


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.close()
