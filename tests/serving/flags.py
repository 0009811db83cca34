"""What becomes of a server's flags in this process's vLLM, without a server: `python -m tests.serving.flags MODEL`.

Reads a JSON list of lines from stdin, and writes a JSON list of verdicts: parsed, configured, and our limits asked, as
`vllm serve` does before it starts an engine.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
from typing import Any

STARTS, ASIDE, OURS, VLLMS, USAGE = "starts", "steps aside", "refused by us", "refused by vLLM", "usage"


def verdict(model: str, line: str) -> dict[str, Any]:
    """line: flags, behind variables of the environment. Returns the verdict, the refused settings and the last line."""
    from vllm import envs as vllm_envs
    from vllm.engine.arg_utils import AsyncEngineArgs

    from npu_gptoss.serving import aside
    from npu_gptoss.serving.compat.start import ends
    from npu_gptoss.serving.releases import here
    from tests.serving.compat.of_release import parsed

    words = shlex.split(line)
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_0-9]+=", word))
    os.environ.update(variables)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            # a parser of reasoning reads the tokenizer, which takes its time
            text = () if "--reasoning-parser" in words else ("--skip-tokenizer-init",)
            arguments = parsed("--model", model, *text, *words[len(variables) :])
        config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
        if here().name == "0.11":
            assert vllm_envs.VLLM_USE_V1  # as its server does next
    except SystemExit:
        return {"verdict": USAGE, "fields": [], "said": said.getvalue().strip().splitlines()[-1]}
    except Exception as error:
        refusals = aside.refusals_of(error)
        kind = OURS if ends._ours(error) else VLLMS
        return {"verdict": kind, "fields": [r.option for r in refusals], "said": ends.sentence(error)}
    graphs = config.compilation_config.cudagraph_mode
    told = {"verdict": ASIDE if aside.stepped_aside() else STARTS, "fields": [], "said": ""}
    return told | {"graphs": None if graphs is None else graphs.name}


def main(model: str) -> None:
    lines = json.load(sys.stdin)
    sys.argv[:] = ["vllm", "serve", model]  # some limits hold for servers only
    from npu_gptoss.serving.releases import here

    if here().name == "0.33":
        from tests.serving.cuda.faked import pretend

        pretend()
    before, found = dict(os.environ), []
    for line in lines:
        found.append(verdict(model, line))
        os.environ.clear()
        os.environ.update(before)
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
