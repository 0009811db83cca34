"""vLLM 0.33 on a CPU: its server, engine and scheduler as they are on a GPU, in their own processes, with this
package's repairs; only the worker is ours (`worker.py`).

vLLM 0.33 has no build for CPUs that computes. A platform plugin, which vLLM finds in ENTRY, gives it one. So what
happens between processes (signals, deaths, the heartbeat, restarts, grammars, preemption) is tested without a GPU.
"""

from __future__ import annotations

from pathlib import Path

PYTHON = Path(__file__).resolve().parents[3] / ".venv-vllm033/bin/python"
ENTRY = Path(__file__).parent / "entry"  # goes on PYTHONPATH


def platform() -> str:
    """The entry point."""
    return "tests.serving.on_cpu.platform.WithoutGpu"
