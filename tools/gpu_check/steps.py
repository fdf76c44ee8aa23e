"""Part that times decode steps of a small model as the engine runs them: launched one by one, as CUDA graphs, and as
graphs with the next step started behind the one that runs. So small a model shows what a step costs besides its
kernels.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tools.gpu_check.machine import Machine
from tools.gpu_check.outside import torch_version
from tools.gpu_check.results import NotHere, Result, check


def decode_steps(machine: Machine) -> Result:
    """Milliseconds a step, 16 rows; the tokens must be the same in all three."""
    version = torch_version()
    if "with a GPU" not in version and not (machine.is_dry and version != "not installed"):
        raise NotHere(f"torch: {version}")
    if not machine.is_dry:
        os.environ["TORCH_CUDA_ARCH_LIST"] = machine.capability  # what is built is for this GPU alone
    num_rows, num_steps, num_layers = (4, 6, 2) if machine.is_dry else (16, 400, 16)
    model = SmallModel("cuda-emulated" if machine.is_dry else "cuda", num_rows, num_layers)
    ways = {"plain": model.one_by_one, "graphs": model.one_by_one, "ahead": model.ahead}
    tokens, ms = {}, {}
    for name, run in ways.items():
        model.program.use_graphs(name != "plain")
        model.warm_up()
        tokens[name], times = run(num_steps)
        ms[name] = statistics.median(times) * 1e3
    check(tokens["plain"] == tokens["graphs"] == tokens["ahead"], "the three ways pick different tokens")
    num_graphs, num_failed, error = model.program.graph_counts()
    check(num_graphs > 0 and num_failed == 0, f"{num_failed} graphs failed: {error}")
    said = ", ".join(f"{name} {value:.3f} ms" for name, value in ms.items())
    return Result(f"{num_rows} rows, {num_layers} layers: {said} a step", data={"ms": ms, "rows": num_rows})


class SmallModel:
    """A random model with its pool, and one token of each sequence computed."""

    def __init__(self, device_name: str, num_rows: int, num_layers: int) -> None:
        import torch

        from pyserve import ops
        from pyserve.models.load import load
        from tools.make_tiny_model import make_gguf

        device = ops.open_device(device_name)
        sizes = {"layers": num_layers, "hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 64, "intermediate": 64}
        limits = {"max_tokens": num_rows, "max_samples": num_rows, "max_positions": 1024, "num_threads": 1}
        with tempfile.TemporaryDirectory() as folder:
            path = make_gguf(Path(folder) / "small.gguf", type="Q8_0", **sizes)
            self.program = load(path, device=device, **limits).program
        self.num_rows = num_rows
        self._int32 = lambda values: torch.tensor(values, dtype=torch.int32)
        self._table = torch.arange(num_rows * 64, dtype=torch.int32).reshape(num_rows, 64)
        self._pool = device.allocate_pool(num_rows * 64, num_layers, 1, 16, 64, torch.float16)
        self._picking = torch.zeros(num_rows, 3), torch.zeros(num_rows, 3, dtype=torch.int64), torch.zeros(0, 2).long()
        self._sources = torch.arange(num_rows, dtype=torch.int32)

    def _start(self, step: int, tokens: list[int] | None) -> None:
        from pyserve.ops import StepBatch

        ids = self._int32(tokens or [0] * self.num_rows)
        batch = StepBatch(ids, self._int32([step] * self.num_rows), self._sources, self._table, self._sources)
        self.program.start(batch, self._pool, *self._picking, None if tokens else self._sources)

    def warm_up(self) -> None:
        """Until there is a graph, if there is to be one."""
        for _ in range(20):
            self._start(0, [1] * self.num_rows)
            self.program.collect()
            time.sleep(0.01)

    def one_by_one(self, num_steps: int) -> tuple[list[list[int]], list[float]]:
        def run(step: int, before: list[int]) -> list[int]:
            self._start(step, before)
            return list(self.program.collect().tolist())

        return timed(num_steps, [1] * self.num_rows, run)

    def ahead(self, num_steps: int) -> tuple[list[list[int]], list[float]]:
        self._start(0, [1] * self.num_rows)

        def run(step: int, before: list[int]) -> list[int]:
            if step + 1 < num_steps:
                self._start(step + 1, None)
            return list(self.program.collect().tolist())

        return timed(num_steps, [1] * self.num_rows, run)


def timed(
    num_steps: int, tokens: list[int], run: Callable[[int, list[int]], list[int]]
) -> tuple[list[list[int]], list[float]]:
    picked, times = [], []
    for step in range(num_steps):
        started_s = time.perf_counter()
        tokens = run(step, tokens)
        times.append(time.perf_counter() - started_s)
        picked.append(tokens)
    return picked, times
