"""Runs the functions `case_…` of a file, each alone, and prints a line of JSON for each: its failure, or null.

Run by the Python of a clients' environment: `python runner.py FILE URL MODEL`. A case takes (url, model); an exception
is its failure. Nothing of this repository is imported.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

LIMIT = 200  # seconds for a case
# questions that the tiny model was trained on
SUM, ANSWER = "What is 3 + 4?", "3 + 4 = 7."
WEATHER = "What is the weather in Paris?"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Get the weather", "parameters": PARAMETERS}


class Found(BaseModel):
    """A season and a parity."""

    season: Literal["spring", "autumn"]
    even: bool


def equal(got: object, wanted: object, of: object = "") -> None:
    """An assertion that shows both: pytest, which would, is not here."""
    assert got == wanted, f"{of} {got!r}, not {wanted!r}"


def main(file: str, url: str, model: str) -> None:
    os.environ |= {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": url}
    # nothing goes to anybody but the server
    os.environ |= {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false", "DO_NOT_TRACK": "1"}
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where pydantic looks for the names in annotations
    try:
        spec.loader.exec_module(module)
    except Exception:
        print(json.dumps({"case": "import", "failure": traceback.format_exc()[-3000:]}), flush=True)
        return
    for name, case in vars(module).items():
        if not name.startswith("case_"):
            continue
        failure = None
        try:
            result = case(url, model)
            if inspect.isawaitable(result):
                asyncio.run(asyncio.wait_for(result, LIMIT))
        except BaseException:
            failure = traceback.format_exc()[-3000:]
        print(json.dumps({"case": name, "failure": failure}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
