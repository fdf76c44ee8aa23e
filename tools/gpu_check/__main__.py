"""What can only be known on a GPU: builds the kernels, checks them on the device, times them, prints a short table and
writes JSON.

    python -m tools.gpu_check                    on a machine with a GPU; 8 minutes at most
    python -m tools.gpu_check --build-only       with nvcc and no GPU: builds the library, to take along
    python -m tools.gpu_check --dry-run          anywhere: the same parts, tiny, on the emulator

Each part runs in a process of its own, so that one that fails, crashes the device or hangs takes nothing else with it.
Needs numpy; torch and pytest only for the parts that say so. The exit code is 0 when no part failed: a goal that was
missed and a part that this machine cannot run are reported, not failures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # python tools/gpu_check
    sys.path.insert(0, str(ROOT))

from tools.gpu_check import attention, copy_speed, correct, outside, steps  # noqa: E402
from tools.gpu_check.machine import Machine, device_library  # noqa: E402
from tools.gpu_check.results import NotHere, Result  # noqa: E402

TOTAL_S = 480
PARTS: dict[str, tuple[Callable[[Machine], Result], float]] = {  # and how long each may take
    "machine": (outside.this_machine, 240),  # with the build
    "probes": (correct.probes, 60),
    "copies": (correct.copies, 90),
    "events": (correct.events, 60),
    "decode": (attention.decode, 60),
    "prefill": (attention.prefill, 60),
    "calibration": (copy_speed.calibration, 30),
    "park": (copy_speed.park, 60),
    "gaps": (copy_speed.gaps, 60),
    "copy speeds": (copy_speed.copy_speeds, 120),
    "decode steps": (steps.decode_steps, 240),  # with the build of the extension
    "kernel tests": (outside.kernel_tests, 210),
    "engine tests": (outside.engine_tests, 160),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Check pyserve's CUDA half on this machine.")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on the emulator")
    parser.add_argument("--build-only", metavar="ARCH", nargs="?", const="sm_90a", help="build for ARCH and stop")
    parser.add_argument("--json", type=Path, default=None, help="where the results go")
    parser.add_argument("--parts", default="", help="comma-separated; default all: " + ", ".join(PARTS))
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)  # a child's part
    options = parser.parse_args()
    if options.build_only:
        print(device_library(options.build_only))
        return 0
    if options.one:
        options.json.write_text(json.dumps(run_part(options.one, is_dry=options.dry_run)))
        return 0
    chosen = [name.strip() for name in options.parts.split(",") if name.strip()] or list(PARTS)
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        parser.error(f"--parts: no such part: {', '.join(unknown)}")
    return check_all(chosen, is_dry=options.dry_run, path=options.json or default_path(options.dry_run))


def default_path(is_dry: bool) -> Path:
    return ROOT / "build" / "gpu_check" / ("dry-run.json" if is_dry else time.strftime("%Y%m%d-%H%M%S.json"))


def check_all(names: list[str], *, is_dry: bool, path: Path) -> int:
    start, outcomes = time.monotonic(), []
    for name in names:
        left = TOTAL_S - (time.monotonic() - start)
        outcome = in_child(name, is_dry=is_dry, timeout_s=min(PARTS[name][1], left)) if left > 5 else late()
        outcomes.append({"part": name, **outcome})
        print(f"{name:13s} {outcome['status']:8s} {outcome['seconds']:6.1f} s  {outcome['summary']}", flush=True)
        if not is_dry:
            for goal in outcome["goals"]:
                print(f"{'':13s} {'met' if goal['is_met'] else 'MISSED':8s} {'':8s}  {describe(goal)}", flush=True)
        save(path, is_dry, outcomes)
    print(f"results: {path}")
    return 1 if any(outcome["status"] == "failed" for outcome in outcomes) else 0


def describe(goal: dict[str, Any]) -> str:
    sign = "at most" if goal["is_lower_better"] else "at least"
    return f"{goal['name']}: {goal['value']:.4g} {goal['unit']} ({sign} {goal['target']:g})"


def save(path: Path, is_dry: bool, outcomes: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"is_dry_run": is_dry, "parts": outcomes}, indent=1))


def late() -> dict[str, Any]:
    return {"status": "not here", "seconds": 0.0, "summary": f"the {TOTAL_S} s are over", "goals": [], "data": {}}


def in_child(name: str, *, is_dry: bool, timeout_s: float) -> dict[str, Any]:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "tools.gpu_check", "--one", name, "--json", str(answer)]
        try:
            done = subprocess.run(
                command + (["--dry-run"] if is_dry else []), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, timeout=timeout_s, errors="replace",
            )  # fmt: skip
            said = done.stdout.strip()[-500:] or f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            said = f"took longer than {timeout_s:.0f} s"
        outcome = json.loads(answer.read_text()) if answer.exists() else failed(said)
    return {**outcome, "seconds": time.monotonic() - start}


def failed(why: str) -> dict[str, Any]:
    return {"status": "failed", "summary": " ".join(why.split())[:300], "goals": [], "data": {}}


def run_part(name: str, *, is_dry: bool) -> dict[str, Any]:
    """In the child. Whatever a part raises is its own outcome."""
    try:
        result = PARTS[name][0](Machine(is_dry=is_dry))
    except NotHere as missing:
        return {**failed(str(missing)), "status": "not here"}
    except Exception as error:
        return failed(f"{type(error).__name__}: {error}")
    goals = [{**asdict(goal), "is_met": goal.is_met()} for goal in result.goals]
    return {"status": "ok", "summary": result.summary, "goals": goals, "data": result.data}


if __name__ == "__main__":
    sys.exit(main())
