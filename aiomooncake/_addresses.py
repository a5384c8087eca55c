"""Addresses of masters and of metadata servers: their forms, checked before the engine sees them.

The engine tells a wrong one by -1 after seconds, and a kind that it does not know ends the process.
What each form means to it is in ``docs/metadata.md``.
"""

from __future__ import annotations

import re
from typing import Final

from aiomooncake._values import bad_value, check_text, nearest, split_address, split_host
from aiomooncake.errors import ConfigError

__all__ = [
    "MASTER_SCHEMES",
    "METADATA_SCHEMES",
    "P2PHANDSHAKE",
    "hosts_of",
    "parse_master",
    "parse_metadata",
]

MASTER_SCHEMES: Final = ("etcd", "redis", "k8s", "memory")
"""Ways to name a master other than by host and port: they are passed on to the engine."""

METADATA_SCHEMES: Final = ("http", "https", "etcd", "redis")
"""Kinds of metadata servers; not every wheel is built with all of them."""

P2PHANDSHAKE: Final = "P2PHANDSHAKE"
"""Clients ask each other. With a server, the engine tells names of peers, where nobody listens."""

_PORTS: Final = {"http": 80, "https": 443, "redis": 6379}
_FORMS: Final = {
    "http": "http://host:8080/metadata",
    "https": "https://host:8080/metadata",
    "etcd": "etcd://host:2379;host:2379",
    "redis": "redis://host:6379",
}
_LEASE: Final = re.compile(r"(?:[a-z0-9.-]+/)?[a-z0-9.-]+", re.ASCII)
_PORT_OF_A_HOST: Final = re.compile(r"[0-9]+(?:[,;]|$)", re.ASCII)
_ENDPOINT_SCHEME: Final = re.compile(r"https?://")


def parse_master(value: object, field: str) -> str:
    """Check the address of a master; a scheme is kept in lower case."""
    address = check_text(value, field=field)
    scheme, mark, rest = address.partition("://")
    scheme = scheme.lower()
    if not mark:
        if address:
            split_address(address, field=field)
        return address
    if scheme in ("http", "https"):
        want = (
            "a master is not reached over HTTP: give its --rpc_port as host:port, and its HTTP "
            "port as master_metrics_port"
        )
        raise bad_value(field, value, want)
    if scheme not in MASTER_SCHEMES:
        want = f"give host:port, or a URL that starts with {', '.join(MASTER_SCHEMES[:-1])}"
        raise bad_value(field, value, want)
    if not rest:
        raise bad_value(field, value, "nothing follows the ://")
    if scheme == "k8s" and _LEASE.fullmatch(rest) is None:
        raise bad_value(field, value, 'give the lease, as in "k8s://namespace/lease"')
    if scheme in ("etcd", "redis"):
        _check_hosts(scheme, rest, field, value)
    return f"{scheme}://{rest}"


def parse_metadata(value: object, field: str) -> str:
    """Check the address of a metadata server, or the word for none."""
    server = check_text(value, field=field)
    if not server:
        raise bad_value(field, value, f'give "{P2PHANDSHAKE}", or the URL of a metadata server')
    # The engine compares this word case by case, and takes any other spelling for a host.
    if server.upper() == P2PHANDSHAKE:
        return server.upper()
    scheme, mark, rest = server.partition("://")
    if not mark:
        scheme, _, rest = server.partition(":")
        if scheme.lower() in METADATA_SCHEMES and not _PORT_OF_A_HOST.match(rest):
            form = _FORMS[scheme.lower()]
            raise bad_value(field, value, f'the // is missing: give it as in "{form}"')
        if ":" not in server and nearest(server.upper(), [P2PHANDSHAKE]):
            raise bad_value(field, value, f'did you mean "{P2PHANDSHAKE}"?')
        _check_hosts("etcd", server, field, value)
        return server
    # It compares these case by case too, and any other scheme ends the process.
    scheme = scheme.lower()
    if scheme in METADATA_SCHEMES and not rest:
        want = f'nothing follows the ://; give it as in "{_FORMS[scheme]}"'
        raise bad_value(field, value, want)
    if scheme not in METADATA_SCHEMES:
        want = f'give "{P2PHANDSHAKE}", or a URL that starts with {", ".join(METADATA_SCHEMES)}'
        raise bad_value(field, value, want)
    _check_hosts(scheme, rest, field, value)
    path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")[2]
    if scheme in ("http", "https") and not path:
        want = f'the path is missing: give it as in "{_FORMS[scheme]}"'
        raise bad_value(field, value, want)
    return f"{scheme}://{rest}"


def hosts_of(address: str) -> list[tuple[str, int]]:
    """List host and port of each server that an address with a scheme, or of etcd, names.

    Raises:
        ConfigError: They can't be read; a Kubernetes lease names none.
    """
    scheme, mark, rest = address.partition("://")
    if not mark:
        scheme, rest = "etcd", address
    hosts = [split_host(place, field="address") for place in _places(scheme, rest)]
    found = [(host, _PORTS.get(scheme) if port is None else port) for host, port in hosts]
    if any(port is None for _, port in found):
        raise bad_value("address", address, "it names no host and port")
    return [(host, port) for host, port in found if port is not None]


def _places(scheme: str, rest: str) -> list[str]:
    """Cut the hosts out of what follows the scheme; what stands before the last @ is left out."""
    if scheme in ("http", "https"):
        return [re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")[2]]
    rest = rest.rpartition("@")[2]
    if scheme == "etcd":  # several of them, each with a scheme of its own if it likes
        return [_ENDPOINT_SCHEME.sub("", each, count=1) for each in re.split(r"[;,]", rest) if each]
    return [rest.partition("/")[0]]


def _check_hosts(scheme: str, rest: str, field: str, value: object) -> None:
    if scheme == "etcd" and "@" in rest:
        # Worse: etcd's own client writes the address to the standard error as it is.
        raise bad_value(field, value, "leave user and password out, which the engine does not send")
    places = _places(scheme, rest)
    # What is said of one place alone could show a password, which would not be recognised there.
    wrong = [place for place in places if not _is_host(place)]
    want = f'give host and port, as in "{_FORMS[scheme]}" (an IPv6 address in brackets)'
    if any(_is_host(place.rpartition(":")[0]) for place in wrong):
        want = f'a port is a number between 1 and 65535, as in "{_FORMS[scheme]}"'
    elif not wrong and places:
        ports = [split_host(place, field=field)[1] for place in places]
        if None not in ports or scheme in _PORTS:
            return
    raise bad_value(field, value, want)


def _is_host(place: str) -> bool:
    try:
        split_host(place, field="address")
    except ConfigError:
        return False
    return True
