"""Fetches images from other servers, within limits of host, time, size and type.
Never follows a redirect, and never connects to an address that is not public unless the settings list it."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import h11

from serve_app.images.refusal import ImageRefused, check_size, check_type

SETTING = "images.allowed_hosts"
_PORTS = {"http": 80, "https": 443}
_READ_BYTES = 1 << 16
_PREFIXES_OF_IPV4 = frozenset(int(ipaddress.IPv6Address(one)) >> 32 for one in ("::", "::ffff:0:0", "64:ff9b::"))
"""Prefixes of 96 bits after which an IPv4 address stands: compatible, mapped (RFC 4291), and translated (RFC 6052)."""
_LOCAL_TRANSLATION = ipaddress.IPv6Network("64:ff9b:1::/48")
"""Translates to addresses that only the network knows (RFC 8215)."""
_CONTEXT = ssl.create_default_context()


@dataclass(frozen=True, slots=True)
class Fetcher:
    allowed_hosts: Collection[str]
    """Each is `host`, which means its scheme's default port, or `host:port`."""
    max_bytes: int
    timeout_s: float
    """The limit from the look-up of the name to the last byte."""

    async def fetch(self, url: str) -> bytes:
        """Fetch the file at an http or https URL.

        Raises:
            ImageRefused: the settings do not allow the URL, or the server does not return an image in time.
        """
        target, port = self._allowed(url)
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._read(target, port)
        except TimeoutError:
            text = f"its server took longer than {self.timeout_s:g} s (images.fetch_timeout_s)"
            raise ImageRefused(text) from None
        except (OSError, h11.RemoteProtocolError, UnicodeError) as error:
            raise ImageRefused(f"its server did not answer: {type(error).__name__}") from error

    def _allowed(self, url: str) -> tuple[SplitResult, int]:
        try:
            target = urlsplit(url)
            port = target.port or _PORTS[target.scheme]
        except (ValueError, KeyError) as error:
            raise ImageRefused("its URL is not valid") from error
        host = target.hostname or ""
        names = {f"{host}:{port}"} | ({host} if port == _PORTS[target.scheme] else set())
        if names.isdisjoint(self.allowed_hosts):
            raise ImageRefused(f"its host {host[:100]!r} at port {port} is not listed in {SETTING}")
        if target.username is not None or target.password is not None:
            raise ImageRefused("its URL has a user or a password")
        return target, port

    async def _read(self, target: SplitResult, port: int) -> bytes:
        host = target.hostname or ""
        address = await self._address(host, port)
        secure = _CONTEXT if target.scheme == "https" else None
        # Connects to the address that was checked: a second look-up of the name might give another.
        reader, writer = await asyncio.open_connection(
            address, port, ssl=secure, server_hostname=host if secure else None
        )
        try:
            connection = h11.Connection(h11.CLIENT)
            writer.write(_request(connection, target))
            await writer.drain()
            return await self._body(connection, reader)
        finally:
            # Without a goodbye: asyncio waits half a minute for the answer to TLS's, whatever this fetch's limit is.
            writer.transport.abort()

    async def _address(self, host: str, port: int) -> str:
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        address = str(infos[0][4][0])
        listed = address in self.allowed_hosts or f"{address}:{port}" in self.allowed_hosts
        if not listed and not _is_public(address.partition("%")[0]):
            raise ImageRefused(f"its host has a private address, which is not listed in {SETTING}")
        return address

    async def _body(self, connection: h11.Connection, reader: asyncio.StreamReader) -> bytes:
        body = bytearray()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_READ_BYTES))
            elif isinstance(event, h11.Response):
                self._check(event)
            elif isinstance(event, h11.Data):
                body += event.data
                check_size(len(body), self.max_bytes)
            elif not isinstance(event, h11.InformationalResponse):
                return bytes(body)

    def _check(self, response: h11.Response) -> None:
        if response.status_code in range(300, 400):
            raise ImageRefused(f"its server answered with a redirect ({response.status_code}), and none is followed")
        if response.status_code != 200:
            raise ImageRefused(f"its server answered with status {response.status_code}")
        headers = {name: value.decode("latin-1") for name, value in response.headers}
        check_type(headers.get(b"content-type", "").partition(";")[0].strip().lower())
        length = headers.get(b"content-length", "")
        check_size(int(length) if length.isdecimal() else 0, self.max_bytes)


def _is_public(address: str) -> bool:
    """Whether an address is one of the Internet. An IPv6 address that stands for one of IPv4 is public if that is."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address):
        number, six_to_four = int(found), found.sixtofour
        if six_to_four is not None or number >> 32 in _PREFIXES_OF_IPV4:
            return (six_to_four or ipaddress.IPv4Address(number & 0xFFFFFFFF)).is_global
        return found.is_global and not found.is_site_local and found not in _LOCAL_TRANSLATION
    return found.is_global


def _request(connection: h11.Connection, target: SplitResult) -> bytes:
    path = (target.path or "/") + (f"?{target.query}" if target.query else "")
    headers = [("Host", target.netloc), ("Accept", "image/*"), ("Accept-Encoding", "identity"), ("Connection", "close")]
    try:
        request = connection.send(h11.Request(method="GET", target=path, headers=headers))
    except h11.LocalProtocolError as error:
        raise ImageRefused("its URL has characters that must be escaped") from error
    return (request or b"") + (connection.send(h11.EndOfMessage()) or b"")
