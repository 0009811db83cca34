"""The script of the model for the three agents: tests/serving/scripted.py reads RULES.

A rule applies when its pattern is found in the prompt, so that an answer with a number proves that the number came
back from the agent. The first rule that fits is taken; the last turn of a conversation stands first. Without one the
model writes the user's last message.
"""

from __future__ import annotations

import json
from typing import Any

MADE = "made.txt"
FIRST, SECOND = f"ALPHA: make {MADE} and count its letters.", "OMEGA: what did you do?"
SEARCH = "SIGMA: search the web for gpt-oss."
SHELL = f"printf 'twelve bytes' > {MADE}; wc -c < {MADE}"
COUNTED = "The file has 12 bytes."
PATCHED = "I patched the file; it had 12 bytes."
PATCH = f"*** Begin Patch\n*** Update File: {MADE}\n@@\n-twelve bytes\n+patched bytes\n*** End Patch\n"
REMEMBERED = "I made a file of 12 bytes."
NOT_FOUND = "The search was refused."


def thought(text: str) -> str:
    return f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"


def call(name: str, **arguments: Any) -> str:
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return thought("I need a tool.") + head + json.dumps(arguments) + "<|call|>"


def answer(text: str) -> str:
    return f"{thought('I know it.')}<|channel|>final<|message|>{text}<|return|>"


def result(of: str, text: str, word: str = "ALPHA") -> str:
    """The pattern of a result behind a word in a prompt; no message stands between the result's header and its text."""
    return rf"{word}.*functions\.{of} to=assistant(?:(?!<\|start\|>).)*{text}"


RULES = [
    [rf"ALPHA(?=.*(?:{COUNTED}|{PATCHED})).*OMEGA", answer(REMEMBERED)],
    [r"OMEGA", answer("I remember nothing.")],
    # Codex: a shell call, then a patch of what it made
    [result("apply_patch", "Success"), answer(PATCHED)],
    [result("exec_command", r"Output:\s*12\b"), call("apply_patch", input=PATCH)],
    # Claude Code and OpenCode
    [result("(?:Bash|bash)", r"\b12\b"), answer(COUNTED)],
    [result("WebSearch", "does not run", "SIGMA"), answer(NOT_FOUND)],
    [r"type WebSearch = .*SIGMA", call("WebSearch", query="gpt-oss")],
    [r"type exec_command = .*ALPHA", call("exec_command", cmd=SHELL)],
    [r"type Bash = .*ALPHA", call("Bash", command=SHELL, description="Make a file")],
    [r"type bash = .*ALPHA", call("bash", command=SHELL, description="Make a file")],
]
