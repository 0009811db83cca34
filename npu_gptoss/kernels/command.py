"""List the registered kernels, or explain which one a call would run and why the others fall out."""

from __future__ import annotations

import argparse
import json

from npu_gptoss.errors import InputError
from npu_gptoss.kernels.loading import load_kernels
from npu_gptoss.kernels.platform import KINDS, SUPPORTED, current_platform, platform_override
from npu_gptoss.kernels.registry import Operation, registry
from npu_gptoss.kernels.selection import Described, explain
from npu_gptoss.kernels.signature import signature

# A decode call of gpt-oss-20b in bfloat16: what `explain` takes for whatever --set leaves out.
EXAMPLE = {
    "dtype": "bfloat16",
    "head_dim": 64,
    "block_size": 128,
    "sliding_window": True,
    "group_size": 8,
    "max_query_len": 1,
    "activation": "swigluoai",
    "expert_parallel": False,
    "rows": 1,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "experts": 32,
    "aligned": True,
    "table": "int32",
    "quarter": 11520,  # of packed experts: two rows of 5760 columns
}


def example(operation: Operation, **settings: object) -> Described:
    """Such a call of an operation; sizes that follow from others are computed, unless they are set."""
    values = {**EXAMPLE, **settings}
    if isinstance(values["rows"], int):
        values = {
            "pairs_per_expert": values["rows"] * 4 / values["experts"],
            "logits": values["rows"] * values["experts"],
            **values,
        }
    roles = {role: settings.get(role, EXAMPLE.get(role, values["dtype"])) for role in operation.roles}
    return signature(**roles), {trait: values.get(trait) for trait in operation.traits}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True)
    commands.add_parser("list", help="every kernel, by operation, highest priority first")
    why = commands.add_parser("explain", help="which kernel a gpt-oss call runs, and why the others fall out")
    why.add_argument("operation", nargs="?", help="for example attention.paged; default: all")
    why.add_argument("--platform", choices=KINDS, help="as on a supported machine of that kind (default: this one)")
    settings = {"action": "append", "default": [], "metavar": "NAME=VALUE"}
    why.add_argument("--set", **settings, help=f"a role's dtype or a trait; `dtype`: of all roles (default: {EXAMPLE})")


def _operations(name: str | None) -> list[Operation]:
    if name is None:
        return [registry.operations[key] for key in sorted(registry.operations)]
    if name not in registry.operations:
        known = ", ".join(sorted(registry.operations))
        raise InputError(f"there is no operation {name!r}; there are {known}", field="operation")
    return [registry.operations[name]]


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _settings(pairs: list[str]) -> dict[str, object]:
    settings: dict[str, object] = {}
    known = {name for o in registry.operations.values() for name in (*o.roles, *o.traits)} | {"dtype"}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or name not in known:
            names = ", ".join(sorted(known))
            raise InputError(f"--set {pair!r}: expected NAME=VALUE with NAME one of {names}", field="--set")
        settings[name] = _value(value)
    return settings


def _explain(args: argparse.Namespace) -> int:
    settings = _settings(args.set)
    answered = True
    for operation in _operations(args.operation):
        explanation = explain(operation, *example(operation, **settings))
        answered &= explanation.selected is not None
        print("\n".join(explanation.lines()))
    return 0 if answered else 1


def run(args: argparse.Namespace) -> int:
    load_kernels()
    if args.action == "list":
        for operation in _operations(None):
            print(f"{operation.name}: {operation.summary}")
            for kernel in registry.kernels_of(operation):
                print(f"  {kernel.priority:>2}  {kernel.name}  [{kernel.origin}]  {kernel.summary}")
        return 0
    with platform_override(SUPPORTED[args.platform] if args.platform else current_platform()):
        return _explain(args)
