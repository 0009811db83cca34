"""Assertions on the errors of `npu_gptoss.errors`: they compare the named field and never the English."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from npu_gptoss.errors import InputError


@contextmanager
def refused(field: str, error: type[InputError] = InputError) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block must raise an error of this class that names this option, variable, field or argument."""
    with pytest.raises(error) as caught:
        yield caught
    assert caught.value.field == field, f"names {caught.value.field!r}: {caught.value}"
