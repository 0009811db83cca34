"""`npu-gptoss doctor` checks a machine: installed packages, their versions, and gpt-oss's arithmetic.

Each check is a function that returns findings; a finding is a sentence with its remedy. This package imports the
standard library only. Checks that need torch or open a device run in a separate process (`probe.py`), so that a broken
installation, a crash or a hang becomes a finding too.
"""
