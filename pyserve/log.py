"""Logging: one line per event, `time level logger message`, to standard error. Fields in a message are key=value."""

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
