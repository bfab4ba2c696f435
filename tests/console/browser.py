"""A real browser without a window, driven over the Chrome DevTools protocol. Everything but this machine is cut off."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

PATIENCE_S = 30.0  # no test waits so long, unless something is wrong
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--mute-audio", "--no-first-run"),
    *("--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--remote-debugging-port=0"),
    # All pages in one process: to start another takes longer than most tests do.
    *("--renderer-process-limit=1", "--disable-site-isolation-trials"),
]


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def id_of(id: str) -> str:
    return f"document.getElementById({json.dumps(id)})"


class Browser:
    def __init__(self, program: str, profile: Path) -> None:
        only_here = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        arguments = [program, *FLAGS, only_here, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        assert self._process.stderr is not None
        output = next((line for line in self._process.stderr if "DevTools listening on ws://" in line), "")
        assert output, "the browser did not start"
        threading.Thread(target=self._process.stderr.read, daemon=True).start()  # or it blocks when the pipe is full
        url = output.split()[-1]
        self._socket = ExitStack()
        connection = connect(url, max_size=None, proxy=None, ping_interval=None)  # it is read only while we ask
        self._wire = Wire(self._socket.enter_context(connection))

    def open(self, url: str) -> Page:
        target = self._wire.call("Target.createTarget", url="about:blank")["targetId"]
        session = self._wire.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self._wire, session, target, url)

    def close(self) -> None:
        self._wire.call("Browser.close")
        self._process.wait(PATIENCE_S)
        self._socket.close()


class LeftError(Exception):
    """The page was left before the expression had a value."""


class Wire:
    """Commands and their answers; events in between are kept."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        id = next(self._ids)
        command = {"id": id, "method": method, "params": params} | ({"sessionId": session} if session else {})
        self._socket.send(json.dumps(command))
        while (answer := json.loads(self._socket.recv(PATIENCE_S))).get("id") != id:
            self.events.append(answer)
        if "error" in answer:
            raise LeftError(answer) if "navigated" in answer["error"]["message"] else AssertionError(answer)
        result: dict[str, Any] = answer["result"]
        return result


class Page:
    def __init__(self, wire: Wire, session: str, target: str, url: str) -> None:
        self._wire, self._session, self._target = wire, session, target
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")
        self.command("Page.navigate", url=url)

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        return self._wire.call(method, self._session, **params)

    def evaluate(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        done = self.command(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression is true in the page; looked at again whenever the page may have changed."""
        look = f"(() => {{ try {{ return ({condition}); }} catch {{ return false; }} }})()"
        promise = f"""new Promise((resolve) => {{
          const give_up = performance.now() + {PATIENCE_S * 800};
          const look = () => {{
            const value = {look};
            if (value || performance.now() > give_up) resolve(Boolean(value));
            else setTimeout(look, 10);
          }};
          look();
        }})"""
        try:
            came_true = self.evaluate(promise)
        except LeftError:  # for the page that it is to be true in
            came_true = self.evaluate(promise)
        assert came_true, f"never came true: {condition}; the page says:\n{self.evaluate('document.body?.innerText')}"

    def fill(self, id: str, text: str) -> None:
        """Replace what is in a field, as typing does."""
        self.evaluate(f"{id_of(id)}.focus(), {id_of(id)}.select()")
        self.command("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    def events(self, *methods: str) -> list[dict[str, Any]]:
        self.evaluate("0")  # what was sent before this answer has been read
        reported = [event for event in self._wire.events if event.get("sessionId") == self._session]
        return [event["params"] for event in reported if event["method"] in methods]

    def problems(self) -> list[Any]:
        """Uncaught exceptions, errors on the browser's console, and what the security policy forbade."""
        logged = [event["entry"] for event in self.events("Log.entryAdded") if event["entry"]["level"] == "error"]
        return [*self.events("Runtime.exceptionThrown"), *logged]

    def close(self) -> None:
        self._wire.call("Target.closeTarget", targetId=self._target)
