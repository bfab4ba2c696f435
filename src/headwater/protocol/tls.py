"""TLS of a client: which servers it trusts, and the certificate that it shows to those that ask for one."""

from __future__ import annotations

import os
import ssl

from headwater.errors import InvalidOption

CERTIFICATE_VARIABLE = "HEADWATER_CERTIFICATE"


def client_context(
    ca: str | os.PathLike[str] | None, certificate: str | os.PathLike[str] | None = None
) -> ssl.SSLContext:
    """`ca`: a PEM file, instead of what the system trusts. `certificate`: a PEM file with certificate and key; the
    environment's HEADWATER_CERTIFICATE if not given."""
    certificate = certificate or os.environ.get(CERTIFICATE_VARIABLE) or None
    try:
        context = ssl.create_default_context(cafile=None if ca is None else os.fspath(ca))
    except (OSError, ssl.SSLError) as exc:
        raise InvalidOption(f"the certificates cannot be read ({exc})", where=str(ca)) from exc
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, password="")
        except (OSError, ssl.SSLError) as exc:
            raise InvalidOption(
                f"the certificate or its key cannot be used ({exc})",
                where=os.fspath(certificate),
                next="Name a PEM file that holds both",
            ) from exc
    return context
