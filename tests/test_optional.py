"""What is missing is skipped with the reason, or fails where everything has to run."""

from __future__ import annotations

import pytest

from tests.browser import program
from tests.optional import REQUIRE


def test_missing_things(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(REQUIRE, raising=False)
    with pytest.raises(pytest.skip.Exception, match="Chromium is not here; install it"):
        program()
    monkeypatch.setenv(REQUIRE, "0")
    with pytest.raises(pytest.skip.Exception):
        program()
    monkeypatch.setenv(REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match=r"Chromium is not here; .*nothing may be skipped"):
        program()
