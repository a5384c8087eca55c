"""The calls between tensors and files of safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from aiomooncake._safetensors import read_elements, read_entries, write_file
from aiomooncake._tensor_memory import Elements
from aiomooncake.engine.inmemory.arguments import DEFAULTS, as_key, read_config
from aiomooncake.engine.inmemory.calls import code, native
from aiomooncake.engine.inmemory.objects import INVALID_PARAMS, OK
from aiomooncake.engine.inmemory.tensors import TensorCalls, as_source, decoded, none, packed
from aiomooncake.errors import MooncakeError

__all__ = ["FileCalls"]

_FILE_NOT_FOUND: Final = -1100


class FileCalls(TensorCalls):
    """A tensor into a file, and out of it."""

    @native(code, unset=code)
    def save_tensor_to_safetensor(self, key: str, file_name: str | None = None) -> int:
        """Write a tensor into a file, which is named by the key if nothing else is said."""
        tensor = self._read_tensors([as_key(key)])[0]
        source = None if tensor is None else as_source(tensor)
        if source is None:
            return _FILE_NOT_FOUND
        elements = memoryview(source.to_bytes())
        try:
            write_file(Path(file_name or key), {key: (source.header(), elements)})
        except OSError:
            return INVALID_PARAMS
        return OK

    @native(none, unset=none)
    def load_tensor_from_safetensor(self, key: str | None = None, file_name: str = "") -> Any:
        """Store the tensor of this name in a file, or else the first one; the tensor, or None."""
        path = Path(file_name)
        try:
            entries = read_entries(path)
            entry = next((each for each in entries if each.name == key), *entries[:1])
            (elements,) = read_elements(path, [entry])
        except (MooncakeError, OSError, TypeError):
            return None
        value = packed(entry.header, Elements(entry.header, elements))
        placement = read_config(DEFAULTS, 1, same_node=False)
        if self._engine.put(self, key or file_name, value, placement) != OK:  # type: ignore[arg-type]
            return None
        return decoded(bytearray(value), len(value))
