"""Logging: one line per event, `time level logger message key=value ...`, to standard error."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)-7s %(name)s %(message)s"


def setup_logging(level: str) -> None:
    """Send pyserve's log to standard error. Calling it again only changes the level."""
    logger = logging.getLogger("pyserve")
    logger.setLevel(level.upper())
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
        logger.propagate = False


def log_event(logger: logging.Logger, event: str, **fields: object) -> None:
    """One structured line at level info: the event's name and its fields as key=value."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s %s", event, " ".join(f"{name}={_show(value)}" for name, value in fields.items()))


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    text = str(value)
    return repr(text) if not text or any(character.isspace() or character in "='\"" for character in text) else text
