"""Pictures of records: decode's speed against its cost, prefill by length, kernels beside the floor, a loaded server.

matplotlib draws them; it is asked for only here (`pip install 'npu-gptoss[bench]'`). A figure's name follows from what
it shows, so that drawing the same records again replaces it: as PNG, and as SVG with its text kept as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_gptoss.bench.tables import groups, layout_of, layout_order, speed_per_user, unusual_projections
from npu_gptoss.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = Mapping[str, Any]
Named = tuple[str, "Figure"]  # the stem of its files

FORMATS = ("png", "svg")
COST = itemgetter("dollars_per_million_tokens")
MARKERS = "osD^vPX*"  # colours alone are lost in grey


class NoMatplotlib(InputError):
    """It is optional, and not here."""


def figures(content: Mapping[str, Any]) -> Iterator[Named]:
    """All figures of one file's content. Raises InputError for kinds that have none, and without matplotlib."""
    what = content["what"]
    if what not in DRAWN:
        raise InputError(f"there is no picture of {what!r}, but of {', '.join(sorted(DRAWN))}")
    _matplotlib()
    yield from DRAWN[what](content)


def save(named: Iterable[Named], folder: Path) -> list[Path]:
    """Writes each figure in every format; returns the files."""
    matplotlib = _matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    # the same records give the same bytes, and text in an SVG can be searched and read aloud
    with matplotlib.rc_context({"svg.hashsalt": "npu_gptoss", "svg.fonttype": "none"}):
        for stem, figure in named:
            for form in FORMATS:
                written.append(folder / f"{stem}.{form}")
                figure.savefig(written[-1], dpi=150, metadata={"Date": None} if form == "svg" else {})
    return written


def decode_figures(content: Mapping[str, Any]) -> Iterator[Named]:
    """For each model and context: speed of a user against cost, a line a layout, a point a batch; and TPOT by batch."""
    keys = ("model", "weights", "projections", "context")
    for (model, weights, projections, context), rows in groups(content["records"], *keys).items():
        other = unusual_projections(projections)
        title = ", ".join([f"Decode, {model}, {weights} experts", *other, f"context {context}"])
        stem = _stem("decode", model, weights, *other, context)
        priced = _priced(rows)
        if priced:
            figure, axes = _figure(content, title)
            for style, name, points in _by_layout(priced, "batch"):
                _numbered(axes, points, COST, speed_per_user, "batch", label=name, **style)
            axes.set(xlabel="$ a million output tokens", ylabel="tokens/s of each user", xscale="log")
            _finish(axes, "layout (numbers: batch)")
            yield f"{stem}_cost", figure
        figure, axes = _figure(content, title)
        _with_floor(axes, rows, "batch", "tpot_ms", 1.0)
        axes.set(xlabel="batch", ylabel="ms a token", ylim=(0, None))
        axes.set_xscale("log", base=2)
        _plain_ticks(axes, rows, "batch")
        _finish(axes, "layout")
        yield f"{stem}_tpot", figure


def prefill_figures(content: Mapping[str, Any]) -> Iterator[Named]:
    """For each model: time to the first token by length; and against cost, a line a layout."""
    for (model, weights, projections), rows in groups(content["records"], "model", "weights", "projections").items():
        other = unusual_projections(projections)
        title = ", ".join([f"Prefill, {model}, {weights} experts", *other])
        stem = _stem("prefill", model, weights, *other)
        figure, axes = _figure(content, title)
        _with_floor(axes, rows, "prompt_tokens", "prefill_s", 1e-3)
        axes.set(xlabel="tokens of the prompt", ylabel="s to the first token", xscale="log", yscale="log")
        _plain_ticks(axes, rows, "prompt_tokens")
        _finish(axes, "layout")
        yield f"{stem}_ttft", figure
        priced = _priced(rows)
        if priced:
            figure, axes = _figure(content, title)
            for style, name, points in _by_layout(priced, "prompt_tokens"):
                _numbered(axes, points, COST, itemgetter("prefill_s"), "prompt_tokens", label=name, **style)
            axes.set(xlabel="$ a million input tokens", ylabel="s to the first token", yscale="log")
            _finish(axes, "layout (numbers: tokens)")
            yield f"{stem}_cost", figure


def kernel_figures(content: Mapping[str, Any]) -> Iterator[Named]:
    """For each operation: the share of the floor that each kernel reaches, case by case."""
    counted = [record for record in content["records"] if record.get("percent_of_floor") is not None]
    for (operation,), rows in groups(counted, "operation").items():
        cases = list(dict.fromkeys(row["case"] for row in rows))
        kernels = list(dict.fromkeys(row["kernel"] for row in rows))
        height = len(kernels) + 1  # of one case: its bars and a gap
        figure, axes = _figure(content, operation, inches=1.5 + 0.22 * len(cases) * height)
        for number, kernel in enumerate(kernels):
            mine = [row for row in rows if row["kernel"] == kernel]
            places = [cases.index(row["case"]) * height + number for row in mine]
            bars = axes.barh(places, [row["percent_of_floor"] for row in mine], height=0.9, label=kernel)
            axes.bar_label(bars, [f"{row['us']:.4g} us" for row in mine], fontsize=7, padding=2)
        axes.set_yticks([place * height + (len(kernels) - 1) / 2 for place in range(len(cases))], cases, fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.12)  # room for the times behind the bars
        axes.set_xlabel("% of the floor (100: as fast as memory or arithmetic allows)")
        axes.grid(visible=True, axis="x", alpha=0.3)
        figure.legend(loc="outside lower center", fontsize=8)
        yield _stem("kernel", operation), figure


