"""uv in pip's place: a quarter of the time, and a file that several environments have stands on the disk once.

pip fetches uv itself, by its hash, and stays what a user configures: uv is told what `pip config list` says. Where that
says something uv cannot be told, where uv cannot be had, or where it fails, pip does the same work.
"""

from __future__ import annotations

import ast

# how an installation with uv begins; behind it the environment's Python, and what pip would be told
INSTALL = ("pip", "install", "--no-progress", "--link-mode", "hardlink", "--python")
# a setting of pip -> uv's variable for it, and what stands between several values (pip: white space)
VARIABLES = {
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}
# of pip alone: they change nothing of what is installed into an environment
OF_PIP_ALONE = {
    *("break-system-packages", "cache-dir", "config-file", "disable-pip-version-check", "no-cache-dir", "no-color"),
    *("no-compile", "no-input", "progress-bar", "quiet", "require-virtualenv", "retries", "root-user-action"),
    *("user", "verbose"),
}
# prints pip's configuration, and behind it the index that pip asks where none is configured
ASK_PIP = """
import subprocess, sys
subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True)
from pip._internal.models.index import PyPI
print(f"usual.index-url={PyPI.simple_url!r}")
"""
SECTIONS = ("usual", "global", "install", ":env:")  # the later one counts


def variables_for(pip_says: str) -> dict[str, str] | None:
    """uv's variables from what ASK_PIP prints; None where pip has a setting that uv has not."""
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in pip_says.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in found:
            found[section][name] = ast.literal_eval(value)
    settings = {name: value for section in SECTIONS for name, value in found[section].items()}
    index = settings.pop("index-url", "")
    if not index or settings.keys() - VARIABLES.keys() - OF_PIP_ALONE:
        return None
    # pip looks at the files of all its indexes; uv at those of the first that has the version, so the fullest is first
    settings["extra-index-url"] = f"{index} {settings.get('extra-index-url', '')}"
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_DEFAULT_INDEX": index, "UV_NO_CONFIG": "1"}
    for name, (variable, between) in VARIABLES.items():
        if name in settings:
            variables[variable] = between.join(settings[name].split())
    return variables
