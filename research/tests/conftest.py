"""Sets the environment of tests/ here too."""

from tests.conftest import the_run_s_environment  # noqa: F401
