"""The TLS options of a server, checked before its engine starts."""

from __future__ import annotations

import ssl
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from npu_gptoss.errors import InputError, quoted
from npu_gptoss.serving.compat.patch import Original, around, repair
from npu_gptoss.serving.compat.targets import ALL, SERVE

CERTIFICATE, KEY, AUTHORITIES = "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs"


@repair("tls-files", f"{SERVE}:validate_parsed_serve_args", releases=ALL, until="vLLM reads them before its engine")
def install(serve: ModuleType) -> None:
    """A wrong TLS file or option ends the server only after the model is loaded; --ssl-ca-certs alone is passed over,
    and the server speaks plain HTTP."""

    @around(serve, "validate_parsed_serve_args")
    def validate_parsed_serve_args(original: Original, args: Any) -> None:
        original(args)
        ciphers = getattr(args, "ssl_ciphers", None)  # which 0.11 has not
        check(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs, ciphers, args.ssl_cert_reqs)


def check(
    certificate: str | None, key: str | None, authorities: str | None, ciphers: str | None, requires: int
) -> None:
    """Raises InputError for what uvicorn's TLS context will not take (`uvicorn.config.create_ssl_context`)."""
    if not certificate:
        for option, value in ((KEY, key), (AUTHORITIES, authorities)):
            if value:
                _refuse(CERTIFICATE, f"{option} needs it: without a certificate the server speaks plain HTTP")
        return
    for option, name in ((CERTIFICATE, certificate), (KEY, key), (AUTHORITIES, authorities)):
        try:
            if name:
                Path(name).open("rb").close()
        except OSError as error:
            _refuse(option, f"{quoted(name)} cannot be read: {error.strerror}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    of_key = f"{quoted(key or certificate)} is not the unencrypted PEM key of the certificate in {quoted(certificate)}"
    try:
        context.load_cert_chain(certificate, key, password=b"")  # without it OpenSSL would ask a terminal for one
    except ssl.SSLError as error:
        _refuse(KEY if key else CERTIFICATE, f"{of_key} ({error.reason or 'an encrypted key'})")
    try:
        context.load_verify_locations(authorities) if authorities else None
    except ssl.SSLError as error:
        _refuse(AUTHORITIES, f"{quoted(authorities)} has no PEM certificates ({error.reason})")
    try:
        context.set_ciphers(ciphers) if ciphers else None
    except ssl.SSLError:
        _refuse("--ssl-ciphers", f"OpenSSL knows no cipher of {quoted(ciphers)}")
    if requires not in set(ssl.VerifyMode):
        _refuse("--ssl-cert-reqs", f"must be 0 (none), 1 (optional) or 2 (required), got {requires}")


def _refuse(option: str, why: str) -> NoReturn:
    raise InputError(f"{option}: {why}. Correct it, or leave out all --ssl options for plain HTTP.", field=option)
