"""Codex, Claude Code and OpenCode without a terminal: programs, arguments, environments and configuration files.

Each function writes one agent's configuration into a new HOME and returns the commands. The prompt comes on
standard input; standard output has the answer only. Updates, telemetry and plugins are off, and every address but
loopback goes to a proxy, which a test can watch.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

ARM = platform.machine() in ("aarch64", "arm64")
# Under node_modules; npm's install scripts, which would link them, do not run. OpenCode has none for ARM in our lock.
CODEX = (
    "@openai/codex-linux-arm64/vendor/aarch64-unknown-linux-musl/bin/codex"
    if ARM
    else "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex"
)
CLAUDE_CODE = f"@anthropic-ai/claude-code-linux-{'arm64' if ARM else 'x64'}/claude"
OPENCODE = "opencode-linux-x64-baseline/bin/opencode"
NOWHERE = "http://127.0.0.1:9"  # a proxy that does not exist: a request to an outside address fails at once


@dataclass(frozen=True)
class Served:
    """A server as an agent sees it: its address without `/v1`, the model's name and its context in tokens."""

    url: str
    model: str
    context: int = 131072
    output: int = 4096


@dataclass(frozen=True)
class Agent:
    """A program with the arguments of the first turn and of a turn that resumes the last session."""

    program: Path
    first: tuple[str, ...]
    resumed: tuple[str, ...]
    home: Path
    variables: dict[str, str] = field(default_factory=dict)

    def ask(
        self, prompt: str, folder: Path, *, resume: bool = False, proxy: str = NOWHERE, limit: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run one turn in `folder`; `limit` is in seconds."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), proxy),
            "NO_PROXY": "127.0.0.1,localhost",
            **self.variables,
        }
        command = [str(self.program), *(self.resumed if resume else self.first)]
        return subprocess.run(
            command,
            cwd=folder,
            env=environment,
            input=prompt,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )


def codex(served: Served, home: Path, modules: Path, *, catalog: bool = True) -> Agent:
    """Write Codex's config.toml. With a catalog of models it offers `apply_patch`, a custom tool with a grammar."""
    folder = home / ".codex"
    folder.mkdir(parents=True)
    config = f"""\
model = "{served.model}"
model_provider = "local"
model_context_window = {served.context}
check_for_update_on_startup = false
{f'model_catalog_json = "{folder / "models.json"}"' if catalog else ""}
[model_providers.local]
name = "local"
base_url = "{served.url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
[analytics]
enabled = false
[features]
plugins = false
unbounded_connection_retries = false
"""
    (folder / "config.toml").write_text(config)
    if catalog:
        (folder / "models.json").write_text(json.dumps({"models": [codex_model(served)]}))
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-")
    return Agent(modules / CODEX, ("exec", *options), ("exec", "resume", "--last", *options), home)


def codex_model(served: Served) -> dict[str, object]:
    """Return the fields that Codex 0.171 requires of a catalog's entry, and `apply_patch`."""
    return {
        "slug": served.model,
        "display_name": served.model,
        "base_instructions": "You are a coding agent.",
        "context_window": served.context,
        "input_modalities": ["text"],
        "shell_type": "unified_exec",
        "apply_patch_tool_type": "freeform",
        "default_reasoning_level": "medium",
        "supported_reasoning_levels": [{"effort": e, "description": e} for e in ("low", "medium", "high")],
        "support_verbosity": False,
        "truncation_policy": {"mode": "tokens", "limit": 10000},
        "experimental_supported_tools": [],
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
    }


def claude_code(served: Served, home: Path, modules: Path, *, betas: bool = True, only: str = "") -> Agent:
    """Set Claude Code's variables. It reads no file.

    Without `betas` it sends no field of Anthropic's experiments; only: the tools that it has, instead of all.
    """
    slots = ("", "_SMALL_FAST", "_DEFAULT_HAIKU", "_DEFAULT_SONNET", "_DEFAULT_OPUS")
    variables = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        **{f"ANTHROPIC{slot}_MODEL": served.model for slot in slots},
        "CLAUDE_CODE_SUBAGENT_MODEL": served.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.output),
        "CLAUDE_CODE_MAX_RETRIES": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **({} if betas else {"CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1"}),
    }
    first = ("-p", "--allowedTools", only or "Bash,Edit,Write", *(("--tools", only) if only else ()))
    return Agent(modules / CLAUDE_CODE, first, (*first, "--continue"), home, variables)


def opencode(served: Served, home: Path, modules: Path, *, sdk: str = "@ai-sdk/openai-compatible") -> Agent:
    """Write OpenCode's opencode.json. `sdk`: that one speaks chat, `@ai-sdk/openai` Responses, `@ai-sdk/anthropic`
    Messages; the program contains all three."""
    folder = home / ".config/opencode"
    # OpenCode fetches its plugin interface from npm, unless a lock beside node_modules names it.
    (folder / "node_modules").mkdir(parents=True)
    lock = {"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}
    (folder / "package-lock.json").write_text(json.dumps(lock))
    limit = {"context": served.context, "output": served.output}
    provider = {
        "npm": sdk,
        "options": {"baseURL": f"{served.url}/v1", "apiKey": "none"},
        "models": {served.model: {"reasoning": True, "tool_call": True, "limit": limit}},
    }
    model = f"local/{served.model}"
    config = {"permission": "allow", "model": model, "small_model": model, "provider": {"local": provider}}
    (folder / "opencode.json").write_text(json.dumps({**config, "autoupdate": False, "share": "disabled"}))
    off = ("AUTOUPDATE", "MODELS_FETCH", "DEFAULT_PLUGINS", "LSP_DOWNLOAD")
    variables = {f"OPENCODE_DISABLE_{name}": "1" for name in off}
    # Without a title, a second request asks for one beside the first.
    return Agent(modules / OPENCODE, ("run", "--title", "test"), ("run", "--continue"), home, variables)
