"""Two turns of an agent, to look at: `show.py serve` starts the scripted server, `show.py ask AGENT` asks it.

python -m tests.clients.agents.show serve
python -m tests.clients.agents.show ask codex
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.clients.agents import cli, script

AGENTS = {"codex": cli.codex, "claude": cli.claude_code, "opencode": cli.opencode}
MODEL, CONTEXT = "gpt-oss", 131072


def serve(model: Path, port: int) -> None:
    """vLLM's server of this environment; script.py is the model."""
    from tests.serving import scripted

    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder, "rules.json")
        rules.write_text(json.dumps(script.RULES))
        flags = ["--served-model-name", MODEL, "--max-model-len", str(CONTEXT), "--host", "127.0.0.1"]
        scripted.main([str(model), "--rules", str(rules), "--port", str(port), *flags])


def ask(agent: str, port: int) -> None:
    """Print the output of the agent in two turns, and the file that it made."""
    from scripts.setup.environments import AGENTS as INSTALLED
    from tests.clients.places import TODAY, venv

    with tempfile.TemporaryDirectory() as folder:
        home, work = Path(folder, "home"), Path(folder, "work")
        home.mkdir()
        work.mkdir()
        served = cli.Served(f"http://127.0.0.1:{port}", MODEL, CONTEXT)
        made = AGENTS[agent](served, home, venv(TODAY) / INSTALLED / "node_modules")
        for prompt, resume in ((script.FIRST, False), (script.SECOND, True)):
            done = made.ask(prompt, work, resume=resume)
            print(f"$ {made.program.name} {' '.join(made.resumed if resume else made.first)} <<< '{prompt}'")
            print(done.stderr + done.stdout)
        print(f"$ cat {script.MADE}\n{(work / script.MADE).read_text()}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    commands = parser.add_subparsers(dest="command", required=True)
    starting = commands.add_parser("serve", help="start the server")
    starting.add_argument("--model", type=Path, default=Path(".checkpoints/gpt-oss-tiny"), help="a checkpoint")
    commands.add_parser("ask", help="ask it").add_argument("agent", choices=AGENTS)
    options = parser.parse_args(arguments)
    if options.command == "serve":
        serve(options.model, options.port)
    else:
        ask(options.agent, options.port)


if __name__ == "__main__":
    main()
