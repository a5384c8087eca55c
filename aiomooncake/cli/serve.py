"""The server behind ``aiomooncake serve``: it listens at once, and connects beside that."""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from aiomooncake._settings import from_keys
from aiomooncake.aiohttp import STORE
from aiomooncake.config import StoreConfig
from aiomooncake.errors import ConfigError
from aiomooncake.gateway import DOOR, make_app

if TYPE_CHECKING:
    from aiomooncake.cli.terminal import Screen

__all__ = ["TOKEN_VARIABLE", "Serve", "make_app", "read_token", "target_of", "use_uvloop"]

TOKEN_VARIABLE: Final = "AIOMOONCAKE_TOKEN"  # noqa: S105  # where it is, not what it is

_DRAIN_TIMEOUT: Final = 30.0
"""Seconds that requests under way have to end after a signal."""

_LAST_BYTES: Final = 5.0  # seconds for what is left of their answers

_BACKLOG: Final = 1024


@dataclass(frozen=True, slots=True)
class Serve:
    """One run of the gateway.

    Attributes:
        app: The application.
        host: Where to listen.
        port: Likewise; 0 = a free one.
        guarded: Whether a token is asked for.
        screen: Where to say so.
    """

    app: web.Application
    host: str
    port: int
    guarded: bool
    screen: Screen

    async def run(self) -> None:
        """Serve until this is cancelled, then end what is under way.

        Raises:
            MooncakeError: The store can't be opened at all, or not in the time it was given.
            OSError: The address can't be listened on.
        """
        runner = web.AppRunner(
            self.app,
            access_log=None,  # a line per request would cost more than the request
            handle_signals=False,
            handler_cancellation=True,
            shutdown_timeout=_LAST_BYTES,
        )
        try:
            await runner.setup()
            await web.TCPSite(runner, self.host, self.port, backlog=_BACKLOG).start()
            for host, port, *_ in runner.addresses:
                place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                self.screen.line(f"serving on http://{place}", "bold")
            if not self.guarded and not _is_loopback(self.host):
                self.screen.log(
                    f"warning: everybody who reaches {self.host} may read, store and remove; set "
                    f"{TOKEN_VARIABLE} or --token-file"
                )
            raise await self.app[STORE].given_up()
        except asyncio.CancelledError:
            self.screen.log("draining: no new requests, those under way are finished")
            raise
        finally:
            for site in runner.sites:
                await site.stop()
            await self.app[DOOR].emptied(_DRAIN_TIMEOUT)
            await runner.cleanup()


def target_of(
    master: str | None, config: str | None, defines: tuple[str, ...]
) -> tuple[str | StoreConfig, dict[str, Any]]:
    """Find what to connect to as the wheel's server does, with its defaults.

    Args:
        master: An address, which stands beside the environment, or a URL, which says everything.
        config: A JSON file; wins over the environment.
        defines: ``key=value`` on top of either.

    Raises:
        ConfigError: Something is wrong, or nothing names a master.
    """
    pairs: dict[str, str] = {}
    for text in defines:
        key, mark, value = text.partition("=")
        if not mark:
            raise ConfigError(f"-D {text!r}: give key=value, such as protocol=rdma")
        pairs[key] = value
    overrides = from_keys(pairs, what="-D")
    if master is not None and "://" in master:
        return master, overrides
    if config is not None:
        found = StoreConfig.from_file(config, dialect="wheel")
        return (found if master is None else found.replace(master_server_address=master)), overrides
    environ = dict(os.environ)
    for name in (master, overrides.get("master_server_address")):
        if name is not None:
            environ["MOONCAKE_MASTER"] = name
    return StoreConfig.from_env(environ, dialect="wheel"), overrides


def read_token(path: str | None) -> str | None:
    """Read the token from a file or the environment; not from the arguments, which all can see.

    Raises:
        ConfigError: The file can't be read, or the token is empty or no ASCII.
    """
    if path is None:
        token = os.environ.get(TOKEN_VARIABLE)
        if token is None:
            return None
        where = TOKEN_VARIABLE
    else:
        where = f"the token file {path}"
        try:
            token = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{where} can't be read: {exc}") from None
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{where} holds no token: give one word of ASCII characters")
    return token


def use_uvloop() -> bool:
    """Let the next loop be uvloop's if that is installed; tell whether it is."""
    if importlib.util.find_spec("uvloop") is None:
        return False
    import uvloop

    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
