"""The end of a C++ client object, without the GIL.

``tearDownAll`` leaves the storage of a client that offloads to disk alone: that goes with the C++
object itself, when the last reference to it does. Its destructor joins a thread that sleeps for ten
seconds (``MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS``), and the last reference is the binding's
object, which Python frees under the GIL: measured, the loop stood still for 12.3 s. So the
references are taken out of the binding's object first, and the exported destructor is called.

All of it is verified before anything is changed: the binding's object must hold the two references
that it is known to hold (as a client and as a real client), both equal to the one that the capsule
hands out, and there must be no fourth.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["destroy"]

_WORD: Final = ctypes.sizeof(ctypes.c_void_p)
# A PyObject's count and type; behind them pybind11 keeps the address of the C++ object.
_HEADER: Final = 2 * _WORD
# libstdc++'s control block: its vtable, then how many shared and how many weak references.
_USE_COUNT: Final = _WORD
_REFERENCES: Final = 3


def destroy(native: Any, shared_ptr: int, destructor: Callable[[int], object]) -> bool:
    """Destroy the C++ object behind a binding object that was torn down; nothing may use it.

    Args:
        native: The binding's object.
        shared_ptr: Address of the ``shared_ptr`` in the capsule that it hands out, alive.
        destructor: The exported deleting destructor.

    Returns:
        False, with nothing changed, when the objects are not as expected.
    """
    wrapper = ctypes.c_void_p.from_address(id(native) + _HEADER).value
    if not wrapper:
        return False
    ours = (ctypes.c_void_p * 2).from_address(shared_ptr)
    theirs = (ctypes.c_void_p * 4).from_address(wrapper)
    address, block = ours
    if not address or not block or list(theirs) != [address, block] * 2:
        return False
    count = ctypes.c_int.from_address(block + _USE_COUNT)
    if count.value != _REFERENCES:
        return False
    # As the last of them would do: nobody can take a new one, and then the object goes.
    ours[:] = [None, None]
    theirs[:] = [None, None, None, None]
    count.value = 0
    destructor(address)
    return True
