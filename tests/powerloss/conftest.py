"""Lets the tests here import the modules beside them, and gives them the time their cuts take."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOME_CUTS_S, EVERY_CUT_S = 300, 3 * 3600

sys.path.insert(0, str(HERE))  # pytest's importlib mode does not


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.timeout(EVERY_CUT_S if config.getoption("--every-cut") else SOME_CUTS_S))
