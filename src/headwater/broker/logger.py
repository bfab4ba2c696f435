"""Where the library speaks: the standard logger `headwater`, silent until the application configures logging."""

from __future__ import annotations

import logging

logger = logging.getLogger("headwater")
