"""Finds or builds the extension and loads it.

Order: the extension that `pip install` built for this torch version; then a build in the cache; then a new build with
ninja. A cached build is named after a hash of the sources, the flags, the compiler and the torch version, so finding
it again reads some small files and starts nothing. What is compiled is a copy of the sources, which nobody edits
meanwhile, and the library is named after the copy. Object files are kept beside it, so that a changed source compiles
alone. One file lock per folder keeps two processes from building at once; the one that waited finds the result of the
other.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from pyserve.errors import PyserveError
from pyserve.ops import flags
from pyserve.ops.build_progress import num_objects, told

_KEPT_BUILDS = 4  # older ones are deleted; a process that has one loaded keeps it


class BuildError(PyserveError):
    """The extension could not be built; one line that says why."""


def load() -> Path:
    """Makes `torch.ops.pyserve` and `torch.classes.pyserve` work. Returns the file loaded. Raises BuildError."""
    path = installed() or built()
    torch.ops.load_library(str(path))
    return path


def installed(backend: str = "C") -> Path | None:
    """The extension built ahead of time for this torch version, if there is one: "C", or "cuda". A checkout's is not
    taken: its sources may have changed since.
    """
    package = Path(__file__).resolve().parent.parent
    if (package.parent / "csrc" / "registration.cpp").is_file():
        return None
    return next(iter(sorted(package.glob(flags.extension_name(torch.__version__, backend) + ".*so"))), None)


def built() -> Path:
    """The extension in the cache, built now if it is not there."""
    csrc = source_folder()
    folder = build_folder(csrc)
    while True:
        path = folder / f"pyserve_{fingerprint(csrc)}.so"
        if path.is_file():
            return path
        with locked(folder):
            if not path.is_file():
                _compile(copied(csrc, folder / "sources"), folder)


def source_folder() -> Path:
    """csrc/ in a checkout, pyserve/csrc/ where the package is installed."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package.parent / "csrc", package / "csrc"):
        if (folder / "registration.cpp").is_file():
            return folder
    raise BuildError(
        f"no kernel sources in {package.parent / 'csrc'} or {package / 'csrc'}: the installation is damaged"
    )


def build_folder(csrc: Path) -> Path:
    """PYSERVE_BUILD_DIR or the user's cache folder, with a folder of its own for each source tree and torch version."""
    chosen = os.environ.get("PYSERVE_BUILD_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(chosen) if chosen else cache / "pyserve"
    tree = hashlib.sha256(str(csrc).encode()).hexdigest()[:8]
    return root / f"torch-{torch.__version__}-{tree}"


def fingerprint(csrc: Path) -> str:
    """Changes when any source, header, flag, the compiler's name or the torch version does."""
    digest = hashlib.sha256(repr((torch.__version__, flags.COMPILE_FLAGS, flags.LINK_FLAGS, compiler())).encode())
    for path in [*flags.sources(csrc), *flags.headers(csrc)]:
        digest.update(path.name.encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def compiler() -> str:
    """The host compiler: CXX, or the system's usual one."""
    return os.environ.get("CXX", "c++" if sys.platform == "darwin" else "g++")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the folder; one process at a time is inside. Raises BuildError when it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "build.lock").open("w")
    except OSError as error:
        raise BuildError(
            f"cannot write to the build folder {folder} ({error.strerror}); set PYSERVE_BUILD_DIR to a writable one"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back by the system when the process ends, however it ends
        yield


def copied(csrc: Path, copy: Path) -> Path:
    """Makes `copy` hold the sources as they are now. What is the same stays untouched: its objects need no compiler."""
    wanted = {path.relative_to(csrc): path.read_bytes() for path in [*flags.sources(csrc), *flags.headers(csrc)]}
    for old in [path for path in copy.rglob("*") if path.is_file() and path.relative_to(copy) not in wanted]:
        old.unlink()
    for name, text in wanted.items():
        path = copy / name
        if not path.is_file() or path.read_bytes() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
    return copy


def _compile(csrc: Path, folder: Path) -> None:
    """Builds and publishes what `csrc`, a copy, holds."""
    if shutil.which(compiler()) is None:
        raise BuildError(
            f"no C++ compiler: {compiler()} is not on PATH; install it (Debian: apt-get install g++) or set CXX"
        )
    from torch.utils import cpp_extension  # here, since it takes longer to import than a cached build takes to load

    name = f"pyserve_{fingerprint(csrc)}"
    # torch builds a name once in a process, unless a source (no header) changed, and then under a name of its own.
    fresh = f"{name}_{time.monotonic_ns()}"
    objects = folder / "objects"
    objects.mkdir(exist_ok=True)
    (objects / "lock").unlink(
        missing_ok=True
    )  # torch's own lock file, which a killed build leaves behind; ours is held here
    started_s, what = time.time(), f"{len(flags.sources(csrc))} C++ files, about a minute the first time"

    try:
        with told("extension", what, lambda: num_objects(objects, started_s)), _ninja_on_path(), _quoted(cpp_extension):
            cpp_extension.load(
                name=fresh,
                sources=[str(source) for source in flags.sources(csrc)],
                extra_cflags=flags.COMPILE_FLAGS,
                extra_ldflags=["-shared", *flags.LINK_FLAGS],
                build_directory=str(objects),
                is_python_module=False,
                # With -shared: a library that torch does not load by itself, since it is loaded under its final name.
                is_standalone=True,
            )
    except (RuntimeError, OSError) as error:
        raise BuildError(_failure(str(error), folder / "build.log")) from error
    _publish(objects / fresh, folder / f"{name}.so")


def _publish(built_file: Path, path: Path) -> None:
    unfinished = path.with_suffix(".tmp")
    shutil.move(built_file, unfinished)
    unfinished.replace(path)  # whole or not there: another process may be looking without the lock
    for old in sorted(path.parent.glob("pyserve_*.so"), key=lambda file: file.stat().st_mtime, reverse=True)[
        _KEPT_BUILDS:
    ]:
        old.unlink(missing_ok=True)


def _failure(output: str, log: Path) -> str:
    """One line about a build that failed. All that the compiler said is in `log`."""
    log.write_text(output, encoding="utf-8")
    lines = [line.strip() for line in output.splitlines() if "error:" in line and not line.startswith("ninja")]
    first = lines[0] if lines else output.partition("\n")[0]  # that is torch's own
    return f"building the extension failed: {first} (the whole output: {log})"


@contextmanager
def _quoted(cpp_extension: ModuleType) -> Iterator[None]:
    """torch quotes the folders of its headers for the shell and not that of its libraries, which may have a space."""
    before = cpp_extension.TORCH_LIB_PATH
    cpp_extension.TORCH_LIB_PATH = shlex.quote(before)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        cpp_extension.TORCH_LIB_PATH = before  # type: ignore[attr-defined]


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """torch calls `ninja` by name; the package's copy is not on PATH when Python is started without activating its
    environment.
    """
    before = os.environ.get("PATH", "")
    try:
        import ninja

        os.environ["PATH"] = ninja.BIN_DIR + os.pathsep + before
        yield
    except ImportError:
        yield
    finally:
        os.environ["PATH"] = before
