"""Typed access to what a model file says about itself, with errors that name the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from .files import fail, shown

MAX_COUNT = 1 << 30
MAX_NUMBER = 1e15


class Fields:
    """Values out of a stranger's file. `prefix` stands before each key: GGUF's `llama.`."""

    def __init__(self, path: Path, values: Mapping[str, object], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    def get(self, key: str) -> object:
        return self.values.get(self.prefix + key)

    def fail(self, key: str, message: str) -> NoReturn:
        fail(self.path, f"{self.prefix}{key} {message}")

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A count of at least `minimum`. Without a default the field must be there."""
        value = self.get(key)
        if value is None:
            if default is None:
                self.fail(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, f"must be an integer, not {shown(value)}")
        if not minimum <= value <= MAX_COUNT:
            self.fail(key, f"is {value}, which is not between {minimum} and {MAX_COUNT}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above zero and no more than MAX_NUMBER. Without a default the field must be there."""
        value = self.get(key)
        if value is None:
            if default is None:
                self.fail(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(key, f"must be a number, not {shown(value)}")
        if not 0 < value <= MAX_NUMBER:
            self.fail(key, f"is {shown(value)}, which is not a number above 0 and up to {MAX_NUMBER}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, not {shown(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            self.fail(key, "is missing" if value is None else f"must be a string, not {shown(value)}")
        return value
