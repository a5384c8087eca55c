"""Break off handshakes with peers that do not answer.

Before its first transfer to a peer the engine asks the peer where its memory lies, and waits 60 s
for the answer, for each key of a call anew: ``SO_RCVTIMEO`` of upstream's
``SocketHandShakePlugin``, which no variable changes. No transfer has begun by then, so nothing is
written later. A connection that is shut down ends the wait as if the peer had hung up.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["break_off"]

_TABLES: Final = {socket.AF_INET: "/proc/self/net/tcp", socket.AF_INET6: "/proc/self/net/tcp6"}
_DESCRIPTORS: Final = Path("/proc/self/fd")
# Columns of these tables, and the state of a connection on which both sides may still talk. A
# knock (see aiomooncake.master.probe_alive) is in it for a moment only, and ends as refused then.
_REMOTE, _STATE, _INODE = 2, 3, 9
_ESTABLISHED: Final = "01"


def break_off(peers: Iterable[str]) -> int:
    """Shut down this process's connections to the listeners of peers.

    Args:
        peers: Their end points, ``host:port``; transfers go to another port.

    Returns:
        How many there were; 0 where the system does not list them.
    """
    inodes: set[int] = set()
    for family, table in _TABLES.items():
        wanted = {place for peer in peers for place in _places(peer, family)}
        if wanted:
            with contextlib.suppress(OSError), Path(table).open(encoding="ascii") as rows:
                for row in rows:
                    # Machines have many connections: most rows are looked at no further.
                    if any(place in row for place in wanted):
                        columns = row.split()
                        if columns[_REMOTE] in wanted and columns[_STATE] == _ESTABLISHED:
                            inodes.add(int(columns[_INODE]))
    return sum(_shut_down(inodes)) if inodes else 0


def _places(peer: str, family: socket.AddressFamily) -> Iterable[str]:
    """Write an end point as the kernel's table does: words of the machine's byte order."""
    host, _, port = peer.rpartition(":")
    with contextlib.suppress(OSError, ValueError, UnicodeError):
        for *_, address in socket.getaddrinfo(host.strip("[]"), int(port), family):
            packed = socket.inet_pton(family, str(address[0]).partition("%")[0])
            words = (packed[i : i + 4] for i in range(0, len(packed), 4))
            text = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
            yield f"{text}:{int(port):04X}"


def _shut_down(inodes: set[int]) -> Iterable[bool]:
    """Shut down those sockets of this process; the kernel lists the whole machine's."""
    names = {f"socket:[{inode}]" for inode in inodes}
    for entry in _DESCRIPTORS.iterdir():
        # The engine may close it, and somebody get its number, at any time: so a descriptor of our
        # own is looked at, and shut down.
        with contextlib.suppress(OSError):
            if str(entry.readlink()) in names:
                with socket.socket(fileno=os.dup(int(entry.name))) as ours:
                    if os.fstat(ours.fileno()).st_ino in inodes:
                        ours.shutdown(socket.SHUT_RDWR)
                        yield True
