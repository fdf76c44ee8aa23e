"""Start and stop the real server as a child process, with the demo model unless a flag names another."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent.parent
START_TIMEOUT_S = 180.0  # a first start builds the extension
STOP_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Server:
    """A running server. `log` holds all that it printed."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def metric(self, name: str) -> float:
        """One figure of /metrics by its name without the prefix."""
        text = httpx.get(f"{self.url}/metrics").raise_for_status().text
        for line in text.splitlines():
            label, _, value = line.rpartition(" ")
            if not line.startswith("#") and label.split(":")[-1] == name:
                return float(value)
        raise AssertionError(f"/metrics has no figure {name}")

    def slots(self) -> list[dict[str, object]]:
        slots: list[dict[str, object]] = httpx.get(f"{self.url}/slots").raise_for_status().json()
        return slots

    def wait_until_idle(self, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while any(slot["is_processing"] for slot in self.slots()) or self.metric("requests_deferred"):
            assert time.monotonic() < deadline, f"still busy: {self.slots()}"
            time.sleep(0.05)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """Ask it to end and wait; the exit code."""
        if self.process.poll() is None:
            self.terminate()
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not stop:\n{self.log_tail()}") from None

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without the settings that its user may have made."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYSERVE_") or name == "PYSERVE_BUILD_DIR"
    }
    return kept | variables


@contextmanager
def running(*flags: str) -> Iterator[Server]:
    """`python -m pyserve` with flags, ready to answer; stopped at the end, which must be clean."""
    port = free_port()
    command = [sys.executable, "-m", "pyserve", "--port", str(port), *flags]
    with launched(command, port, clean_environment()) as server:
        yield server


@contextmanager
def launched(command: Sequence[str], port: int, environment: Mapping[str, str]) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="pyserve-e2e-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        server = Server(f"http://127.0.0.1:{port}", process, log)
        try:
            _wait_until_ready(server)
            yield server
        except BaseException:
            print(server.log_tail())  # shown by pytest beside the failure
            raise
        finally:
            code = server.stop()
        assert code == 0, f"exit code {code}:\n{server.log_tail()}"
        printed = log.read_text(errors="replace")
        assert "Traceback" not in printed and " ERROR " not in printed, server.log_tail()


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.process.poll() is None, f"ended with code {server.process.returncode}:\n{server.log_tail()}"
        try:
            if httpx.get(f"{server.url}/health", timeout=5.0).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"not ready after {START_TIMEOUT_S:.0f} s:\n{server.log_tail()}")


def run_to_end(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run the command line until it exits by itself."""
    return subprocess.run(
        [sys.executable, "-m", "pyserve", *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=clean_environment(),
        timeout=START_TIMEOUT_S,
        check=False,
    )
