"""`npu-gptoss doctor`: what is installed here, whether it fits, and whether it computes what gpt-oss needs.

Each check is a function that returns findings; a finding is a sentence with its remedy. This package imports the
standard library only: whatever needs torch, and whatever opens a device, runs in a process of its own (`probe.py`), so
that a broken installation, a crash or a hang becomes a finding too.
"""
