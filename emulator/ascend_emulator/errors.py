"""The base class of errors that a user's input causes: one sentence, without a traceback."""

from __future__ import annotations


class EmulatorError(ValueError):
    """States the expected value, the actual value and the remedy."""
