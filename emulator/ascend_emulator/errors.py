"""The base class of what a user's input can cause here: said in one sentence, without a traceback."""

from __future__ import annotations


class EmulatorError(ValueError):
    """Says what was expected, what was got and what to do."""