def serve_figures(content: Mapping[str, Any]) -> Iterator[Named]:
    """For each model and lengths: what one user sees against the output tokens a second of all, a point a load."""
    keys = ("model", "api", "input_tokens", "output_tokens")
    for (model, api, given, wanted), rows in groups(content["records"], *keys).items():
        for name, label in (("ttft", "ms to the first token"), ("tpot", "ms a token")):
            points = [row for row in rows if row.get(f"{name}_p50_ms") is not None]
            if not points:
                continue  # answers of one token have no time between tokens
            figure, axes = _figure(content, f"{model}, {api}, {given} tokens in, {wanted} out")
            for number, percent in enumerate(("p50", "p99")):
                style = {"color": f"C{number}", "marker": MARKERS[number], "label": percent}
                value = itemgetter(f"{name}_{percent}_ms")
                _numbered(axes, points, itemgetter("output_tokens_per_s"), value, _load, **style)
            axes.set(xlabel="output tokens/s of all users", ylabel=label, ylim=(0, None))
            _finish(axes, "(numbers: requests at a time, or a second)")
            yield _stem("serve", model, api, given, wanted, name), figure


DRAWN: dict[str, Callable[[Mapping[str, Any]], Iterator[Named]]] = {
    "decode": decode_figures,
    "prefill": prefill_figures,
    "kernel": kernel_figures,
    "serve": serve_figures,
}


def _by_layout(rows: Sequence[Record], along: str) -> Iterator[tuple[dict[str, Any], str, list[Record]]]:
    """The points of each layout in order, with a colour and a marker of their own."""
    names = sorted({layout_of(row) for row in rows}, key=layout_order)
    for number, name in enumerate(names):
        points = sorted((row for row in rows if layout_of(row) == name), key=lambda row: row[along])
        yield {"color": f"C{number}", "marker": MARKERS[number % len(MARKERS)]}, name, points


def _with_floor(axes: Axes, rows: Sequence[Record], along: str, measured: str, floor_factor: float) -> None:
    """A line a layout, and dotted its floor. floor_factor: from floor_ms to the unit of `measured`."""
    for style, name, points in _by_layout(rows, along):
        places = [row[along] for row in points]
        axes.plot(places, [row[measured] for row in points], label=name, **style)
        if all(row.get("floor_ms") is not None for row in points):
            floors = [row["floor_ms"] * floor_factor for row in points]
            axes.plot(places, floors, label=f"{name}, floor", color=style["color"], linestyle=":")


def _numbered(
    axes: Axes,
    points: Sequence[Record],
    x: Callable[[Record], float],
    y: Callable[[Record], float],
    number: str | Callable[[Record], str],
    **style: Any,
) -> None:
    """A line whose points carry a number: a field of the record, or what a function makes of it."""
    axes.plot([x(row) for row in points], [y(row) for row in points], **style)
    for row in points:
        text = number(row) if callable(number) else str(row[number])
        axes.annotate(text, (x(row), y(row)), xytext=(4, 4), textcoords="offset points", fontsize=7)


def _load(record: Record) -> str:
    return str(record["concurrency"]) if record["rate"] is None else f"{record['rate']}/s"


def _priced(rows: Sequence[Record]) -> list[Record]:
    """Another engine's records may have no price."""
    return [row for row in rows if row.get("dollars_per_million_tokens") is not None]


def _figure(content: Mapping[str, Any], title: str, inches: float = 4.5) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # no pyplot: it would look for a screen and keep every figure

    figure = Figure(figsize=(7.0, inches), layout="constrained")
    axes = figure.add_subplot()
    machine = content["machine"]
    where = machine.get("device") or f"client on {machine.get('client', 'an unnamed machine')}"
    axes.set_title(f"{title}\n{content['engine']}, {where}, {content['date'][:10]}", fontsize=9)
    return figure, axes


def _finish(axes: Axes, legend: str) -> None:
    axes.grid(visible=True, alpha=0.3)
    axes.legend(title=legend, fontsize=8, title_fontsize=8)


def _plain_ticks(axes: Axes, rows: Sequence[Record], along: str) -> None:
    """The measured places themselves, as numbers."""
    values = sorted({row[along] for row in rows})
    axes.set_xticks(values, [str(value) for value in values], fontsize=8)
    axes.minorticks_off()


def _stem(*parts: object) -> str:
    return "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", str(part)) for part in parts)


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise NoMatplotlib(
            "pictures need matplotlib, which is not installed: pip install 'npu-gptoss[bench]' (or matplotlib alone)"
        ) from None
    return matplotlib
