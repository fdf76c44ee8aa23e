"""Building the extension: found again without a compiler, built once by many, and clear when it cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pyserve.ops import build, build_progress, flags

ROOT = Path(__file__).resolve().parents[2]


def python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_cached_build_is_found_fast_and_without_a_compiler() -> None:
    script = """
import time, torch
started = time.process_time()  # a busy machine is not a slow import
import pyserve.ops
print(time.process_time() - started, torch.ops.pyserve.isa())
"""
    build.built()
    result = python(script, PATH="/nonexistent")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    seconds, isa = result.stdout.split()
    assert float(seconds) < 1.0
    assert isa in ("generic", "avx2", "avx512", "avx512_bf16")


def test_no_compiler_is_said_in_one_line(tmp_path: Path) -> None:
    script = """
from pyserve.errors import PyserveError
try:
    import pyserve.ops
except PyserveError as error:
    print(error)
"""
    result = python(script, CXX="no-such-compiler", PYSERVE_BUILD_DIR=str(tmp_path))
    assert result.stdout.strip() == (
        "no C++ compiler: no-such-compiler is not on PATH; install it (Debian: apt-get install g++) or set CXX"
    )


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with (
        pytest.raises(
            build.BuildError, match=f"cannot write to the build folder {in_the_way}/torch.*PYSERVE_BUILD_DIR"
        ),
        build.locked(in_the_way / "torch"),
    ):
        pass


def test_the_fingerprint_follows_every_source_and_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", csrc)
    before = build.fingerprint(csrc)
    assert before == build.fingerprint(ROOT / "csrc")
    seen = {before}
    for changed in (
        csrc / "ops.h",
        csrc / "cpu" / "attention_tile.h",
        csrc / "cpu" / "team.cpp",
        csrc / "registration.cpp",
    ):
        changed.write_text(changed.read_text() + "\n")
        seen.add(build.fingerprint(csrc))
    (csrc / "cpu" / "new.cpp").write_text("")
    seen.add(build.fingerprint(csrc))
    monkeypatch.setattr(flags, "COMPILE_FLAGS", [*flags.COMPILE_FLAGS, "-g"])
    seen.add(build.fingerprint(csrc))
    assert len(seen) == 7


def test_many_at_once_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_builds = 0

    def compile_slowly(csrc: Path, folder: Path) -> None:
        nonlocal num_builds
        num_builds += 1
        time.sleep(0.2)
        (folder / f"pyserve_{build.fingerprint(csrc)}.so").write_text("built")

    monkeypatch.setenv("PYSERVE_BUILD_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_compile", compile_slowly)
    threads = [threading.Thread(target=build.built) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert num_builds == 1
    assert build.built().read_text() == "built"
    assert num_builds == 1


def test_old_builds_are_deleted(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.write_text("new")
    for i in range(6):
        old = tmp_path / f"pyserve_{i}.so"
        old.write_text("old")
        os.utime(old, (i, i))
    build._publish(made, tmp_path / "pyserve_new.so")
    assert sorted(path.name for path in tmp_path.glob("*.so")) == [
        "pyserve_3.so",
        "pyserve_4.so",
        "pyserve_5.so",
        "pyserve_new.so",
    ]


def test_an_unknown_instruction_set_is_refused() -> None:
    result = python("import torch, pyserve.ops\nprint(torch.ops.pyserve.isa())", PYSERVE_CPU_ISA="sse9")
    assert 'ValueError: PYSERVE_CPU_ISA must be generic, avx2, avx512 or avx512_bf16, not "sse9"' in result.stderr
    assert python("import torch, pyserve.ops\nprint(torch.ops.pyserve.isa())", PYSERVE_CPU_ISA="generic").stdout == (
        "generic\n"
    )


def test_wheel_and_sdist_carry_the_sources_and_the_page(tmp_path: Path) -> None:
    """From a copy, so that no list of an earlier build helps and two runs at once do not meet."""
    tree = tmp_path / "tree"
    rubbish = shutil.ignore_patterns("__pycache__", "*.so", ".*")
    for name in ("csrc", "pyserve", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=rubbish)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    files = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    steps = ["build_py", "--build-lib", str(tmp_path / "wheel"), "sdist", "--dist-dir", str(tmp_path)]
    command = [sys.executable, "setup.py", "-q", *steps]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=120)

    wheel = {str(path.relative_to(tmp_path / "wheel")) for path in (tmp_path / "wheel").rglob("*") if path.is_file()}
    packaged = {name for name in files if name.startswith(("csrc/", "pyserve/"))}
    assert {"csrc/registration.cpp", "csrc/cuda/binding.cpp", "pyserve/web/index.html"} <= packaged
    assert wheel == {f"pyserve/{name}" if name.startswith("csrc/") else name for name in packaged}

    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        carried = {member.name.split("/", 1)[1] for member in sdist.getmembers() if member.isfile()}
    wanted = {name for name in files if not name.startswith("tests/")}
    assert {name for name in carried if "egg-info" not in name} - {"PKG-INFO", "setup.cfg"} == wanted


def test_members_of_a_team_wait_for_each_other_and_carry_failures(tmp_path: Path) -> None:
    program = tmp_path / "team_check"
    sources = [ROOT / "tests/ops/team_check.cpp", ROOT / "csrc/cpu/team.cpp", ROOT / "csrc/cpu/isa.cpp"]
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, "-std=c++20", "-O1", "-pthread", f"-I{ROOT / 'csrc'}", *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True, timeout=120)
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, "good\n")


@pytest.mark.parametrize("isa", ["avx512", "avx2", "generic"])
def test_attention_on_lesser_machines(isa: str) -> None:
    """The other instruction sets' attention, in a process of its own since the choice is made once."""
    script = """
import torch, pyserve.ops
from tests.ops import test_attention as tests
if torch.ops.pyserve.isa() == WANTED:
    for dtype in tests.FLOATS:
        tests.test_close_to_float64(9, 3, 64, dtype)
        tests.test_close_to_float64(4, 4, 24, dtype)
    for dtype in (torch.float16, torch.bfloat16):
        tests.test_window_and_softcap(dtype, {"softcap": 30.0, "window": 33})
        tests.test_same_bits_for_any_chunking(9, 3, 64, {"window": 50}, dtype)
        tests.test_same_bits_for_any_page_size(dtype, {})
        tests.test_segments_are_close_to_float64(dtype, {"window": 300})
        tests.test_segments_have_the_same_bits_however_they_are_dealt(9, 3, 64, {}, dtype)
    tests.test_a_later_rows_bad_value_stays_its_own(torch.float32)
""".replace("WANTED", repr(isa))
    result = python(script, PYSERVE_CPU_ISA=isa)
    assert result.returncode == 0, result.stderr


