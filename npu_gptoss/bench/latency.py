"""What is said of a set of answers: times of requests as means and percentiles, rates of the whole run, failures."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from npu_gptoss.bench.client import Answer
from npu_gptoss.bench.decode import significant
from npu_gptoss.bench.measure import percentile
from npu_gptoss.errors import InputError

PERCENTILES = (50, 90, 99)
DEFINITIONS = {
    "ttft": "time to first token: from handing the request over to the first event of the stream that carries output; "
    "a chat's opening event with only a role carries none, and a token whose text is not complete comes with the next",
    "e2e": "from handing the request over to the event with the finish reason",
    "tpot": "time per output token of one request: (e2e - ttft) / (output tokens - 1), for answers of at least two",
    "itl": "inter-token latency: time between one event with output and the next of the same request, all gaps of all "
    "requests together; an event may hold several tokens, so its mean can exceed that of tpot",
    "mean, pNN": "of requests (itl: of gaps) that succeeded; percentiles interpolate linearly between the nearest two; "
    "std is the sample's standard deviation",
    "output_tokens_per_s": "output tokens of the answers that succeeded / duration_s; tokens are the server's usage",
    "requests_per_s": "answers that succeeded / duration_s",
    "duration_s": "from handing the first counted request over to the end of the last one, failed ones included; "
    "warm-up requests are over before, and in no number",
    "failures": "requests that count in no time, by reason: an HTTP status other than 200, a broken or late stream, a "
    "stream without a finish reason, without output or without usage",
    "short_answers": "answers that succeeded with fewer output tokens than were asked for",
}


class NothingSucceeded(InputError):
    """No answer of a point can be measured."""


def ttft(answer: Answer) -> float:
    return answer.outputs[0] - answer.sent


def e2e(answer: Answer) -> float:
    return answer.end - answer.sent


def tpot(answer: Answer) -> float | None:
    """None for a single token, which has no other to come after."""
    if answer.output_tokens < 2:
        return None
    return (e2e(answer) - ttft(answer)) / (answer.output_tokens - 1)


def gaps(answer: Answer) -> list[float]:
    return [later - earlier for earlier, later in pairwise(answer.outputs)]


def summary(answers: Sequence[Answer], output_tokens: int) -> dict[str, Any]:
    """The measured fields of a record. Raises NothingSucceeded with the reasons where no answer succeeded."""
    good = [answer for answer in answers if answer.error is None]
    failures = Counter(answer.error for answer in answers if answer.error is not None)
    if not good:
        reasons = "; ".join(f"{count} × {reason}" for reason, count in failures.most_common())
        raise NothingSucceeded(f"none of {len(answers)} requests succeeded: {reasons or 'there were none'}")
    duration = max(answer.end for answer in answers) - min(answer.sent for answer in answers)
    tokens = sum(answer.output_tokens for answer in good)
    times = {
        "ttft": [ttft(answer) for answer in good],
        "tpot": [value for answer in good if (value := tpot(answer)) is not None],
        "itl": [gap for answer in good for gap in gaps(answer)],
        "e2e": [e2e(answer) for answer in good],
    }
    found: dict[str, Any] = {
        "requests": len(answers),
        "succeeded": len(good),
        "failed": len(answers) - len(good),
        "failures": dict(failures.most_common()),
        "short_answers": sum(answer.output_tokens < output_tokens for answer in good),
        "mean_prompt_tokens": statistics.fmean(answer.prompt_tokens for answer in good),
        "mean_output_tokens": tokens / len(good),
        "duration_s": duration,
        "output_tokens_per_s": tokens / duration,
        "requests_per_s": len(good) / duration,
    }
    for name, values in times.items():
        found |= {f"{name}_{statistic}_ms": value for statistic, value in _statistics(values).items()}
    return {name: significant(value) for name, value in found.items()}


def _statistics(seconds: Sequence[float]) -> dict[str, float | None]:
    """In milliseconds; None of an empty set (one token has no time between tokens)."""
    if not seconds:
        return dict.fromkeys(("mean", "std", *(f"p{percent}" for percent in PERCENTILES)))
    values = [1e3 * value for value in seconds]
    spread = statistics.stdev(values) if len(values) > 1 else None
    percentiles = {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
    return {"mean": statistics.fmean(values), "std": spread, **percentiles}


def table(record: dict[str, Any]) -> list[str]:
    """What is printed of one point."""
    load = f"{record['concurrency']} at a time" if record["rate"] is None else f"{record['rate']} a second"
    lines = [
        f"{load}: {record['succeeded']} of {record['requests']} requests, {record['duration_s']:.2f} s, "
        f"{record['output_tokens_per_s']:.1f} output tok/s, {record['requests_per_s']:.2f} requests/s; "
        f"{record['mean_prompt_tokens']:.1f} prompt and {record['mean_output_tokens']:.1f} output tokens each"
    ]
    lines.append(f"{'ms':>6} {'mean':>10} " + " ".join(f"{f'p{percent}':>10}" for percent in PERCENTILES))
    for name in ("ttft", "tpot", "itl", "e2e"):
        values = [record[f"{name}_{statistic}_ms"] for statistic in ("mean", *(f"p{p}" for p in PERCENTILES))]
        lines.append(f"{name.upper():>6} " + " ".join(f"{'-' if v is None else f'{v:.2f}':>10}" for v in values))
    lines += [f"failed: {count} × {reason}" for reason, count in record["failures"].items()]
    if record["short_answers"]:
        lines.append(f"{record['short_answers']} answers are shorter than was asked for, so their tokens are fewer")
    return lines
