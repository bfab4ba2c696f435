"""An S3 endpoint of the tests' own: moto's server as a process, on loopback. What it holds is gone when it ends."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from server_program import PATIENCE_S, ServerProgram, free_port

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}
_numbers = itertools.count(1)


class S3Server(ServerProgram):
    def __init__(self, *, honours_conditions: bool = True) -> None:
        self.port = free_port()
        self._arguments = [str(self.port)] + ([] if honours_conditions else ["--ignore-conditions"])
        self.folder = Path(tempfile.mkdtemp(prefix="headwater-s3-"))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Self:
        if not self._run_until(self._answers, sys.executable, __file__, *self._arguments):
            raise RuntimeError(f"the S3 endpoint did not start: {self.log()}")
        return self

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            self._request("GET", "/")
            return True
        return False

    def _request(self, method: str, path: str) -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)) as connection:
            connection.request(method, path)
            answer = connection.getresponse()
            answer.read()
            if answer.status >= 300:
                raise RuntimeError(f"{method} {path}: {answer.status}")

    def new_bucket(self) -> str:
        """The url of a prefix in a bucket of its own."""
        name = f"bucket-{os.getpid()}-{next(_numbers)}"
        self._request("PUT", f"/{name}")
        return self.url_of(name)

    def url_of(self, bucket: str) -> str:
        return f"s3://{bucket}/archive?endpoint={self.endpoint}&region=us-east-1"

    @property
    def lake_environment(self) -> dict[str, str]:
        """Where a lake's tables find it: a process and its Spark have it from their environment."""
        endpoint = {"AWS_ENDPOINT_URL": self.endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
        return CREDENTIALS | endpoint

    def new_lake(self) -> str:
        """The url of a lake in a bucket of its own."""
        return f"s3://{urlsplit(self.new_bucket()).netloc}/lake"

    def pause(self) -> None:
        """It takes connections and answers nothing, as behind a broken network; what it was sent it does later."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        self.resume()
        super()._end(how)


class OneAtATime:
    """S3 looks whether an object is there and writes it in one step; moto in two, between which threads may change."""

    def __init__(self, application: Any, *, honours_conditions: bool) -> None:
        self._application = application
        self._honours_conditions = honours_conditions
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if not self._honours_conditions:  # as some stores that call themselves compatible do
            environ.pop("HTTP_IF_NONE_MATCH", None)
        with self._lock:
            return list(self._application(environ, start_response))


if __name__ == "__main__":
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import run_simple

    application = OneAtATime(
        DomainDispatcherApplication(create_backend_app), honours_conditions="--ignore-conditions" not in sys.argv
    )
    run_simple("127.0.0.1", int(sys.argv[1]), application, threaded=True, request_handler=MotoRequestHandler)
