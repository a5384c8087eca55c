"""Ask metadata servers, and coordinators that know the master, whether they are there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import quote

from aiomooncake._addresses import hosts_of
from aiomooncake._tasks import together
from aiomooncake._verdict import address_text
from aiomooncake.errors import ConfigError
from aiomooncake.master import failure_reason, http_get, probe_tcp

__all__ = ["Found", "ask_coordinator", "ask_metadata_server"]

_OK: Final = 200
_NOBODY: Final = "aiomooncake-doctor"
# What the engine keeps of a client there: where its memory is.
_MEMORY: Final = "mooncake/ram/"
# Bytes of such an entry that are read: it lists each registered piece, in up to some 300 of them.
_MAX_ENTRY: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Found:
    """What was found at an address.

    Attributes:
        state: ``"well"``, or what is wrong: ``"dead"`` (nobody accepts connections), ``"silent"``
            (no answer in time), ``"strange"`` (it is no metadata server, or has another path), or
            ``"taken"`` (it knows a client of the name that was looked up).
        text: The same in words, with the address.
    """

    state: Literal["well", "dead", "silent", "strange", "taken"]
    text: str


async def ask_coordinator(
    address: str, host: str, port: int, timeout: float, *, name: str = ""
) -> Found:
    """Ask a metadata server over HTTP for a client; connect to other servers and hang up.

    Args:
        address: The address with its scheme; without one it is an etcd.
        host: The host that it names.
        port: The port there.
        timeout: Seconds.
        name: The ``local_hostname`` of the client, with its port; without it nobody is looked up.
    """
    where = address_text(host, port)
    try:
        if not address.startswith("http://"):
            await probe_tcp(host, port, timeout)
            return Found("well", f"{where} accepts connections")
        path = re.split(r"[?#]", address.partition("://")[2], maxsplit=1)[0].partition("/")[2]
        # As the engine asks.
        key = quote(_MEMORY + name if name else _NOBODY, safe="")
        question = f"/{path}?key={key}"
        status, body = await http_get(host, port, question, timeout, most=_MAX_ENTRY)
    except TimeoutError:
        text = f"{where} does not answer in time: it is frozen, or behind a firewall"
        return Found("silent", text)
    except OSError as error:
        return Found("dead", f"{where} does not answer: {failure_reason(error)}")
    if name and status == _OK and name.encode() in body:
        return Found("taken", f"{where} has a client of the name {name!r}")
    if b"metadata" in body:  # such as: metadata not found
        return Found("well", f"{where} answers look-ups")
    text = f"{where} answers a look-up at /{path} by HTTP {status}, not as Mooncake's own"
    return Found("strange", text)


async def ask_metadata_server(address: str, timeout: float, *, name: str = "") -> Found | None:
    """Ask all servers of an address side by side; one that is well is enough for the engine.

    Args:
        address: The address of a metadata server.
        timeout: Seconds for all of it.
        name: As for :func:`ask_coordinator`.

    Returns:
        What was found; None when there is no time, or the address names nobody who can be asked.
    """
    try:
        places = hosts_of(address)
    except ConfigError:
        return None
    if timeout <= 0:
        return None
    found = await together(ask_coordinator(address, *place, timeout, name=name) for place in places)
    well = [each for each in found if each.state == "well"]
    if well:
        return well[0]
    return Found(found[0].state, "; ".join(each.text for each in found)) if found else None
