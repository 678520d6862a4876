"""What not every machine has: tests that need it are skipped with the reason, unless GRADREG_REQUIRE=1 forbids that."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

REQUIRE = "GRADREG_REQUIRE"


def missing(what: str, how: str) -> NoReturn:
    """Skip a test, or fail where everything has to run.

    Args:
        what: The thing that is not here.
        how: To get it.
    """
    message = f"{what} is not here; {how}"
    if os.environ.get(REQUIRE, "") not in ("", "0"):
        pytest.fail(f"{message} ({REQUIRE} is set, so nothing may be skipped for this)", pytrace=False)
    pytest.skip(message)
