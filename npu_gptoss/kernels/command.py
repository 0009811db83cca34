"""List the registered kernels, or explain which one a call would run and why the others fall out."""

from __future__ import annotations

import argparse
import json

from npu_gptoss.errors import InputError
from npu_gptoss.kernels.loading import load_kernels
from npu_gptoss.kernels.platform import KINDS, current_platform, platform_override
from npu_gptoss.kernels.registry import Operation, registry
from npu_gptoss.kernels.selection import explain
from npu_gptoss.kernels.signature import signature

# A gpt-oss call in bfloat16: what `explain` takes for whatever --set leaves out.
EXAMPLE = {
    "dtype": "bfloat16",
    "head_dim": 64,
    "block_size": 128,
    "sliding_window": True,
    "activation": "swigluoai",
    "expert_parallel": False,
    "rows": "one",
    "table": "int32",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True)
    listing = commands.add_parser("list", help="every kernel, by operation, highest priority first")
    listing.add_argument("--json", action="store_true", help="print one JSON list")
    why = commands.add_parser("explain", help="which kernel a gpt-oss call runs, and why the others fall out")
    why.add_argument("operation", nargs="?", help="for example attention.paged; default: all")
    why.add_argument("--platform", choices=KINDS, help="as if on another machine (default: this one)")
    why.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"a role's dtype or a trait; `dtype` sets all roles (default: {EXAMPLE})",
    )


def _operations(name: str | None) -> list[Operation]:
    if name is None:
        return [registry.operations[key] for key in sorted(registry.operations)]
    if name not in registry.operations:
        raise InputError(f"there is no operation {name!r}; there are {', '.join(sorted(registry.operations))}")
    return [registry.operations[name]]


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _settings(pairs: list[str]) -> dict[str, object]:
    settings: dict[str, object] = dict(EXAMPLE)
    known = {name for o in registry.operations.values() for name in (*o.roles, *o.traits)} | {"dtype"}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or name not in known:
            raise InputError(f"--set {pair!r}: expected NAME=VALUE with NAME one of {', '.join(sorted(known))}")
        settings[name] = _value(value)
    return settings


def _list(as_json: bool) -> None:
    rows = [(operation, kernel) for operation in _operations(None) for kernel in registry.kernels_of(operation)]
    if as_json:
        fields = ("name", "family", "mode", "solution", "priority", "origin", "summary")
        print(json.dumps([{f: getattr(kernel, f) for f in fields} for _, kernel in rows], indent=1))
        return
    for operation in _operations(None):
        print(f"{operation.name}: {operation.summary}")
        for kernel in registry.kernels_of(operation):
            print(f"  {kernel.priority:>2}  {kernel.name}  [{kernel.origin}]  {kernel.summary}")


def _explain(args: argparse.Namespace) -> int:
    settings = _settings(args.set)
    answered = True
    for operation in _operations(args.operation):
        call = signature(**{role: settings.get(role, settings["dtype"]) for role in operation.roles})
        explanation = explain(operation, call, {trait: settings.get(trait) for trait in operation.traits})
        answered &= explanation.selected is not None
        print("\n".join(explanation.lines()))
    return 0 if answered else 1


def run(args: argparse.Namespace) -> int:
    load_kernels()
    if args.action == "list":
        _list(args.json)
        return 0
    with platform_override(args.platform or current_platform().kind):
        return _explain(args)
