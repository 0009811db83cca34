"""The one base class of everything that a user's input can cause.

The command line prints such an error as one sentence and exits with 2; anything else is a defect of ours and keeps
its traceback.
"""

from __future__ import annotations


class InputError(ValueError):
    """Says what was expected, what was got and what to do."""
