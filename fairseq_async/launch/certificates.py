"""``fairseq-async certificates``: makes a small certificate authority, and certificates for a run's server and
workers."""

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fairseq_async.errors import ConfigurationError
from fairseq_async.exchange.tls import AUTHORITY, SERVER, WORKER
from fairseq_async.options.addresses import LOOPBACK

_DAYS, _AUTHORITYS_DAYS = 365, 3650
_EARLIER = datetime.timedelta(hours=1)  # validity begins so much earlier: clocks of other machines may be behind
_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*")
_LONGEST = 253  # characters of a name in the DNS
_NEAR = (LOOPBACK, "localhost")  # where the server's own machine reaches it
_Signer = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def make(directory: Path, hosts: Sequence[str], days: int = _DAYS) -> list[str]:
    """Writes the certificates of a server at these hosts and of its workers, and an authority if there is none yet.

    Private keys have mode 0600. Returns lines that say where the files belong.

    Args:
        hosts: names and addresses at which workers reach the server.
        days: number of days for which the certificates are valid.

    Raises:
        ConfigurationError: a host is neither a name nor an address, or the files cannot be written.
    """
    names = [_name(host) for host in dict.fromkeys([*hosts, *_NEAR])]
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        signer = _authority(directory)
        for own, usage, alternatives in (
            (SERVER, ExtendedKeyUsageOID.SERVER_AUTH, names),
            (WORKER, ExtendedKeyUsageOID.CLIENT_AUTH, []),
        ):
            _write_pair(directory, own, *_certificate(own, usage, alternatives, signer, days))
    except OSError as error:
        raise ConfigurationError(f"{directory}: cannot be written: {error}") from error
    return [
        f"{directory}: certificates of a server at {', '.join(hosts)}, for {days} days",
        f"the server's machine needs {AUTHORITY}.pem and the files {SERVER}.* and {WORKER}.*",
        f"the other machines need {AUTHORITY}.pem and the files {WORKER}.*, in a directory for --tls",
        f"{AUTHORITY}.key makes more certificates: no machine needs it, keep it to yourself",
    ]


def _name(host: str) -> x509.GeneralName:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        if address.version != 4:
            raise ConfigurationError(f"HOST {host}: servers listen at IPv4 addresses alone, as 10.0.0.1")
        return x509.IPAddress(address)
    if not _NAME.fullmatch(host) or len(host) > _LONGEST:
        raise ConfigurationError(f"HOST {host}: neither a name of a machine nor an address, as node1 or 10.0.0.1")
    return x509.DNSName(host)


def _authority(directory: Path) -> _Signer:
    certificate_path, key_path = directory / f"{AUTHORITY}.pem", directory / f"{AUTHORITY}.key"
    if certificate_path.exists():
        try:
            key = serialization.load_pem_private_key(key_path.read_bytes(), None)
            if not isinstance(key, ec.EllipticCurvePrivateKey):
                raise ValueError("it is of another kind")
            return x509.load_pem_x509_certificate(certificate_path.read_bytes()), key
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(
                f"{directory}: there is an authority without a key that can be read ({error}); go where "
                f"{AUTHORITY}.key is, or name another directory"
            ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder("fairseq-async authority", key.public_key(), _AUTHORITYS_DAYS)
    builder = builder.issuer_name(_subject("fairseq-async authority"))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    certificate = builder.sign(key, hashes.SHA256())
    _write_pair(directory, AUTHORITY, certificate, key)
    return certificate, key


def _certificate(
    own: str, usage: x509.ObjectIdentifier, names: Sequence[x509.GeneralName], signer: _Signer, days: int
) -> _Signer:
    issuer, issuers_key = signer
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(f"fairseq-async {own}", key.public_key(), days).issuer_name(issuer.subject)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuers_key.public_key())
    builder = builder.add_extension(identifier, critical=False)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuers_key, hashes.SHA256()), key


def _builder(name: str, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    end = now + datetime.timedelta(days=days)
    builder = x509.CertificateBuilder().subject_name(_subject(name)).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(min(now, end) - _EARLIER).not_valid_after(end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _write_pair(directory: Path, own: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    """Writes a certificate and its key, the key first: a certificate without its key is of no use."""
    pem, pkcs8, none = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    _write(directory / f"{own}.key", key.private_bytes(pem, pkcs8, none), 0o600)
    _write(directory / f"{own}.pem", certificate.public_bytes(pem), 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Writes a new file with this mode, in place of any file of this name."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
