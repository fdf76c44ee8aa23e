"""Flags and variables: precedence, units, complaints, and that help and table leave nothing out."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from pyserve import __version__
from pyserve.errors import SettingsError
from pyserve.settings import (
    OPTIONS,
    Settings,
    load_settings,
    make_parser,
    settings_from_environment,
    settings_table,
    unknown_variables,
)  # fmt: skip


def test_the_table_and_the_record_say_the_same() -> None:
    assert [option.field for option in OPTIONS] != [] and len(OPTIONS) == len(fields(Settings))
    assert {option.field for option in OPTIONS} == {field.name for field in fields(Settings)}
    assert load_settings([], {}) == settings_from_environment({}) == Settings()


def test_help_and_table_show_every_flag_variable_and_default() -> None:
    help_text = " ".join(make_parser().format_help().split())
    for option in OPTIONS:
        for text in (*option.flags, option.variable):
            assert text in help_text and f"`{text}`" in settings_table()
    assert "--no-preempt-async" in help_text and "8192" in help_text and "TOKENS" in help_text


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["-m", "a.gguf"], "model", "a.gguf"),
        (["-c", "1024"], "ctx_size", 1024),
        (["-np", "8"], "parallel", 8),
        (["--api-key", "a, b,"], "api_keys", ("a", "b")),
        (["-a", "name"], "alias", "name"),
        (["-t", "3"], "threads", 3),
        (["--device", "CUDA:1"], "device", "cuda:1"),
        (["-b", "64"], "batch_size", 64),
        (["--preempt-ram", "0"], "preempt_ram_mib", 0),
        (["--preempt-disk", "/tmp/parked"], "preempt_disk", "/tmp/parked"),
        (["--preempt-disk-limit", "100"], "preempt_disk_limit_mib", 100),
        (["--verify-parks", "ALL"], "verify_parks", "all"),
        (["--no-preempt-async"], "preempt_async", False),
        (["--preempt-async"], "preempt_async", True),
        (["--preempt-async", "off"], "preempt_async", False),
        (["--preempt-async", "on", "-c", "64"], "preempt_async", True),
        (["--no-preempt-planner"], "preempt_planner", False),
        (["--sse-ping-interval", "-1"], "sse_ping_interval_s", -1.0),
        (["--sse-comments", "off"], "sse_comments", False),
        (["--no-sse-comments"], "sse_comments", False),
        (["--sse-comments"], "sse_comments", True),
        (["--kv-type", "F32"], "kv_type", "f32"),
        (["--drain-timeout", "1.5"], "drain_timeout_s", 1.5),
    ],
)
def test_flags(flags: list[str], field: str, value: Any) -> None:
    assert getattr(load_settings(flags, {}), field) == value


def test_a_flag_wins_over_its_variable_and_the_variable_over_the_default() -> None:
    environ = {"PYSERVE_CTX_SIZE": "512", "PYSERVE_PREEMPT_ASYNC": "off", "PYSERVE_API_KEY": "k"}
    settings = load_settings(["--ctx-size", "256", "--preempt-async"], environ)
    assert (settings.ctx_size, settings.preempt_async, settings.api_keys) == (256, True, ("k",))
    assert settings_from_environment(environ).ctx_size == 512


@pytest.mark.parametrize(("variable", "field"), [("PYSERVE_MODEL", "model"), ("PYSERVE_PREEMPT_DISK", "preempt_disk")])
def test_a_path_may_begin_with_the_home_folder(variable: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert getattr(settings_from_environment({variable: "~/parks"}), field) == "/home/ada/parks"
    with pytest.raises(SettingsError, match=variable):
        settings_from_environment({variable: "~nobody-of-this-name/parks"})


BAD = [
    ("--ctx-size", "many"), ("--ctx-size", "0"), ("--ctx-size", "1e3"), ("--parallel", "-1"), ("--port", "70000"),
    ("--kv-type", "q8"), ("--preempt-ram", "-5"), ("--sse-ping-interval", "0"), ("--sse-ping-interval", "-2"),
    ("--sse-ping-interval", "nan"), ("--preempt-async", "maybe"),
    ("--sse-comments", "maybe"), ("--drain-timeout", "nan"), ("--drain-timeout", "soon"), ("--log-level", "loud"),
    ("--model", ""), ("--device", "gpu"), ("--device", "cuda:x"), ("--device", "cuda:"), ("--device", "cpu:0"),
]  # fmt: skip


@pytest.mark.parametrize(("flag", "value"), BAD)
def test_a_bad_value_is_one_line_that_names_flag_or_variable(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load_settings([f"{flag}={value}"], {})
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and flag in line and repr(value) in line
    variable = next(option.variable for option in OPTIONS if flag in option.flags)
    with pytest.raises(SettingsError, match=variable):
        settings_from_environment({variable: value})


def test_unknown_flags_and_variables_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_settings(["--ctx-sise", "1"], {})
    assert ended.value.code == 2 and "--ctx-sise" in capsys.readouterr().err
    assert unknown_variables({"PYSERVE_CTX_SISE": "1", "PYSERVE_PORT": "1", "HOME": "x"}) == ["PYSERVE_CTX_SISE"]


@pytest.mark.parametrize("keys", [",", " , ", ""])
def test_a_key_list_without_a_key_is_refused_and_does_not_open_the_server(keys: str) -> None:
    with pytest.raises(SettingsError, match="PYSERVE_API_KEY"):
        settings_from_environment({"PYSERVE_API_KEY": keys})


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_settings(["--version"], {})
    assert ended.value.code == 0 and capsys.readouterr().out == f"pyserve {__version__}\n"
