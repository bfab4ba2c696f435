"""Where the server says what it notices."""

import logging

from headwater.server.logs import LineLimit

logger = logging.getLogger("headwater.server")
logger.addFilter(LineLimit())  # also where an application sees to the logs itself
