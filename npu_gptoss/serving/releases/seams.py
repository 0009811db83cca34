"""Checks that an installed vllm-ascend has what this package touches, by reading its files; imports none of them.

The name of a build says little: builds of the tag v0.23.0 call themselves 0.23.1.dev0, nightly builds 0.19.x. Seams are
the names that `ascend_*` imports (MODULES), the parameters of what it calls (SEAMS), code that it relies on (SOURCES),
and what this release's repairs look for: each is installed into an outline of the module.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from npu_gptoss.serving import compat
from npu_gptoss.serving.compat.patch import Mismatch, Patch, expect_parameters, expect_source
from npu_gptoss.serving.releases import Release, package_folder

PACKAGE = "vllm_ascend"
FITS = "_GPTOSS_SEAMS_FIT"  # the files that the user's process has read, for the server's other processes
_KEPT = ("staticmethod", "classmethod", "property")


def device_type(package: Path | None) -> str:
    """Returns the devices that this vllm-ascend is built for: A2 (910B), A3 (910C); "" if its files do not say."""
    with contextlib.suppress(OSError, TypeError):
        return re.search(r"__device_type__ = '(\w+)'", (package / "_build_info.py").read_text(encoding="utf-8"))[1]
    return ""


@dataclass(frozen=True)
class Misfit:
    """A seam that differs. needed: gpt-oss is not served without it; else a repair is left out."""

    sentence: str
    needed: bool


def _names(node: ast.stmt) -> Iterator[str]:
    """The names that an assignment or an import binds."""
    if isinstance(node, ast.ImportFrom | ast.Import):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


def _outlined(body: list[ast.stmt], classes: set[str]) -> Iterator[ast.stmt]:
    """Functions with their parameters, classes with bases of the same file, and other names as None. Line numbers stay,
    so that `inspect.getsource` returns the file's own text."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            for each in ast.walk(given):
                if isinstance(each, ast.arg):
                    each.annotation = None
            given.defaults = [ast.Constant(None) for _ in given.defaults]
            given.kw_defaults = [each and ast.Constant(None) for each in given.kw_defaults]
            node.decorator_list = [d for d in node.decorator_list if isinstance(d, ast.Name) and d.id in _KEPT]
            node.returns, node.body = None, [ast.Pass()]
            yield node
        elif isinstance(node, ast.ClassDef):
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            node.bases = [base for base in bases if isinstance(base, ast.Name) and base.id in classes]
            made = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
            fields = [part.target.id for part in node.body if isinstance(part, ast.AnnAssign)]
            node.keywords, node.decorator_list = [], []
            node.body = [*_outlined(node.body, classes), ast.Pass()]
            if made:
                node.body += ast.parse(f"def __init__(self, {', '.join(fields)}): pass").body
            classes.add(node.name)
            yield node
        elif isinstance(node, ast.If | ast.Try):
            for part in (node, *getattr(node, "handlers", ())):
                yield from _outlined([*part.body, *getattr(part, "orelse", ())], classes)
        elif names := list(_names(node)):
            yield ast.Assign([ast.Name(name, ast.Store()) for name in names], ast.Constant(None))


@dataclass(frozen=True)
class Reader:
    """Outlines of installed modules. folder: of a package, by its name."""

    folder: Callable[[str], Path | None] = package_folder
    _read: dict[str, tuple[ModuleType, dict[str, tuple[str, str]]]] = field(default_factory=dict)

    def module(self, name: str) -> tuple[ModuleType, dict[str, tuple[str, str]]]:
        """Returns the outline, and (module, name) of each name that it imports from another."""
        if name not in self._read:
            top, *rest = name.split(".")
            place = (self.folder(top) or Path("/nowhere")).joinpath(*rest)
            file = next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)
            if file is None:
                raise Mismatch(f"{name} is not there")
            tree = ast.parse(file.read_text(encoding="utf-8"))
            found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
            imported = {alias.asname or alias.name: (node.module, alias.name) for node in found for alias in node.names}
            module = ModuleType(name)
            tree.body = list(_outlined(tree.body, set()))
            exec(compile(ast.fix_missing_locations(tree), str(file), "exec"), vars(module))
            self._read[name] = module, imported
        return self._read[name]

    def find(self, place: str) -> Any:
        """Returns the outline at "module:Class.name". Raises Mismatch if the file has none."""
        name, _, path = place.partition(":")
        module, imported = self.module(name)
        first, *rest = path.split(".")
        if vars(module).get(first) is None and first in imported:
            setattr(module, first, self.find(":".join(imported[first])))
        found = module
        for part in (first, *rest):
            if not hasattr(found, part):
                raise Mismatch(f"{name}.{path} is not there")
            found = getattr(found, part)
        return found


def _install(patch: Patch, reader: Reader) -> None:
    for place in patch.touches:
        reader.find(place)
    patch.install(reader.module(patch.module)[0])


@functools.cache
def misfits(row: Release, folder: Callable[[str], Path | None] = package_folder) -> tuple[Misfit, ...]:
    """Names each seam of the installed vllm-ascend that differs from those of the row; () if all fit.

    Reading takes 0.6 s, so a server's first process that finds nothing says so to those that it starts.
    """
    read = f"{row.name} {folder(PACKAGE)}"
    if folder is package_folder and os.environ.get(FITS) == read:
        return ()
    reader, names = Reader(folder), row.module("ascend")
    checks: list[tuple[bool, Callable[[], object]]] = [
        (True, lambda place=f"{module}:{name}": reader.find(place))
        for module, wanted in names.MODULES.items()
        for name in wanted.split()
    ]
    for place, parameters in names.SEAMS.items():
        checks.append((True, lambda p=place: reader.find(p)))
        if parameters:
            checks.append((True, lambda p=place, takes=parameters: expect_parameters(reader.find(p), *takes.split())))
    for place, marker in names.SOURCES.items():
        checks.append((True, lambda p=place, code=marker: expect_source(reader.find(p), code)))
    for patch in compat.patches():
        if row.name in patch.releases and patch.module.startswith(PACKAGE):
            checks.append((patch.essential, lambda patch=patch: _install(patch, reader)))
    found: dict[str, Misfit] = {}
    for needed, check in checks:
        try:
            check()
        except Exception as error:  # an installer meets code that it does not know
            said = str(error).partition("; is it repaired")[0]
            said = said if isinstance(error, Mismatch) else f"{type(error).__name__}: {said}"
            found.setdefault(said, Misfit(said, needed))
    if folder is package_folder and not found:
        os.environ[FITS] = read
    return tuple(found.values())
