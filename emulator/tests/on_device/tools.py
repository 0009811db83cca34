"""Helpers of the cases."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

acl = ctypes.CDLL("libascendcl.so")
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p


@contextlib.contextmanager
def refused(*fragments: str) -> Iterator[None]:
    """The block must raise an error that holds every fragment, in itself or in its causes."""
    try:
        yield
    except RuntimeError as error:
        chain, text = error, ""
        while chain is not None:
            text += f"{chain}\n"
            chain = chain.__context__
        missing = [fragment for fragment in fragments if fragment not in text]
        assert not missing, f"the refusal lacks {missing}: {text}"
        return
    raise AssertionError(f"nothing was refused, expected {fragments}")


def captured(function: object) -> tuple[torch.npu.NPUGraph, object]:
    """A graph of `function`, and the function's result during the capture."""
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = function()
    return graph, result
