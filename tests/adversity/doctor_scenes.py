"""What the doctor's tests stage: installations of the engine that are broken, and odd servers."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import os
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["crashing_engine", "http_server", "other_distribution", "patched_engine"]

_ROOT = Path(__file__).resolve().parents[2]


def patched_engine(folder: Path, old: bytes, new: bytes) -> str:
    """Install the engine once more with other bytes in its native code; a ``PYTHONPATH``.

    Args:
        folder: An empty folder.
        old: What stands there.
        new: What should, of the same length.
    """
    assert len(old) == len(new)
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (place,) = spec.submodule_search_locations
    package = folder / "mooncake"
    package.mkdir()
    found = 0
    for entry in Path(place).iterdir():
        if entry.name.startswith("store.") and entry.suffix == ".so":
            code = entry.read_bytes()
            found += code.count(old)
            (package / entry.name).write_bytes(code.replace(old, new))
        elif entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    assert found, f"the native code has no {old!r}"
    for libraries in Path(place).parent.glob("mooncake_transfer_engine*.libs"):
        (folder / libraries.name).symlink_to(libraries)
    return f"{folder}{os.pathsep}{_ROOT}"


def crashing_engine(folder: Path) -> str:
    """Install an engine that crashes when it is imported; a ``PYTHONPATH``."""
    package = folder / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "store.py").write_text("import os\nos.abort()\n")
    return f"{folder}{os.pathsep}{_ROOT}"


def other_distribution(folder: Path, name: str, version: str) -> str:
    """Let pip believe that one more wheel of the engine is installed; a ``PYTHONPATH``."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return f"{folder}{os.pathsep}{_ROOT}"


class _NotFound(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # as it is inherited
        pass


@contextlib.contextmanager
def http_server() -> Iterator[str]:
    """Serve HTTP, and nothing of Mooncake's; the address."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _NotFound) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
