"""Certificates of a federation, and one key pair per site: what `fedlens federate init` hands out."""

import datetime as dt
import ipaddress
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat, load_ssh_public_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedlens.errors import UserError

VALID_YEARS = 2
ISSUER = "fedlens federation"


def make_certificates(folder: Path, hosts: list[str]) -> None:
    """Write ca.crt, and server.pem with server.key for these hosts. The authority signs only this certificate; its key is not stored."""
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    root = _certificate(
        ISSUER,
        authority,
        authority,
        {
            x509.BasicConstraints(True, 0): True,
            x509.KeyUsage(True, False, False, False, False, True, True, False, False): True,
            x509.SubjectKeyIdentifier.from_public_key(authority.public_key()): False,
        },
    )
    own = _certificate(
        hosts[0],
        server,
        authority,
        {
            x509.SubjectAlternativeName([_general_name(host) for host in hosts]): False,
            x509.BasicConstraints(False, None): True,
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]): False,
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()): False,
        },
    )
    _write_secret(folder / "ca.crt", root)
    _write_secret(folder / "server.pem", own)
    _write_secret(folder / "server.key", server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def make_site_key(private: Path, public: Path) -> None:
    """Write a P-384 key pair in OpenSSH format, as SuperNodes need it."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write_secret(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    _write_secret(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


def read_public_key(file: Path) -> ec.EllipticCurvePublicKey:
    """Return the public key of a site."""
    with suppress(ValueError, UnsupportedAlgorithm):
        key = load_ssh_public_key(file.read_bytes())
        if isinstance(key, ec.EllipticCurvePublicKey):
            return key
    raise UserError(f"federate server: {file} is not a public key of a site; fedlens federate join makes one.")


def _certificate(
    subject: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, extensions: dict[x509.ExtensionType, bool]
) -> bytes:
    """Return a signed certificate in PEM. `extensions`: each with whether it is critical."""
    now = dt.datetime.now(dt.UTC)
    builder = x509.CertificateBuilder(
        issuer_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, ISSUER)]),
        subject_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - dt.timedelta(hours=1),
        not_valid_after=now + dt.timedelta(days=365 * VALID_YEARS),
    )
    for extension, critical in extensions.items():
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only this user can read; never overwrite one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(content)
