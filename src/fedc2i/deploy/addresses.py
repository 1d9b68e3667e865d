"""Host names, IP addresses and ports as people write them, checked."""

from __future__ import annotations

import ipaddress
import re

from fedc2i.core.errors import UserError

_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"


def check_host(host: str, where: str = "host") -> str:
    """A host name in lower case or an IP address, as it can stand in a certificate.

    Raises:
        UserError: for anything else, for example an address with a port.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        lower = host.lower()
        if host.isascii() and len(host) <= 253 and re.fullmatch(rf"({_LABEL}\.)*(?![0-9]+\Z){_LABEL}", lower):
            return lower
        raise UserError(f"{where}: {host[:99]!a} is neither a host name in ASCII nor an IP address") from None
    if address.is_unspecified or getattr(address, "scope_id", None):
        raise UserError(f"{where}: {host} is no address that another machine can reach")
    return str(address)


def parse_address(address: str, where: str = "coordinator") -> tuple[str, int]:
    """``host:port`` or ``[IPv6]:port`` as host and port.

    Raises:
        UserError: if it is neither.
    """
    parts = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+)):([0-9]{1,5})", address)
    if not parts:
        raise UserError(f"{where}: {address[:99]!a} is no address such as fed.example.org:9092, without https://")
    return check_host(parts[1] or parts[2], where), check_port(int(parts[3]), where)


def check_port(port: int, where: str = "port") -> int:
    """A TCP port, or a `UserError`."""
    if not 1 <= port <= 65535:
        raise UserError(f"{where}: port {port} is out of range, allowed are 1..65535")
    return port


def check_bind(address: str, where: str = "bind") -> str:
    """An IP address to listen on, or a `UserError`."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        raise UserError(f"{where}: {address[:99]!a} is no IP address to listen on, such as 10.0.0.5") from None
