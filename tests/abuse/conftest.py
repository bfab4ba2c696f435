"""Attacks on a server: each one with a victim whose latency is measured, one at a time."""

from __future__ import annotations

import sys
from pathlib import Path

# Under --import-mode=importlib a test cannot import its neighbour unless the directory is on the path.
sys.path.insert(0, str(Path(__file__).parent))