def answers(library: Path) -> tuple[int, int]:
    """What a small library of two sources says, asked in a process of its own."""
    result = python(f"import ctypes; it = ctypes.CDLL({str(library)!r}); print(it.first(), it.second())")
    assert result.returncode == 0, result.stderr
    first, second = map(int, result.stdout.split())
    return first, second


@pytest.fixture
def small_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    csrc = tmp_path / "csrc"
    (csrc / "cpu").mkdir(parents=True)
    (csrc / "ops.h").write_text("#define VALUE 1\n")
    (csrc / "registration.cpp").write_text('#include "ops.h"\nextern "C" int first() { return VALUE; }\n')
    (csrc / "cpu" / "second.cpp").write_text('#include "../ops.h"\nextern "C" int second() { return VALUE; }\n')
    monkeypatch.setenv("PYSERVE_BUILD_DIR", str(tmp_path / "build"))
    monkeypatch.setattr(build, "source_folder", lambda: csrc)
    monkeypatch.setattr(flags, "COMPILE_FLAGS", ["-fvisibility=default"])
    return csrc


def test_every_change_is_built_by_the_process_that_built_before(small_tree: Path) -> None:
    assert answers(build.built()) == (1, 1)
    (small_tree / "ops.h").write_text("#define VALUE 2\n")
    assert answers(build.built()) == (2, 2)
    (small_tree / "cpu" / "second.cpp").write_text('extern "C" int second() { return 3; }\n')
    assert answers(build.built()) == (2, 3)
    published = build.built()
    published.unlink()
    assert answers(build.built()) == (2, 3)


def test_a_source_edited_during_a_build_is_built_again(small_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is published under a name is what the sources of that name say, not half of what came after."""
    from torch.utils import cpp_extension

    load = cpp_extension.load
    before = build.fingerprint(small_tree)

    def load_and_edit(**options: Any) -> None:
        (small_tree / "ops.h").write_text("#define VALUE 2\n")
        load(**options)
        (small_tree / "cpu" / "second.cpp").write_text('extern "C" int second() { return 3; }\n')

    monkeypatch.setattr(cpp_extension, "load", load_and_edit)
    path = build.built()
    assert path.stem == f"pyserve_{build.fingerprint(small_tree)}" and answers(path) == (2, 3)
    assert answers(path.with_name(f"pyserve_{before}.so")) == (1, 1)


def test_folders_may_have_spaces(small_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch, of the sources and of the builds: a clone in "My Documents" has them all."""
    from torch.utils import cpp_extension

    spaced = tmp_path / "f\u00fc \u00e9"
    spaced.mkdir()
    (spaced / "torch lib").symlink_to(cpp_extension.TORCH_LIB_PATH)
    small_tree = small_tree.rename(spaced / "c src")
    monkeypatch.setattr(build, "source_folder", lambda: small_tree)
    monkeypatch.setenv("PYSERVE_BUILD_DIR", str(spaced / "builds of ours"))
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(spaced / "torch lib"))
    assert answers(build.built()) == (1, 1)


def test_a_build_that_fails_says_why_in_one_line(
    small_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tree = small_tree.rename(tmp_path / "errors")  # its commands have the word in them as well
    monkeypatch.setattr(build, "source_folder", lambda: small_tree)
    (small_tree / "ops.h").write_text("#define VALUE nonsense\n")
    with pytest.raises(build.BuildError) as failure:
        build.built()
    said = failure.value.message
    assert "\n" not in said and "error: " in said and "nonsense" in said
    log = Path(said.rpartition(": ")[2].rstrip(")"))
    assert log.is_relative_to(tmp_path / "build") and log.read_text().count("nonsense") > 1


def test_a_long_build_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_progress, "INTERVAL_S", 0.01)
    (tmp_path / "old.o").touch()
    os.utime(tmp_path / "old.o", (1, 1))
    (tmp_path / "new.o").touch()
    said = ""
    with build_progress.told("extension", "2 C++ files", lambda: build_progress.num_objects(tmp_path, 2.0)):
        deadline = time.monotonic() + 10
        while "compiled after" not in said and time.monotonic() < deadline:
            said += capsys.readouterr().err
    lines = (said + capsys.readouterr().err).splitlines()
    assert lines[0] == "building extension (2 C++ files) ..." and lines[-1].startswith("building extension: done in ")
    assert lines[1].startswith("building extension: 1 compiled after")
    assert build_progress.num_objects(tmp_path / "gone", 0.0) == 0
