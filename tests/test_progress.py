"""Progress bars appear at a terminal only, and keep no tensor alive."""

from __future__ import annotations

import gc
import io
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from tqdm import tqdm

from npu_gptoss.bench.random_checkpoint import random_tensors
from npu_gptoss.engine import Engine
from npu_gptoss.model.checkpoint import write_checkpoint
from npu_gptoss.model.layout import expected_tensors
from npu_gptoss.progress import bar, counted
from tests.checkpoints import random_config


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def seen(work: Callable[[], object]) -> str:
    """A terminal's output of some work. Without a terminal, the same work must print nothing."""
    with redirect_stderr(io.StringIO()) as file:
        work()
    assert file.getvalue() == ""
    with redirect_stderr(Terminal()) as terminal:
        work()
    return terminal.getvalue()


def test_a_bar_is_seen_on_a_terminal_only() -> None:
    def work() -> None:
        with bar(3, "sweeping", "layout") as shows:
            shows.update(2)
            shows.refresh()

    text = seen(work)
    assert "sweeping:  67%" in text
    assert "2/3 [" in text
    *_, last, end = text.split("\r")
    assert (last.strip(), end) == ("", ""), "it is wiped out, and the next line takes its place"


def test_counting_moves_the_bar_and_an_error_comes_through() -> None:
    with redirect_stderr(Terminal()):
        for done, _ in enumerate(counted("abc", 3, "x", "y")):
            (shown,) = [one for one in tqdm._instances if one.desc.startswith("x")]
            assert (shown.n, shown.total) == (done, 3)
    with pytest.raises(ZeroDivisionError):
        list(counted((1 / n for n in (1, 0)), 2, "x", "y"))
    assert seen(lambda: list(counted("abc", 3, "x", "y", shown=False))) == ""


def test_counting_keeps_no_item_alive_while_the_next_is_made() -> None:
    class Tensor:
        pass

    alive: list[weakref.ref[Tensor]] = []

    def made() -> Iterator[Tensor]:
        for _ in range(3):
            gc.collect()
            assert [ref for ref in alive if ref() is not None] == []
            tensor = Tensor()
            alive.append(weakref.ref(tensor))
            yield tensor
            del tensor

    items = counted(made(), 3, "making", "tensor")
    for _ in range(3):
        assert isinstance(next(items), Tensor)  # and let go of
    assert len(alive) == 3


def test_writing_loading_and_making_weights_show_a_bar(tmp_path: Path) -> None:
    config = random_config(layers=2)
    count = f"/{len(expected_tensors(config))} ["

    def write() -> None:
        shutil.rmtree(tmp_path)
        write_checkpoint(tmp_path, config, random_tensors(config, 0, "cpu"))

    def engine(**options: object) -> None:
        Engine(tmp_path, dtype="float32", num_blocks=4, **options)

    text = seen(write)
    assert "writing weights" in text
    assert count in text
    assert "loading weights" in seen(lambda: engine(progress=True))
    text = seen(lambda: engine(progress=True, tensors=random_tensors(config, 0, "cpu")))
    assert "making weights" in text
    assert count in text
    assert seen(lambda: engine(tensors=random_tensors(config, 0, "cpu"))) == "", "an engine is asked for its bars"
