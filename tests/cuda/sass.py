"""Machine code of a cubin, by kernel. Needs nvdisasm: of the toolkit, or of PyPI's nvidia-cuda-nvdisasm."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from tests.cuda.build import cuda_home


def disassembler() -> Path | None:
    folders = [Path(sysconfig.get_paths()["purelib"]) / "nvidia" / f"cu{major}" / "bin" for major in (13, 14)]
    folders.append(Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cuda_nvdisasm" / "bin")
    with contextlib.suppress(FileNotFoundError):
        folders.append(cuda_home() / "bin")
    found = shutil.which("nvdisasm")
    candidates = [folder / "nvdisasm" for folder in folders] + ([Path(found)] if found else [])
    return next((path for path in candidates if path.is_file()), None)


def instructions(cubin: Path) -> dict[str, list[str]]:
    """Mangled name of each kernel -> its instructions in order, as `LDG.E.128 R4, desc[UR6][R26.64]`."""
    tool = disassembler()
    if tool is None:
        raise FileNotFoundError("nvdisasm is not installed")
    text = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    result: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.(\w+)", line):
            current = result.setdefault(section[1], [])
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            current.append(found[1])
    return result


def count(code: list[str], *parts: str) -> int:
    """Instructions that contain every part."""
    return sum(all(part in line for part in parts) for line in code)
