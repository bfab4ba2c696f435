"""All measurements, side by side. `make bench`, or `python bench/run.py publishing consuming` for some of them."""

from __future__ import annotations

import sys

import consuming
import growing
import publishing
import serving
import waking
from common import describe_machine
from report import show

MEASURES = {
    "publishing": ("Publish", publishing.measure),
    "consuming": ("Consume and ack", consuming.measure),
    "growing": ("Growth", growing.measure),
    "waking": ("Wake-up", waking.measure),
    "serving": ("Through a server", serving.measure),
}


def main() -> None:
    print(describe_machine())
    for name in sys.argv[1:] or MEASURES:
        title, measure = MEASURES[name]
        show(title, measure())


if __name__ == "__main__":
    main()
