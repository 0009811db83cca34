"""The fixtures and the environment of tests/, for this folder too."""

from tests.conftest import the_run_s_environment  # noqa: F401
