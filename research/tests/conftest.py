"""The environment of tests/ and the tiny engine of tests/bench, for this folder too."""

from tests.bench.conftest import directory, engine  # noqa: F401
from tests.conftest import the_run_s_environment  # noqa: F401
