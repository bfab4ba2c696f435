"""A client for one prefix of an object store, with the operations that an archive needs. Translates foreign errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import LocalStore, ObjectStore, S3Store

from headwater.arguments import check_whole
from headwater.errors import CorruptError, InvalidOptionError, TransportFailedError
from headwater.formats import span_ms, split_url
from headwater.transports.base import read_options
from headwater.transports.object_manifest import LIST_PAGE

CONNECT_TIMEOUT_S = 5
REQUEST_TIMEOUT_S = 30.0
TIMEOUT_MS_MIN = 100
TIMEOUT_MS_MAX = 600_000
RETRIES = 3
RETRIES_MAX = 20
RETRY_WITHIN_S = 60
BACKOFF_FIRST_MS = 100
BACKOFF_MAX_MS = 2_000
DELETE_PAGE = 1_000
DETAIL_CHARS_MAX = 200

_T = TypeVar("_T")
_FOREIGN = (BaseError, OSError, ValueError)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_URL = re.compile(r"https?://\S+")
_STATUS = re.compile(r"status code: (\d{3})")
_METADATA_SERVICE = "169.254.169.254"  # the client asks it for a role if the environment has no credentials
_CODE = re.compile(r"<Code>(\w+)</Code>")


class StoredObject(NamedTuple):
    data: bytes
    modified_ms: int


class ListedObject(NamedTuple):
    path: str
    size: int
    modified_ms: int


class ObjectClient:
    """Paths are relative to the prefix."""

    def __init__(self, store: ObjectStore, name: str, *, ordered: bool) -> None:
        self.name = name
        self.answers = False
        """Whether the last operation succeeded."""
        self._store = store
        self._ordered = ordered  # S3 lists in order of names, a directory in any order

    @classmethod
    def from_url(cls, url: str, **options: Any) -> ObjectClient:
        """The options of `open_objects`, which may stand in the url's query as well."""
        rest, read = read_options(open_objects, url, options)
        return open_objects(rest, **read)

    def create(self, path: str, data: bytes) -> bool:
        """False if there is one of that name, which stays as it is."""

        def put() -> bool:
            try:
                obstore.put(self._store, path, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

        return self._asked("writing", path, put)

    def get(self, path: str, bytes_max: int) -> StoredObject | None:
        def read() -> StoredObject | None:
            try:
                found = obstore.get(self._store, path)
            except FileNotFoundError as exc:
                if "NoSuchBucket" in str(exc):
                    raise
                return None
            if found.meta["size"] > bytes_max:
                raise CorruptError(f"{found.meta['size']} bytes, where {bytes_max} is the limit", where=self.at(path))
            return StoredObject(bytes(found.bytes()), _ms(found.meta["last_modified"]))

        return self._asked("reading", path, read)

    def page(self, directory: str, after: str) -> list[str]:
        """The first LIST_PAGE names in a directory that come after one, in order."""

        def read() -> list[str]:
            listing = obstore.list(self._store, directory, offset=after, chunk_size=LIST_PAGE)
            if not self._ordered:
                return sorted(each["path"] for each in listing.collect())[:LIST_PAGE]
            return [each["path"] for each in next(listing, [])]

        return self._asked("listing", directory, read)

    def everything(self) -> Iterator[ListedObject]:
        listing = iter(obstore.list(self._store, chunk_size=LIST_PAGE))
        while chunk := self._asked("listing", "", lambda: next(listing, None)):
            yield from (ListedObject(each["path"], each["size"], _ms(each["last_modified"])) for each in chunk)

    def delete(self, paths: Sequence[str]) -> None:
        for at in range(0, len(paths), DELETE_PAGE):
            some = list(paths[at : at + DELETE_PAGE])
            self._asked("removing", some[0], partial(obstore.delete, self._store, some))

    def at(self, path: str) -> str:
        """Which object an error is about."""
        return f"{self.name}: {path}" if path else self.name

    def _asked(self, doing: str, path: str, ask: Callable[[], _T]) -> _T:
        try:
            answer = ask()
        except _FOREIGN as exc:
            self.answers = False
            why, advice = _explained(exc)
            what = f"{doing} {path}" if path else doing
            raise TransportFailedError(f"{what} failed: {why}", where=self.name, next=advice) from exc
        self.answers = True
        return answer


def _ms(modified: datetime) -> int:
    return round(modified.timestamp() * 1000)


def _explained(exc: BaseException) -> tuple[str, str]:
    """Why and what next. The text of the error is long, and may hold an address with a token in it."""
    text = str(exc)
    code, status = _CODE.search(text), _STATUS.search(text)
    reply = code.group(1) if code else f"HTTP status {status.group(1)}" if status else ""
    if isinstance(exc, (PermissionDeniedError, UnauthenticatedError)) or reply in (
        "HTTP status 401",
        "HTTP status 403",
    ):
        return f"the store refuses ({reply or 'permission denied'})", _CHECK_CREDENTIALS
    if "Missing AccessKeyId" in text or "Missing SecretAccessKey" in text or _METADATA_SERVICE in text:
        return "there are no whole credentials in the environment", _CHECK_CREDENTIALS
    if "NoSuchBucket" in text or isinstance(exc, FileNotFoundError):
        return f"there is no such bucket or directory ({reply or 'not found'})", "Create it, or correct the url"
    if isinstance(exc, NotSupportedError) or reply in ("NotImplemented", "HTTP status 501"):
        return f"the store cannot do this ({reply or 'not supported'})", CONDITIONS_NEEDED
    first = _URL.sub("…", text.partition("\n")[0])[:DETAIL_CHARS_MAX]
    return reply or first or type(exc).__name__, "Check that the endpoint is right and answers"


_CHECK_CREDENTIALS = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role that may read, write and list"
CONDITIONS_NEEDED = "Use a store that honours If-None-Match when it writes (Amazon S3, and current MinIO, Ceph or R2)"


def open_objects(
    url: str,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    timeout: float = REQUEST_TIMEOUT_S,
    retries: int = RETRIES,
) -> ObjectClient:
    """`s3://bucket/prefix` or `objects+file:///directory`, which has no options. Connects at the first operation.
    Credentials come from the environment."""
    parts = split_url(url)
    if parts.username is not None or parts.password is not None:
        raise InvalidOptionError(
            "credentials do not belong in a url", where=f"{parts.scheme}://…", next=_CHECK_CREDENTIALS
        )
    path = unquote(parts.path)
    if parts.scheme == "s3":
        return _open_bucket(parts.netloc, path.strip("/"), endpoint, region, timeout, retries)
    if parts.scheme != "objects+file":
        raise InvalidOptionError(
            f"{parts.scheme!r} is no object store", next="Use s3://bucket/prefix or objects+file:///directory"
        )
    if parts.netloc or not path.strip("/"):
        raise InvalidOptionError(
            "the directory must be an absolute path", next="Use objects+file:///absolute/directory"
        )
    name = f"objects+file://{path}"
    if endpoint or region or timeout != REQUEST_TIMEOUT_S or retries != RETRIES:
        raise InvalidOptionError("endpoint, region, timeout and retries are options of s3://", where=name)
    try:
        store = LocalStore(Path(path), mkdir=True)
    except _FOREIGN as exc:
        raise TransportFailedError(f"the directory cannot be made: {_explained(exc)[0]}", where=name) from exc
    return ObjectClient(store, name, ordered=False)


def _open_bucket(
    bucket: str, prefix: str, endpoint: str | None, region: str | None, timeout: float, retries: int
) -> ObjectClient:
    if not _BUCKET.fullmatch(bucket):
        raise InvalidOptionError(f"{bucket!r} is no name of a bucket", next="Use s3://bucket/prefix")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise InvalidOptionError(f"{prefix!r} is no prefix: a part of it is empty or dots", where=f"s3://{bucket}")
    name = f"s3://{bucket}/{prefix}".rstrip("/")
    config: dict[str, Any] = {"region": region} if region else {}
    if endpoint:
        where = urlsplit(endpoint)
        if where.scheme not in ("http", "https") or not where.hostname or where.username is not None:
            raise InvalidOptionError("endpoint must be http(s)://host:port, without credentials", where=name)
        config["endpoint"] = endpoint.rstrip("/")
        name += f"?endpoint={where.scheme}://{where.netloc}"
    if not TIMEOUT_MS_MIN <= span_ms(timeout, "timeout") <= TIMEOUT_MS_MAX:
        raise InvalidOptionError(f"timeout must be between 0.1 and 600 seconds, not {timeout!r}")
    check_whole("retries", retries, 0, RETRIES_MAX)
    try:
        store = S3Store(
            bucket,
            prefix=prefix or None,
            config=config,  # type: ignore[arg-type]
            client_options={
                "allow_http": config.get("endpoint", "").startswith("http://"),
                "connect_timeout": timedelta(seconds=min(timeout, CONNECT_TIMEOUT_S)),
                "timeout": timedelta(seconds=timeout),
            },
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=RETRY_WITHIN_S),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=BACKOFF_FIRST_MS),
                    "max_backoff": timedelta(milliseconds=BACKOFF_MAX_MS),
                    "base": 2,
                },
            },
        )
    except _FOREIGN as exc:
        why, advice = _explained(exc)
        raise TransportFailedError(f"it cannot be opened: {why}", where=name, next=advice) from exc
    return ObjectClient(store, name, ordered=True)
