"""Host names, IP addresses and ports: checked as people write them, and free or not on this machine."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket

from fedc2i.core.errors import UserError

LOOPBACK = "127.0.0.1"
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"


def check_host(host: str, where: str = "host") -> str:
    """A host name in lower case or an IP address, in the form that certificates use."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        lower = host.lower()
        if host.isascii() and len(host) <= 253 and re.fullmatch(rf"({_LABEL}\.)*(?![0-9]+\Z){_LABEL}", lower):
            return lower
        raise UserError(f"{where}: {host[:99]!a} is neither a host name in ASCII nor an IP address") from None
    if address.is_unspecified or getattr(address, "scope_id", None):
        raise UserError(f"{where}: {host} cannot be reached from another machine")
    return str(address)


def parse_address(address: str, where: str = "coordinator") -> tuple[str, int]:
    """``host:port`` or ``[IPv6]:port`` as host and port."""
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


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def local_address(host: str, port: int) -> str:
    """``host:port`` for a client on this machine, where a server listens on ``host``."""
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_port(host: str = LOOPBACK) -> int:
    """A port that nobody uses at the moment."""
    with _socket_for(host) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def require_free(host: str, port: int) -> None:
    """Raises a `UserError` with the reason if a server cannot listen there."""
    with _socket_for(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that has just been closed is free
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise UserError(f"{host} is not an address of this machine; coordinator.toml has it as bind") from None
            raise UserError(
                f"cannot listen on port {port} of {host} ({error.strerror}); set in coordinator.toml and site.toml"
            ) from None


def _socket_for(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
