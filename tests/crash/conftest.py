"""Lets the tests here import the modules beside them, and gives the crash loop the time its kills take."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
A_KILL_S = 15  # at most, on a machine that has other things to do

sys.path.insert(0, str(HERE))  # pytest's importlib mode does not


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.timeout(60 + A_KILL_S * config.getoption("--kills")))
