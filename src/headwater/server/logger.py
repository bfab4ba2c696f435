"""Where the server says what it notices."""

import logging

logger = logging.getLogger("headwater.server")
