"""The console: a page for browsers that a server serves. Its files by path, with their content types."""

from __future__ import annotations

from importlib import resources

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/console/console.css": ("console.css", "text/css; charset=utf-8"),
    "/console/chart.js": ("chart.js", "text/javascript; charset=utf-8"),
    "/console/connection.js": ("connection.js", "text/javascript; charset=utf-8"),
    "/console/console.js": ("console.js", "text/javascript; charset=utf-8"),
    "/console/dead_letters.js": ("dead_letters.js", "text/javascript; charset=utf-8"),
    "/console/lake.js": ("lake.js", "text/javascript; charset=utf-8"),
    "/console/messages.js": ("messages.js", "text/javascript; charset=utf-8"),
    "/console/over_time.js": ("over_time.js", "text/javascript; charset=utf-8"),
    "/console/replicas.js": ("replicas.js", "text/javascript; charset=utf-8"),
    "/console/subscriptions.js": ("subscriptions.js", "text/javascript; charset=utf-8"),
    "/console/show.js": ("show.js", "text/javascript; charset=utf-8"),
    "/console/mark.svg": ("mark.svg", "image/svg+xml"),
}


def console_files() -> dict[str, tuple[str, bytes]]:
    here = resources.files(__name__)
    return {path: (content_type, here.joinpath(name).read_bytes()) for path, (name, content_type) in _FILES.items()}
