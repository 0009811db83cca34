"""One thread for all tests and for the processes that they start.

Waiting OpenMP threads spin: two processes with two threads each made the tests of the server twelve times slower on two
cores.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once
