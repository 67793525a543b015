"""Contracts of images that are fetched: only from listed hosts, and within limits of size, type and time."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from serve_app.images import fetch
from serve_app.images.fetch import Fetcher
from serve_app.images.refusal import ImageRefused
from tests.support.image_files import Given, ImageServer, image_file, image_server, make_image

pytestmark = pytest.mark.anyio

FILE = image_file(make_image(1, 20, 20))
PNG = {"Content-Type": "image/png"}
PATHS = {
    "/a.png": Given(FILE),
    "/a.png?b=c": Given(FILE + b"!"),
    "/chunked": Given(FILE, chunked=True),
    "/charset": Given(FILE, headers={"Content-Type": "IMAGE/PNG; charset=binary"}),
    "/moved": Given(status=302, headers={"Location": "http://127.0.0.1:1/"}),
    "/text": Given(b"hello", headers={"Content-Type": "text/html"}),
    "/nothing": Given(b"hello", headers={}),
    "/large": Given(b"x" * 5000),
    "/says-large": Given(b"x", headers=PNG | {"Content-Length": "5000"}),
    "/large-chunk": Given(b"x" * 5000, chunked=True),
    "/slow": Given(FILE, stalls=True),
    "/short": Given(b"x", headers=PNG | {"Content-Length": "900"}),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ImageServer]:
    with image_server(PATHS) as found:
        yield found


def fetcher(*hosts: str, **changes: Any) -> Fetcher:
    return Fetcher(hosts, **{"max_bytes": 4000, "timeout_s": 10.0} | changes)


@pytest.mark.parametrize("path", ["/a.png", "/chunked", "/charset"])
async def test_a_listed_host_is_asked(server: ImageServer, path: str) -> None:
    assert await fetcher(server.host).fetch(server.url(path)) == FILE


async def test_the_query_is_part_of_what_is_asked(server: ImageServer) -> None:
    assert await fetcher(server.host).fetch(server.url("/a.png?b=c#d")) == FILE + b"!"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/moved", r"a redirect \(302\), and none is followed"),
        ("/text", "its type is text/html, and supported are image/png"),
        ("/nothing", "its type is not given"),
        ("/large", r"at most 4000 are read \(images.max_bytes\)"),
        ("/says-large", "it has 5000 bytes or more"),
        ("/large-chunk", "at most 4000 are read"),
        ("/absent", "answered with status 404"),
        ("/short", "did not answer"),
        ("/a b", "characters that must be escaped"),
        ("/a\r\nHost: b", "characters that must be escaped|URL is not valid"),
    ],
)
async def test_what_is_no_image_of_the_right_size_is_refused(server: ImageServer, path: str, told: str) -> None:
    with pytest.raises(ImageRefused, match=told):
        await fetcher(server.host).fetch(server.url(path))


async def test_a_server_that_takes_too_long_is_not_waited_for(server: ImageServer) -> None:
    with pytest.raises(ImageRefused, match=r"longer than 0.2 s \(images.fetch_timeout_s\)"):
        await fetcher(server.host, timeout_s=0.2).fetch(server.url("/slow"))


async def test_a_host_that_is_not_listed_is_never_asked(server: ImageServer) -> None:
    before = list(server.asked)
    for hosts in ((), ("127.0.0.1",), ("127.0.0.1:1",), ("example.com",), ("*",), ("",)):
        with pytest.raises(ImageRefused, match=rf"'127.0.0.1' at port {server.port} is not listed in images.allowed"):
            await fetcher(*hosts).fetch(server.url("/a.png"))
    for url in (f"http://127.0.0.1:{server.port}@example.com/", "http:///a.png", "http://[::1/", "https://a:99999/"):
        with pytest.raises(ImageRefused):
            await fetcher(server.host).fetch(url)
    assert server.asked == before


async def test_a_listed_name_that_leads_to_a_private_address_is_refused_unless_the_address_is_listed(
    server: ImageServer,
) -> None:
    """The owner of a name may point it anywhere, such as to a server that only this machine is meant to reach."""
    name = f"localhost:{server.port}"
    url = f"http://{name}/a.png"
    before = list(server.asked)
    with pytest.raises(ImageRefused, match=r"has a private address, which is not listed in images.allowed_hosts"):
        await fetcher(name).fetch(url)
    assert server.asked == before
    assert await fetcher(name, "127.0.0.1", "::1").fetch(url) == FILE


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f::1", True),
        ("::ffff:93.184.215.14", True),
        ("64:ff9b::5db8:d70e", True),
        ("2002:5db8:d70e::1", True),
        ("127.0.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("::127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("64:ff9b:1::a00:1", False),
        ("2002:a00:1::1", False),
        ("fec0::1", False),
    ],
)
async def test_a_private_address_is_known_in_each_of_its_forms(
    address: str, is_public: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an IPv6 address that a network translates to a private one of IPv4 was connected to."""
    connected: list[str] = []

    async def lookup(*_: object, **__: object) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, 80, 0, 0))]

    async def connect(host: str, *_: object, **__: object) -> None:
        connected.append(host)
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    monkeypatch.setattr(asyncio, "open_connection", connect)
    with pytest.raises(ImageRefused, match="did not answer" if is_public else "has a private address"):
        await fetcher("images.test").fetch("http://images.test/a.png")
    assert connected == [address] * is_public


async def test_a_user_in_the_url_is_refused(server: ImageServer) -> None:
    with pytest.raises(ImageRefused, match="a user or a password"):
        await fetcher(server.host).fetch(f"http://me:secret@{server.host}/a.png")


async def test_a_certificate_is_held_against_the_name_and_not_the_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificate = self_signed(tmp_path, "images.test")
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(certificate)

    async def lookup(*_: object, **__: object) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    with image_server({"/a.png": Given(FILE)}, served) as server:
        allowed = ("127.0.0.1", f"images.test:{server.port}", f"other.test:{server.port}")
        with pytest.raises(ImageRefused, match="did not answer: SSLCertVerificationError"):
            await fetcher(*allowed).fetch(f"https://images.test:{server.port}/a.png")
        monkeypatch.setattr(fetch, "_CONTEXT", ssl.create_default_context(cafile=certificate))
        assert await fetcher(*allowed).fetch(f"https://images.test:{server.port}/a.png") == FILE
        with pytest.raises(ImageRefused, match="did not answer: SSLCertVerificationError"):
            await fetcher(*allowed).fetch(f"https://other.test:{server.port}/a.png")


async def test_a_server_that_says_no_goodbye_holds_up_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Regression: a fetch whose limit was half a second ended after thirty, and so did one whose client had left."""
    certificate = self_signed(tmp_path, "localhost")
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(certificate)
    monkeypatch.setattr(fetch, "_CONTEXT", ssl.create_default_context(cafile=certificate))
    with image_server({"/slow": Given(FILE, stalls=True)}, served) as server:
        name = f"localhost:{server.port}"
        allowed = (name, "127.0.0.1", "::1")
        async with asyncio.timeout(10):
            with pytest.raises(ImageRefused, match=r"longer than 0\.2 s"):
                await fetcher(*allowed, timeout_s=0.2).fetch(f"https://{name}/slow")


def self_signed(directory: Path, name: str) -> Path:
    """Write a key and its certificate into one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    today = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), 1, today, today + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    made = builder.sign(key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = directory / "both.pem"
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


async def test_a_server_that_is_gone_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        host = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ImageRefused, match="did not answer: ConnectionRefusedError"):
        await fetcher(host).fetch(f"http://{host}/a.png")
