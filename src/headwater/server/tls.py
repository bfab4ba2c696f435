"""The server's certificate, and the authorities of client certificates; read again when the files change."""

from __future__ import annotations

import os
import ssl
from typing import Any

from headwater.errors import InvalidConfigurationError
from headwater.server.logging import logger
from headwater.settings import ServerSettings


class Certificates(ssl.SSLContext):
    """A listener keeps the context that it started with; this one makes each connection with the newest one."""

    _settings: ServerSettings
    _newest: ssl.SSLContext
    _seen: list[tuple[int, int, int]]

    @classmethod
    def read(cls, settings: ServerSettings) -> Certificates | None:
        """Read the certificates of the settings; None without TLS."""
        if settings.tls_certificate is None:
            return None
        made = cls(ssl.PROTOCOL_TLS_SERVER)
        made._settings, made._seen, made._newest = settings, _signature(settings), _context(settings)
        return made

    def refresh(self) -> None:
        """Existing connections keep their certificate; an unusable one is ignored."""
        seen = _signature(self._settings)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._newest = _context(self._settings)
        except InvalidConfigurationError as exc:
            logger.warning("the certificate read before stays in use: %s", exc)
        else:
            logger.info("the certificate was renewed", extra={"certificate": self._settings.tls_certificate})

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self._newest.wrap_bio(*args, **options)


def _files(settings: ServerSettings) -> list[str]:
    return [path for path in (settings.tls_certificate, settings.tls_key, settings.tls_client_ca) if path is not None]


def _signature(settings: ServerSettings) -> list[tuple[int, int, int]]:
    found = []
    for path in _files(settings):
        try:
            state = os.stat(path)
            found.append((state.st_ino, state.st_size, state.st_mtime_ns))
        except OSError:
            found.append((0, 0, 0))
    return found


def _context(settings: ServerSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A password, or it would ask for one at a terminal.
        context.load_cert_chain(settings.tls_certificate or "", settings.tls_key, password="")
    except (OSError, ssl.SSLError) as exc:
        raise InvalidConfigurationError(
            f"the certificate or its key cannot be used ({exc})",
            where=settings.tls_certificate or "",
            next="Set server.tls_certificate and server.tls_key to PEM files that belong together",
        ) from exc
    if settings.tls_client_ca is not None:
        try:
            context.load_verify_locations(settings.tls_client_ca)
        except (OSError, ssl.SSLError) as exc:
            raise InvalidConfigurationError(
                f"the certificates of authorities cannot be read ({exc})",
                where=settings.tls_client_ca,
                next="Set server.tls_client_ca to a PEM file",
            ) from exc
        context.verify_mode = ssl.CERT_REQUIRED
    return context
