"""A long run under pressure: `python -m tools.soak --minutes 30 --clients 64`.

Starts the real server with the demo model, every page of parked state hashed, a pool of a third of what its slots
could hold, and so little memory and disk for parked state that it lies in both and the rest is computed again. Clients
then ask, at random, for answers from a fixed list of requests: greedy and seeded, streamed and not, one answer or two,
with log-probabilities and without, prompts of 10 to 400 tokens of which some begin alike. A third of them hangs up at a
random moment.

What must hold, or the exit status is 1: every finished text is the one that the same request had on the idle server,
every cut one is its beginning; no error; parks and restores are announced in pairs; nothing is ever stuck; at the end
all pages are free or cached, nothing is parked and no memory for it is held; resident memory is flat after the
first third of the run; memory, disk and recomputation were all used.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.server import Server, running
from tools.streams import Answer, complete, figures

SAMPLE_S = 5.0
REPORT_S = 30.0
LONGEST_ANSWER_S = 900.0
PAGE_BYTES_PER_TOKEN = 23_040  # of the demo model: 30 layers, K and V, 3 heads of 64 numbers of 2 bytes
NUM_SHOWN = 20
ZERO_AT_END = (
    "requests_preempted", "requests_processing", "requests_deferred", "preempt_ram_bytes", "preempt_disk_bytes",
    "pool_pages_held", "pool_pages_in_transfer", "sequences_failed_total", "copy_failed_total", "hash_mismatch_total",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    """One request of the list. `solo` is filled once, on the idle server."""

    body: dict[str, Any]
    num_choices: int
    solo: list[str] = field(default_factory=list)

    @property
    def sequence_len(self) -> int:
        """Tokens of one of its sequences at the end."""
        return len(self.body["prompt"]) + int(self.body["max_tokens"])


def questions(count: int, seed: int) -> list[Question]:
    """`count` requests; every fourth begins with the prompt of the one before, so that the prompt cache has work."""
    dice = random.Random(seed)
    made: list[Question] = []
    for number in range(count):
        prompt = [dice.randrange(1000, 40000) for _ in range(dice.randint(10, 400))]
        if number % 4 == 3:
            before = made[-1].body["prompt"]
            prompt = (before + prompt)[: max(len(before) * 3 // 4, len(prompt))]
        is_greedy = number % 2 == 0
        body = {
            "prompt": prompt,
            "max_tokens": dice.randint(5, 300),
            "temperature": 0.0 if is_greedy else 0.9,
            "seed": 1000 + number,
            "n": 2 if number % 5 == 1 else 1,
            "ignore_eos": True,
            "logprobs": 1 if number % 7 == 3 else None,
        }
        made.append(Question(body, int(body["n"])))  # type: ignore[call-overload]
    return made


@dataclass(slots=True)
class Soak:
    """The clients of one run and what they saw."""

    server: Server
    questions: list[Question]
    seed: int
    until_s: float = 0.0
    usual_s: float = 0.0  # how long answers take, roughly
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    peaks: Counter[str] = field(default_factory=Counter)
    num_solo_tokens: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, resident MiB

    async def record_solo(self) -> None:
        """Every request once, one after the other."""
        started_s = time.monotonic()
        for number, question in enumerate(self.questions):
            answer = Answer(question.num_choices)
            await complete(self.server.url, question.body, answer)
            if answer.error or not answer.is_done or answer.timings["n_preempt"]:
                raise RuntimeError(f"request {number} failed on the idle server: {answer}")
            question.solo.extend(answer.texts)
        self.usual_s = (time.monotonic() - started_s) / len(self.questions)

    async def client(self, number: int) -> None:
        """Ask until the time is over."""
        dice = random.Random(self.seed * 1000 + number)
        while time.monotonic() < self.until_s:
            which = dice.randrange(len(self.questions))
            await self.ask(which, dice.random() < 0.5, dice.uniform(0, 1.2) if dice.random() < 1 / 3 else None)

    async def ask(self, which: int, is_stream: bool, patience: float | None) -> None:
        """One request. `patience`: hang up after this share of the time that answers usually take."""
        question = self.questions[which]
        answer = Answer(question.num_choices)
        limit_s = LONGEST_ANSWER_S if patience is None else patience * self.usual_s
        started_s = time.monotonic()
        is_cut = False
        try:
            async with asyncio.timeout(limit_s):
                await complete(self.server.url, question.body | {"stream": is_stream}, answer)
        except TimeoutError:
            is_cut = True
            if patience is None:
                self.violations.append(f"request {which} (stream {is_stream}) has no end after {limit_s:.0f} s")
        except (OSError, EOFError, ValueError) as error:
            self.violations.append(f"request {which} (stream {is_stream}): {error!r}")
            return
        if not is_cut:
            self.usual_s += 0.05 * (time.monotonic() - started_s - self.usual_s)
        self.counts["hung up" if is_cut else "finished"] += 1
        self.counts["streamed"] += is_stream
        self.violations += [f"request {which} (stream {is_stream}): {why}" for why in faults(question, answer, is_cut)]
        self.counts["answers that were parked"] += any(answer.notices) or bool(answer.timings.get("n_preempt"))

    async def watch(self, server: psutil.Process, started_s: float) -> None:
        """Sample memory and figures, and print how it goes."""
        report_at_s = started_s
        while True:
            now = await asyncio.to_thread(figures, self.server.url)
            at_s = time.monotonic() - started_s
            self.memory.append((at_s, server.memory_info().rss / 2**20))
            for name in ("preempt_ram_bytes", "preempt_disk_bytes", "requests_preempted"):
                self.peaks[name] = max(self.peaks[name], int(now[name]))
            if now["is_stuck"]:
                self.violations.append(f"at {at_s:.0f} s the watchdog says that nothing moves")
            if time.monotonic() >= report_at_s:
                report_at_s = time.monotonic() + REPORT_S
                print(progress(self, now, at_s), flush=True)
            await asyncio.sleep(SAMPLE_S)


def faults(question: Question, answer: Answer, is_cut: bool) -> list[str]:
    """What is wrong with one answer."""
    if answer.error or (answer.status != 200 and not is_cut):
        return [f"status {answer.status}, {answer.error or 'no message'}"]
    wrong: list[str] = []
    for index, (text, solo, notices) in enumerate(zip(answer.texts, question.solo, answer.notices, strict=True)):
        if not (solo.startswith(text) if is_cut else text == solo):
            wrong.append(f"choice {index} differs from its solo text: {_difference(text, solo)}")
        if notices[::2] != ["preempted"] * len(notices[::2]) or notices[1::2] != ["resumed"] * len(notices[1::2]):
            wrong.append(f"notices of choice {index} out of order: {notices}")
        if not is_cut and len(notices) % 2:
            wrong.append(f"choice {index} ended while parked: {notices}")
    num_parks = sum(notices.count("preempted") for notices in answer.notices)
    if not is_cut and num_parks and num_parks != answer.timings["n_preempt"]:
        wrong.append(f"{num_parks} parks were announced, timings say {answer.timings['n_preempt']}")
    if not is_cut and (set(answer.finish_reasons) != {"length"} or not answer.is_done):
        wrong.append(f"ended with {answer.finish_reasons}, whole: {answer.is_done}")
    return wrong


def _difference(text: str, solo: str) -> str:
    same = next((at for at, (a, b) in enumerate(zip(text, solo, strict=False)) if a != b), min(len(text), len(solo)))
    return f"from character {same} of {len(solo)} on: {text[same : same + 40]!r} for {solo[same : same + 40]!r}"


def progress(soak: Soak, now: dict[str, float], at_s: float) -> str:
    return (
        f"{at_s:6.0f} s  {soak.counts['finished']} finished, {soak.counts['hung up']} hung up, "
        f"{now['n_preempt_total']:.0f} parks, {now['recompute_total']:.0f} computed again, "
        f"{now['requests_preempted']:.0f} parked now, {now['requests_deferred']:.0f} waiting, "
        f"RAM {now['preempt_ram_bytes'] / 2**20:.0f} MiB, disk {now['preempt_disk_bytes'] / 2**20:.0f} MiB, "
        f"resident {soak.memory[-1][1]:.0f} MiB, {len(soak.violations)} violations"
    )


def slope_per_minute(memory: list[tuple[float, float]]) -> float:
    """MiB a minute after the first third, by least squares; 0 where there is too little to say."""
    later = [point for point in memory if point[0] >= memory[-1][0] / 3]
    if len(later) < 3:
        return 0.0
    return statistics.linear_regression([at for at, _ in later], [mib for _, mib in later]).slope * 60


def state_faults(now: dict[str, float]) -> list[str]:
    """What is wrong with the idle server after the run, from its figures."""
    wrong = []
    if now["pool_pages_free"] + now["pool_pages_cached"] != now["pool_pages"]:
        free, cached = now["pool_pages_free"], now["pool_pages_cached"]
        wrong.append(f"of {now['pool_pages']:.0f} pages {free:.0f} are free and {cached:.0f} cached")
    return wrong + [f"{name} is {now[name]:.0f}" for name in ZERO_AT_END if now[name]]


def run_faults(soak: Soak, now: dict[str, float], max_growth_mib: float) -> list[str]:
    """What the run as a whole lacks: tiers that were not used, memory that grew."""
    used = {name: soak.peaks[name] for name in ("preempt_ram_bytes", "preempt_disk_bytes")}
    used |= {name: int(now[name]) for name in ("n_preempt_total", "recompute_total")}
    wrong = [f"{name} was always 0: the run proves too little" for name, value in used.items() if not value]
    growth = slope_per_minute(soak.memory) * soak.memory[-1][0] / 60
    if growth > max_growth_mib:
        wrong.append(f"resident memory grew by {growth:.0f} MiB over the run, by its slope after the first third")
    return wrong


async def run(soak: Soak, chosen: argparse.Namespace) -> dict[str, float]:
    """The whole run; gives the figures of the idle server after it."""
    started_s = time.monotonic()
    await soak.record_solo()
    print(f"{len(soak.questions)} solo answers in {time.monotonic() - started_s:.0f} s", flush=True)
    started_s = time.monotonic()
    soak.until_s = started_s + chosen.minutes * 60
    server = psutil.Process(soak.server.process.pid)
    soak.num_solo_tokens = int(figures(soak.server.url)["tokens_predicted_total"])
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(soak.watch(server, started_s))
        await asyncio.wait([group.create_task(soak.client(number)) for number in range(chosen.clients)])
        watching.cancel()
    return await _idle_figures(soak.server.url)


async def _idle_figures(url: str) -> dict[str, float]:
    """Wait a little for the last who hung up to be gone and for memory to be given back."""
    for _ in range(100):
        now = await asyncio.to_thread(figures, url)
        if not any(now[name] for name in ("requests_processing", "requests_deferred", "preempt_ram_bytes")):
            break
        await asyncio.sleep(0.2)
    return now


def figures_of(soak: Soak, now: dict[str, float]) -> dict[str, float]:
    rows = dict(soak.counts) | {
        "parks": now["n_preempt_total"],
        "restores": now["n_resume_total"],
        "computed again": now["recompute_total"],
        "cancelled": now["sequences_cancelled_total"],
        "MB parked": now["parked_bytes_total"] / 1e6,
        "MB moved to disk": now["moved_bytes_total"] / 1e6,
        "MB restored": now["restored_bytes_total"] / 1e6,
        "most parked at once": soak.peaks["requests_preempted"],
        "most RAM, MiB": soak.peaks["preempt_ram_bytes"] / 2**20,
        "most disk, MiB": soak.peaks["preempt_disk_bytes"] / 2**20,
        "tokens a second": (now["tokens_predicted_total"] - soak.num_solo_tokens) / soak.memory[-1][0],
        "resident after the first third, MiB": statistics.median(
            mib for at, mib in soak.memory if at >= soak.memory[-1][0] / 3
        ),
        "its slope, MiB a minute": slope_per_minute(soak.memory),
        "violations": len(soak.violations),
    }
    return {name: float(value) for name, value in rows.items()}


def flags(chosen: argparse.Namespace, listed: list[Question], disk: Path) -> list[str]:
    """A pool of a third of what the sequences in all slots have on average at the end of their answers."""
    demand = statistics.mean(each.sequence_len for each in listed) * chosen.parallel
    pool = max(demand / 3, 1.2 * max(each.num_choices * each.sequence_len for each in listed))
    ram_mib = max(1, round(pool * PAGE_BYTES_PER_TOKEN / 2**20 * chosen.ram_share))
    own = ["--ctx-size", str(int(pool) // 16 * 16), "--parallel", str(chosen.parallel), "--preempt-ram", str(ram_mib),
           "--preempt-disk", str(disk), "--preempt-disk-limit", str(ram_mib), "--verify-parks", "all"]  # fmt: skip
    return [*own, *chosen.flag]


def soak_server(chosen: argparse.Namespace) -> tuple[Soak, dict[str, float]]:
    """The whole of it: a server, the run, and what is wrong with the server's state after it."""
    listed = questions(chosen.requests, chosen.seed)
    with tempfile.TemporaryDirectory(prefix="pyserve-soak-") as folder:
        disk = chosen.preempt_disk or Path(folder)
        files_before = set(disk.iterdir()) if disk.exists() else set()
        own = flags(chosen, listed, disk)
        print("server flags:", " ".join(own), flush=True)
        with running(*own) as server:
            soak = Soak(server, listed, chosen.seed)
            try:
                now = asyncio.run(run(soak, chosen))
            finally:
                if chosen.log is not None:
                    shutil.copy(server.log, chosen.log)
        soak.violations += state_faults(now)
        soak.violations += [f"left on disk: {path}" for path in set(disk.iterdir()) - files_before]
    return soak, now


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--parallel", type=int, default=32, help="slots of the server")
    parser.add_argument("--requests", type=int, default=60, help="length of the list that clients choose from")
    parser.add_argument(
        "--ram-share", type=float, default=0.1, help="RAM and disk for parked state, as shares of the pool"
    )
    parser.add_argument("--preempt-disk", type=Path, default=None, help="default: a folder that is removed again")
    parser.add_argument("--flag", action="append", default=[], help="a further server flag: --flag=--no-preempt-async")
    parser.add_argument("--max-growth", type=float, default=24, help="MiB that resident memory may grow over the run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None, help="write figures, violations and memory samples here")
    parser.add_argument("--log", type=Path, default=None, help="keep the server's log here")
    return parser


def main() -> None:
    chosen = arguments().parse_args()
    soak, now = soak_server(chosen)
    soak.violations += run_faults(soak, now, chosen.max_growth)
    rows = figures_of(soak, now)
    print("\n".join(f"{name:38} {value:12.1f}" for name, value in rows.items()))
    for violation in soak.violations[:NUM_SHOWN]:
        print(violation)
    if chosen.json is not None:
        report = {"figures": rows, "violations": soak.violations, "memory": soak.memory}
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    raise SystemExit(bool(soak.violations))


if __name__ == "__main__":
    main()
