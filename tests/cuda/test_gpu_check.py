"""tools/gpu_check as far as it goes without a GPU: the dry run does every part on the emulator, and without a device
each part says so and the rest goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.build import ROOT, build_emulated
from tools.gpu_check.machine import sources
from tools.gpu_check.results import Goal

QUICK = ["machine", "probes", "copies", "events", "decode", "prefill", "calibration", "park", "gaps", "copy speeds"]


def gpu_check(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"PATH": path} if path is not None else {})}
    command = [sys.executable, "-m", "tools.gpu_check", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


def test_dry_run(tmp_path: Path) -> None:
    done = gpu_check("--dry-run", "--parts", ",".join(QUICK), "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["is_dry_run"] is True
    assert [(part["part"], part["status"]) for part in results["parts"]] == [(name, "ok") for name in QUICK]
    rows = results["parts"][QUICK.index("copy speeds")]["data"]["rows"]
    assert {row["way"] for row in rows} == {"calls", "batched", "kernel", "staged"}
    assert {row["to_host"] for row in rows} == {True, False}


def test_without_a_gpu_every_part_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    done = gpu_check("--json", str(tmp_path / "out.json"), path=str(empty))
    assert done.returncode == 1
    parts = json.loads((tmp_path / "out.json").read_text())["parts"]
    assert [part["part"] for part in parts] == [*QUICK, "decode steps", "kernel tests", "engine tests"]
    for part in parts:
        assert part["status"] == "failed"
        assert "no GPU here: nvidia-smi is not installed" in part["summary"]
    assert "Traceback" not in done.stdout + done.stderr


def test_a_part_that_does_not_exist_is_named() -> None:
    done = gpu_check("--parts", "probes,coffee")
    assert done.returncode == 2
    assert "coffee" in done.stderr


def test_tests_written_for_the_emulator_run_through_the_plugin_on_managed_arrays(tmp_path: Path) -> None:
    """With the emulated library in the place of nvcc's: what the GPU will do, but for the GPU."""
    test = tmp_path / "test_arrays.py"
    test.write_text(
        "import numpy as np\n"
        "from tests.cuda.build import Library, REVERSE, run_child\n"
        "from tools.gpu_check.managed_numpy import handler_name\n"
        "def test_runs():\n"
        "    library = Library('probe.cu')\n"
        "    library.configure()\n"
        "    matrices = np.arange(256, dtype=np.uint16)\n"
        "    assert handler_name() == 'pyserve_managed'\n"
        "    four, two = np.zeros((32, 4, 2), np.uint16), np.zeros((32, 2, 2), np.uint16)\n"
        "    library.call('probe_ldmatrix', 0, matrices, four, two, None)\n"
        "    assert (four[1, 2] == matrices[130:132]).all()\n"
        "    grown = np.arange(10)\n"
        "    grown.resize(5000, refcheck=False)\n"
        "    assert grown[:10].tolist() == list(range(10)) and not grown[10:].any()\n"
        "def test_schedules():\n"
        "    Library('probe.cu').configure(REVERSE)\n"
        "def test_sanitizers():\n"
        "    run_child('tsan', None)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.gpu_check.plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-c", str(tmp_path / "pytest.ini"), str(test)],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYSERVE_GPU_CHECK_LIBRARY": str(build_emulated(*sources())), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "2 passed, 1 skipped" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("value", "is_lower_better", "is_met"), [(40, True, True), (60, True, False), (60, False, True)]
)
def test_goals(value: float, is_lower_better: bool, is_met: bool) -> None:
    assert Goal("", value, "", 50, is_lower_better).is_met() is is_met
