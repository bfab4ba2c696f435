"""Run by test_untouched_application.py: an application with settings of its own imports all of Headwater, opens the
logs that are named, and tells what is no longer as it was."""

import importlib
import json
import locale
import logging
import os
import pkgutil
import signal
import sys
import threading
import warnings
from typing import Any

LIBRARIES = ("", "asyncio", "psycopg", "psycopg.pool", "websockets", "websockets.client", "redis", "py4j", "urllib3")
OWN = ("headwater", "headwater.replication.connection", "headwater.server")


def on_signal(number: int, frame: Any) -> None: ...


def state() -> dict[str, Any]:
    loggers = {
        name: (each.level, each.disabled, each.propagate, list(each.filters), list(each.handlers))
        for name in (*LIBRARIES, *OWN)
        for each in [logging.getLogger(name)]
    }
    signals = {number.name: signal.getsignal(number) for number in signal.Signals}
    return {
        **{f"logger {name!r}": each for name, each in loggers.items()},
        **signals,
        "logging.disable": logging.root.manager.disable,
        "showwarning": warnings.showwarning,
        "filters": list(warnings.filters),
        "excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "environment": dict(os.environ),
        "locale": locale.setlocale(locale.LC_ALL),
        "directory": os.getcwd(),
        "recursion": sys.getrecursionlimit(),
        "switching": sys.getswitchinterval(),
    }


def import_all() -> list[str]:
    import headwater

    left_out = []
    for module in pkgutil.walk_packages(headwater.__path__, "headwater."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError as exc:
                left_out.append(f"{module.name}: {exc}")
    return left_out


def import_libraries() -> None:
    """What these do as they are imported is not Headwater's doing."""
    for name in ("pyspark.sql", "pyarrow", "pandas", "redis", "websockets", "psycopg", "typer", "prometheus_client"):
        importlib.import_module(name)


def main() -> None:
    import_libraries()
    for name in (*LIBRARIES, *OWN):
        logging.getLogger(name).setLevel(logging.DEBUG)
    logging.getLogger().addHandler(logging.NullHandler())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, on_signal)
    warnings.filterwarnings("error", category=ResourceWarning)
    before = state()
    left_out = import_all()
    import headwater

    for target in sys.argv[1:]:
        with headwater.open(target) as log:
            log.publish("a", 1)
            with log.subscribe("s", "a") as subscription:
                subscription.fetch()
            log.topics()
    after = state()
    changed = {name: (repr(before[name]), repr(after[name])) for name in before if before[name] != after[name]}
    print(json.dumps({"changed": changed, "left_out": left_out}))


if __name__ == "__main__":
    main()
