"""What a process with open stores does when it forks and when it exits.

The engine survives neither by itself: a call in a forked child hangs, a store object dropped
there is a segmentation fault, its ``atexit`` handler tears clients down under running calls,
and a worker thread that comes back while the interpreter finalises aborts the process.

* **Fork**: the child's copies of all stores refuse every call, the calls that were in flight are
  over there, and their native objects are never freed. A child of a process that ever opened a
  store can't open one (the engine would hang for ever), so :func:`check_can_open` refuses.
* **Exit**: the engine's own handler is disarmed before the first client exists (not when somebody
  else in the process imported the engine first; then it tears all stores down). Calls and
  closes that are under way when the interpreter exits get :data:`EXIT_GRACE` seconds to end.
  Native objects that are still open are left to the operating system, and the master forgets the
  client when its TTL ends, as it does for a process that died.
* Where native objects are left, in a child or at exit, the process ends by ``_exit`` as soon as
  the interpreter has finalised: the C and C++ exit handlers, which would destroy what the
  engine's threads still use, are skipped. A call that comes back while the interpreter finalises
  would abort the process; its thread is halted instead.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

from aiomooncake.engine.binding import Binding, load_binding
from aiomooncake.errors import ForkedProcessError

if TYPE_CHECKING:
    from aiomooncake.engine.client import EngineClient

__all__ = ["EXIT_GRACE", "check_can_open", "load_engine", "track", "untrack"]

log = logging.getLogger("aiomooncake")

EXIT_GRACE = 3.0
"""Seconds that calls in flight get when the interpreter exits.

Longer than one transport time-out, so that a call to a frozen peer usually ends by itself.
"""

# By item: an attribute of ctypes.pythonapi is shared with the whole process.
_inc_ref = ctypes.pythonapi["Py_IncRef"]
_inc_ref.argtypes = [ctypes.py_object]
_inc_ref.restype = None
# Looked up beforehand: in a forked child the loader's lock may be held by a thread of the parent.
_libc = ctypes.CDLL(None)

_lock = threading.Lock()
_live: weakref.WeakSet[EngineClient] = weakref.WeakSet()
# Those of the in-memory engine, of which a child must only forget the threads.
_threaded: weakref.WeakSet[EngineClient] = weakref.WeakSet()
_exit_hook_installed = False
_fork_hook_installed = False
_opened_by_parent = False
_disarmed = False


def track(client: EngineClient, *, guarded: bool) -> None:
    """Watch over a client until :func:`untrack` is called.

    Args:
        client: The client.
        guarded: Whether its native object bears neither a fork nor the interpreter's exit.
    """
    global _exit_hook_installed, _fork_hook_installed
    with _lock:
        (_live if guarded else _threaded).add(client)
        if not _fork_hook_installed:
            _fork_hook_installed = True
            os.register_at_fork(after_in_child=_after_fork_in_child)
        if guarded and not _exit_hook_installed:
            _exit_hook_installed = True
            atexit.register(_at_exit)


def untrack(client: EngineClient) -> None:
    """Forget a client whose native object was torn down."""
    with _lock:
        _live.discard(client)
        _threaded.discard(client)


def check_can_open(rank: int | str | None) -> None:
    """Refuse to open a store where the engine would hang for ever.

    Raises:
        ForkedProcessError: This process was forked from one that had opened a store.
    """
    if _opened_by_parent:
        raise ForkedProcessError(
            "connect refused: this process was forked from one that had opened a Mooncake store, "
            "and the engine hangs in such a child; start workers with the spawn method "
            "(multiprocessing.get_context('spawn')), or connect only after the fork",
            rank=rank,
        )


def load_engine() -> Binding:
    """Import the engine, and disarm its exit handler if nobody can have a client yet.

    The handler runs the engine's process-wide clean-up once; when that has been run while there
    was nothing to clean up, the handler finds it done. If somebody else imported the engine
    before us, they may have clients, which it would tear down: then it stays armed.

    Raises:
        EngineNotInstalledError: The engine can't be imported; says what is missing.
    """
    with _lock:
        fresh = "mooncake.store" not in sys.modules
        binding = load_binding()
        if fresh:
            _disarm(binding)
        return binding


def _disarm(binding: Binding) -> None:
    global _disarmed
    try:
        lib = ctypes.CDLL(str(binding.shared_object))
        get_instance = lib._ZN8mooncake15ResourceTracker11getInstanceEv
        clean_up = lib._ZN8mooncake15ResourceTracker19cleanupAllResourcesEv
    except (AttributeError, OSError):
        return
    get_instance.restype = ctypes.c_void_p
    clean_up.argtypes = [ctypes.c_void_p]
    clean_up.restype = None
    clean_up(get_instance())
    _disarmed = True


def _keep_for_ever(native: object) -> None:
    # A reference that nobody gives back: freeing the object would run its destructor, which
    # joins threads (at exit) or threads that do not exist (in a forked child).
    _inc_ref(native)


def _after_fork_in_child() -> None:
    global _lock, _opened_by_parent
    _lock = threading.Lock()  # the old one may be held by a thread of the parent
    if _exit_hook_installed and not _opened_by_parent:  # there was a client of the engine
        _opened_by_parent = True
        _skip_native_exit_handlers()
    for client in list(_live):
        _keep_for_ever(client.native)
    for client in [*_live, *_threaded]:
        client.forked()
    _live.clear()
    _threaded.clear()


def _at_exit() -> None:
    live = list(_live)
    for client in live:
        _keep_for_ever(client.native)
        client.gate.shut()
    stuck = live
    try:
        stuck = _still_busy(live)
        if stuck:
            log.warning(
                "the interpreter exits beside calls that are stuck in the engine: %s",
                "; ".join(client.gate.describe_calls() for client in stuck),
            )
    finally:
        # Also when the wait was interrupted, by a second Ctrl-C say: calls are running then.
        if stuck:
            _halt_returning_threads()
        if stuck or (live and _disarmed):
            _skip_native_exit_handlers()


def _still_busy(live: list[EngineClient]) -> list[EngineClient]:
    """Give calls and closes that are under way their time to end; those that did not."""
    deadline = time.monotonic() + EXIT_GRACE
    return [client for client in live if not client.quiet(deadline - time.monotonic())]


def _halt_returning_threads() -> None:
    """Halt threads that come back from the engine while the interpreter finalises.

    Such a thread asks for the GIL, and the interpreter ends it by ``pthread_exit``. That unwinds
    into a destructor of the binding, which may not be left so: ``std::terminate``. Its handler is
    made to be ``pause``. At that point the thread holds no lock, unlike one that is stopped
    somewhere inside the engine by a signal.
    """
    try:
        # The one that the engine has loaded.
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (AttributeError, OSError):
        return
    set_terminate.argtypes = [ctypes.c_void_p]
    set_terminate.restype = ctypes.c_void_p
    set_terminate(ctypes.cast(_libc.pause, ctypes.c_void_p))


def _skip_native_exit_handlers() -> None:
    """Let the process end by ``_exit``, with its code, where ``exit`` would begin its handlers.

    They run in the order opposite to their registration: first the flush of the C streams, which
    otherwise comes last, then ``_exit(code)``.
    """
    if not hasattr(_libc, "on_exit"):  # glibc's, as the engine's wheels are
        return
    _libc.on_exit(ctypes.cast(_libc._exit, ctypes.c_void_p), None)
    _libc.__cxa_atexit(ctypes.cast(_libc.fflush, ctypes.c_void_p), None, None)
