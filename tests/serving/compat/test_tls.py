"""Wrong TLS files end a server before its engine starts."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from npu_gptoss.errors import InputError
from npu_gptoss.serving.compat.start.tls import check

x509 = pytest.importorskip("cryptography.x509")
NAME = "cert.pem", "key.pem"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a certificate, its key, another key, the first one encrypted, both in one file, and a text."""
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    path = tmp_path_factory.mktemp("tls")
    key, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    begin = datetime.datetime(2026, 1, 1)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(begin).not_valid_after(begin + datetime.timedelta(1))
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8

    def written(name: str, key: ec.EllipticCurvePrivateKey, password: bytes = b"") -> bytes:
        how = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        (path / name).write_bytes(made := key.private_bytes(pem, form, how))
        return made

    certificate = builder.sign(key, hashes.SHA256()).public_bytes(pem)
    (path / "cert.pem").write_bytes(certificate)
    (path / "both.pem").write_bytes(certificate + written("key.pem", key))
    written("other.pem", other)
    written("encrypted.pem", key, b"secret")
    (path / "text.pem").write_text("no certificate\n")
    return path


def checked(folder: Path, *names: str | None, ciphers: str | None = None, requires: int = 0) -> None:
    """names: of certificate, key and authorities."""
    paths = [str(folder / name) if name else None for name in (*names, None, None, None)[:3]]
    check(*paths, ciphers, requires)


@pytest.mark.parametrize(
    "names",
    [(), ("both.pem",), ("cert.pem", "key.pem"), ("cert.pem", "key.pem", "cert.pem")],
)
def test_files_that_tls_takes_pass(folder, names):
    checked(folder, *names, ciphers="ECDHE+AESGCM" if names else None, requires=2)


@pytest.mark.parametrize(
    ("names", "more", "field"),
    [
        ((None, "key.pem"), {}, "--ssl-certfile"),
        ((None, None, "cert.pem"), {}, "--ssl-certfile"),
        (("missing.pem", "key.pem"), {}, "--ssl-certfile"),
        (("cert.pem", "missing.pem"), {}, "--ssl-keyfile"),
        (("cert.pem", "."), {}, "--ssl-keyfile"),
        (("cert.pem", "other.pem"), {}, "--ssl-keyfile"),
        (("cert.pem", "encrypted.pem"), {}, "--ssl-keyfile"),
        (("cert.pem", "text.pem"), {}, "--ssl-keyfile"),
        (("cert.pem",), {}, "--ssl-certfile"),
        (("text.pem", "key.pem"), {}, "--ssl-keyfile"),
        (("cert.pem", "key.pem", "missing.pem"), {}, "--ssl-ca-certs"),
        (("cert.pem", "key.pem", "text.pem"), {}, "--ssl-ca-certs"),
        (("cert.pem", "key.pem"), {"ciphers": "NO-SUCH-CIPHER"}, "--ssl-ciphers"),
        (("cert.pem", "key.pem"), {"requires": 3}, "--ssl-cert-reqs"),
    ],
)
def test_wrong_ones_are_refused_with_their_option(folder, names, more, field):
    with pytest.raises(InputError) as refused:
        checked(folder, *names, **more)
    assert refused.value.field == field
