"""Under --import-mode=importlib a test cannot import its neighbour (`frames`) unless the directory is on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
