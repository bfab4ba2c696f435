"""The names of the room, which are imported late."""

import subprocess
import sys

import pytest

from headwater import configuration


@pytest.mark.parametrize("name", configuration.__all__)
def test_every_name_is_there(name):
    assert getattr(configuration, name) is not None


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="no attribute 'Setings'"):
        _ = configuration.Setings


def test_spans_and_sizes_cost_no_pydantic():
    imports = "import sys, headwater.configuration.durations, headwater.configuration.sizes"
    code = f"{imports}; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
