"""The certificates of a cluster's processes: issued in memory from the cluster's secret,
or read from an operator's files.

Every process derives the same authority from the secret, so that whoever has the secret can prove it and can check
others, and nobody else can do either (ADR 0021). A process's own key is drawn at its start and never leaves its memory.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.errors import ConfigError
from baton.keyed_hash import derive_key
from baton.rpc.identity import PeerRole, ProcessIdentity

_SECRET_BYTES = 32
_CURVE = ec.SECP256R1()
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_CONTEXT = "baton 2026 cluster certificate authority"

# A certificate from the secret is valid as long as the secret is: a process whose clock is wrong belongs to the cluster
# all the same, and one that runs for years need not renew anything.
_FROM = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """What one process shows and what it checks others by, as PEM.

    Attributes:
        authority: Certificates of other processes are signed by this one.
        chain: The process's own certificate, and those between it and the authority.
        key: Its private key.
    """

    authority: bytes
    chain: bytes
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFiles:
    """Where an operator's certificates lie; each file is PEM."""

    certificate: Path
    key: Path
    authority: Path


def issue(secret: bytes, identity: ProcessIdentity) -> Certificates:
    """New certificates for a process of the cluster that has `secret`.

    Raises:
        ConfigError: The secret has not 32 bytes, such as none.
    """
    if len(secret) != _SECRET_BYTES:
        raise ConfigError("cluster.secret is not set", param="cluster.secret")
    signer = _authority_key(secret)
    authority = _authority(signer)
    key = ec.generate_private_key(_CURVE)
    names = [
        x509.DNSName(identity.role.host_name),
        x509.UniformResourceIdentifier(identity.uri),
    ]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    own = (
        _builder(key.public_key(), x509.Name([]), authority.subject, x509.random_serial_number())
        .add_extension(x509.SubjectAlternativeName(names), critical=True)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return Certificates(
        authority=authority.public_bytes(serialization.Encoding.PEM),
        chain=own.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def read(files: CertificateFiles, role: PeerRole) -> Certificates:
    """The certificates in `files`, which are those of a process with this role.

    Raises:
        ConfigError: A file cannot be read or does not fit the others; `param` names its setting.
    """
    authority = _read(files.authority, "cluster.tls_authority")
    chain = _read(files.certificate, "cluster.tls_certificate")
    key = _read(files.key, "cluster.tls_key")
    own, *between = _parsed(chain, files.certificate, "cluster.tls_certificate")
    issuers = [*between, *_parsed(authority, files.authority, "cluster.tls_authority")]
    _check_key(key, own, files.key)
    fault = _fault(own, issuers, role)
    if fault is not None:
        raise _wrong("cluster.tls_certificate", files.certificate, fault)
    return Certificates(authority=authority, chain=chain, key=key)


def _authority_key(secret: bytes) -> ec.EllipticCurvePrivateKey:
    # 128 bits more than the order has, so that the remainder is uniform but for one part in 2**128.
    drawn = derive_key(secret, _CONTEXT, 48)
    return ec.derive_private_key(int.from_bytes(drawn, "big") % (_ORDER - 1) + 1, _CURVE)


def _authority(signer: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    public = signer.public_key()
    cluster = x509.SubjectKeyIdentifier.from_public_key(public).digest.hex()[:16]
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"baton cluster {cluster}")])
    return (
        _builder(public, name, name, 1)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(signer, hashes.SHA256())
    )


def _builder(
    public: ec.EllipticCurvePublicKey, subject: x509.Name, issuer: x509.Name, serial: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(serial)
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
    )


def _read(file: Path, param: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _wrong(param, file, (error.strerror or str(error)).lower()) from error


def _parsed(pem: bytes, file: Path, param: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise _wrong(param, file, "holds no certificate in PEM") from error


def _check_key(pem: bytes, own: x509.Certificate, file: Path) -> None:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (TypeError, ValueError) as error:
        raise _wrong(
            "cluster.tls_key", file, "holds no private key in PEM, or an encrypted one"
        ) from error
    if key.public_key() != own.public_key():
        raise _wrong("cluster.tls_key", file, "is not the key of cluster.tls_certificate")


def _fault(
    own: x509.Certificate, issuers: Sequence[x509.Certificate], role: PeerRole
) -> str | None:
    """Why peers would refuse the certificate `own` of a process with this role; None if they would not."""
    now = datetime.datetime.now(datetime.UTC)
    if not own.not_valid_before_utc <= now <= own.not_valid_after_utc:
        return f"is valid from {own.not_valid_before_utc} to {own.not_valid_after_utc} only"
    if not any(_signed_by(own, issuer) for issuer in issuers):
        return "is not signed by cluster.tls_authority"
    try:
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return "has no subject alternative names"
    if role.host_name not in names.get_values_for_type(x509.DNSName):
        return f"lacks the DNS name {role.host_name}"
    named = map(ProcessIdentity.from_uri, names.get_values_for_type(x509.UniformResourceIdentifier))
    if not any(one is not None and one.role is role for one in named):
        return f"lacks a URI baton://{role.value}/NAME"
    return None


def _signed_by(own: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        own.verify_directly_issued_by(issuer)
    except (InvalidSignature, TypeError, ValueError):
        return False
    return True


def _wrong(param: str, file: Path, what: str) -> ConfigError:
    return ConfigError(f"{param}: {file} {what}", param=param)
