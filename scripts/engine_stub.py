"""Write aiomooncake/engine/methods.py: every method of the binding, typed and documented.

Run it from a checkout with an engine: ``.venv/bin/python scripts/engine_stub.py``. Names, arguments
and defaults are read out of the docstrings that pybind11 writes. What those do not tell (types of
placement options and answers, what an answer means) stands in :data:`ANSWERS`, one line a method;
a method that is new or gone, or a signature that can't be read, is an error. A test compares.
"""  # noqa: INP001 - a script, not part of a package

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any, Final

from aiomooncake.engine.binding import find_methods, load_binding

MODULE: Final = Path(__file__).parent.parent / "aiomooncake" / "engine" / "methods.py"

_WIDTH: Final = 100
_CODE: Final = ("int", "0, or a negative code.")
_CODES: Final = ("list[int]", "0 or a negative code, per key.")
_SIZES: Final = ("list[int]", "Bytes read or a negative code, per key.")
_TENSOR: Final = ("Tensor | None", "The tensor; None for a miss and for any failure.")
_TENSORS: Final = ("list[Tensor | None]", "A tensor per key; None for a miss and for any failure.")
_REFUSED: Final = "NoReturn"

# From method to what it does (empty where the binding's own docstring says it), the type of its
# answer, and what the answer means.
ANSWERS: Final[dict[str, tuple[str, str, str]]] = {
    "alloc_from_mem_pool": (
        "Take memory from a dummy client's pool",
        "int",
        "An address; 0 when there is no room, and always for a client that is no dummy.",
    ),
    "allocate_and_mount_segment": (
        "Lend fresh memory to the cluster, its size rounded up to 16 MB",
        "Allocated",
        "The code as `ret`, with `segment_ids` and `allocated_size`.",
    ),
    "batch_get_buffer": (
        "Read many values into the client's local buffer",
        "Sequence[NativeBufferHandle | None]",
        "A handle per key; None for a miss, for any failure, and when the local buffer is full.",
    ),
    "batch_get_into": ("", *_SIZES),
    "batch_get_into_multi_buffer_ranges": (
        "Read ranges of values between the start and the end of a get session",
        "list[int]",
        "Bytes read or a negative code, per key; -707 after the lease.",
    ),
    "batch_get_into_multi_buffers": ("", *_SIZES),
    "batch_get_replica_desc": (
        "Tell where the copies of many values lie",
        "Mapping[str, Sequence[NativeReplica]]",
        "Descriptors by key; keys that are missing or failed are absent.",
    ),
    "batch_get_session_end": ("", "int", "0, also for keys that have no session."),
    "batch_get_session_start": ("", *_CODES),
    "batch_get_tensor": ("", *_TENSORS),
    "batch_get_tensor_into": ("", *_TENSORS),
    "batch_get_tensor_into_cuda": ("", *_SIZES),
    "batch_get_tensor_with_parallelism": ("", *_TENSORS),
    "batch_get_tensor_with_parallelism_into": ("", *_TENSORS),
    "batch_get_tensor_with_tp": ("", *_TENSORS),
    "batch_get_tensor_with_tp_into": ("", *_TENSORS),
    "batch_is_exist": (
        "Tell for many keys whether they can be read; renews their leases",
        "list[int]",
        "1, 0 or a negative code, per key.",
    ),
    "batch_pub_tensor": ("", *_CODES),
    "batch_pub_tensor_with_tp": ("", *_CODES),
    "batch_put_from": ("", *_CODES),
    "batch_put_from_multi_buffer_ranges": (
        "Write ranges of values between the start and the end of a put session",
        "list[int]",
        "Bytes written or a negative code, per key.",
    ),
    "batch_put_from_multi_buffers": ("", *_CODES),
    "batch_put_session_end": ("", *_CODES),
    "batch_put_session_revoke": ("", *_CODES),
    "batch_put_session_start": ("", *_CODES),
    "batch_put_tensor": ("", *_CODES),
    "batch_put_tensor_from": ("", *_CODES),
    "batch_put_tensor_with_parallelism": ("", *_CODES),
    "batch_put_tensor_with_parallelism_from": ("", *_CODES),
    "batch_put_tensor_with_tp": ("", *_CODES),
    "batch_put_tensor_with_tp_from": ("", *_CODES),
    "batch_remove": ("Remove many keys", *_CODES),
    "batch_replica_clear": (
        "Remove copies on one segment, or all; of keys of this client that no lease protects",
        "list[str]",
        "The keys that were cleared; the others are left out, whatever the reason.",
    ),
    "batch_upsert_from": ("", *_CODES),
    "batch_upsert_pub_tensor": ("Store or replace many PyTorch tensors, with options", *_CODES),
    "batch_upsert_tensor": ("", *_CODES),
    "batch_upsert_tensor_from": ("", *_CODES),
    "batch_upsert_tensor_with_parallelism": ("", *_CODES),
    "batch_upsert_tensor_with_parallelism_from": ("", *_CODES),
    "close": ("Refuse: `await store.aclose()` closes the store", _REFUSED, ""),
    "create_copy_task": (
        "Have a value copied to segments, in the background",
        "tuple[TaskId, int]",
        "The task, for `query_task`, and 0; or (0, 0) and a negative code.",
    ),
    "create_move_task": (
        "Have a copy moved from one segment to another, in the background",
        "tuple[TaskId, int]",
        "The task, for `query_task`, and 0; or (0, 0) and a negative code.",
    ),
    "get": ("Read a value", "bytes", 'The value; b"" for a miss and for any failure.'),
    "get_batch": (
        "Read many values; of a key given twice only the last answer is right",
        "list[bytes]",
        'A value per key; b"" for a miss, for any failure, and when the local buffer is full.',
    ),
    "get_buffer": (
        "Read a value into the client's local buffer",
        "NativeBufferHandle | None",
        "A handle; None for a miss, for any failure, and when the local buffer is full.",
    ),
    "get_hostname": ("Tell the client's own address", "str", "`host:port`, its segment's name."),
    "get_into": ("", "int", "Bytes read, or a negative code."),
    "get_into_ranges": ("", "list[list[list[int]]]", "Bytes read or a negative code, per range."),
    "get_offload_rpc_read_count": (
        "Count the reads of values that were offloaded to disks of other clients",
        "int",
        "How many there were; 0 for a dummy client.",
    ),
    "get_replica_desc": (
        "Tell where the copies of a value lie; renews the lease",
        "Sequence[NativeReplica]",
        "Descriptors; empty for a miss and for any failure.",
    ),
    "get_size": (
        "Tell the size of a value; renews the lease",
        "int",
        "Bytes, or a negative code: -704 for a miss.",
    ),
    "get_tensor": ("", *_TENSOR),
    "get_tensor_into": ("", *_TENSOR),
    "get_tensor_into_cuda": ("", "int", "Bytes read, or a negative code."),
    "get_tensor_with_parallelism": ("", *_TENSOR),
    "get_tensor_with_parallelism_into": ("", *_TENSOR),
    "get_tensor_with_tp": ("", *_TENSOR),
    "get_tensor_with_tp_into": ("", *_TENSOR),
    "health_check": (
        "Tell whether the client can serve, from memory",
        "int",
        "0: yes, 1: it is not set up, 2: its master does not answer.",
    ),
    "init_all": ("Refuse: `connect()` sets the store up", _REFUSED, ""),
    "is_exist": (
        "Tell whether a value can be read; renews the lease",
        "int",
        "1, 0 or a negative code.",
    ),
    "load_tensor_from_safetensor": ("", *_TENSOR),
    "mount_segment": (
        "Lend a file's memory to the cluster",
        "Mounted",
        "The code as `ret`, with `segment_ids`.",
    ),
    "pub_tensor": ("", *_CODE),
    "pub_tensor_with_tp": ("", *_CODE),
    "put": (
        "Store a value, unless the key is taken",
        "int",
        "0, also when the key is taken and the old value stays; or a negative code.",
    ),
    "put_batch": (
        "Store many values, each unless its key is taken",
        "int",
        "0, or the first error: others may be stored.",
    ),
    "put_from": ("", "int", "0, also when the key is taken, or a negative code."),
    "put_from_with_metadata": (
        "Store two pieces of memory as one value, the metadata first",
        "int",
        "0, also when the size is 0 and nothing is stored; -1, or a code without its sign (600).",
    ),
    "put_parts": (
        "Store several buffers as one value, unless the key is taken",
        "int",
        "0, also when the key is taken or all are empty; or a negative code.",
    ),
    "put_tensor": ("", *_CODE),
    "put_tensor_from": ("", *_CODE),
    "put_tensor_with_parallelism": ("", *_CODE),
    "put_tensor_with_parallelism_from": ("", *_CODE),
    "put_tensor_with_tp": ("", *_CODE),
    "put_tensor_with_tp_from": ("", *_CODE),
    "query_task": (
        "Tell how far a copy or a move is",
        "tuple[NativeTask | None, int]",
        "The task and 0; or None and a negative code.",
    ),
    "register_buffer": ("Make memory known to the transport", *_CODE),
    "remove": ("Remove a key; `force` also one that a lease protects", *_CODE),
    "remove_all": ("Remove every key", "int", "How many went, or a negative code."),
    "remove_by_regex": (
        "Remove every key that a pattern matches",
        "int",
        "How many went, or a negative code.",
    ),
    "save_tensor_to_safetensor": ("", *_CODE),
    "setup": ("Refuse: `connect()` sets the store up", _REFUSED, ""),
    "setup_dummy": ("Refuse: `connect(client_server_address=...)` does it", _REFUSED, ""),
    "unmount_and_free_segment": (
        "Take back and free what `allocate_and_mount_segment` lent",
        "int",
        "0; -1 when one of them is not known, -600 when it was taken back before.",
    ),
    "unmount_local_disk_segment": (
        "Take the client's disk tier out of the cluster; waits for the grace period",
        "int",
        "0, also when there is none; or a negative code.",
    ),
    "unmount_segment": (
        "Take back what `mount_segment` lent",
        "int",
        "0; -1 when one of them is not known, -600 when it was taken back before.",
    ),
    "unregister_buffer": ("Make the transport forget memory", *_CODE),
    "upsert": ("Store a value, in place of the one that is there", *_CODE),
    "upsert_batch": (
        "Store many values, in place of those that are there",
        "int",
        "0, or the first error: others may be stored.",
    ),
    "upsert_from": ("", *_CODE),
    "upsert_parts": ("Store several buffers as one value, in place of the one there", *_CODE),
    "upsert_pub_tensor": ("", *_CODE),
    "upsert_tensor": ("", *_CODE),
    "upsert_tensor_from": ("", *_CODE),
    "upsert_tensor_with_parallelism": ("", *_CODE),
    "upsert_tensor_with_parallelism_from": ("", *_CODE),
}

# Names of those arguments that the binding takes by position only, and calls arg0, arg1, ….
_POSITIONAL: Final = {
    "alloc_from_mem_pool": ("size",),
    "batch_get_buffer": ("keys",),
    "get": ("key",),
    "get_batch": ("keys",),
    "get_buffer": ("key",),
    "get_size": ("key",),
    "init_all": ("protocol", "device_name", "mount_segment_size"),
    "is_exist": ("key",),
}
_TYPES: Final = {
    "Buffer": "Value",
    "bool": "bool",
    "int": "int",
    "list": "list[Tensor]",
    "list[Buffer]": "Sequence[Value]",
    "list[int]": "Sequence[int]",
    "list[list[int]]": "Sequence[Sequence[int]]",
    "list[list[list[int]]]": "Sequence[Sequence[Sequence[int]]]",
    "list[list[str]]": "Sequence[Sequence[str]]",
    "list[str]": "Sequence[str]",
    "mooncake.store.ReplicateConfig": "Config",
    "str": "str",
    "tuple[int, int]": "TaskId",
}
_OBJECTS: Final = {
    "engine": "Any",
    "file_name": "str | None",
    "key": "str | None",
    "parallelism": "Any",
    "parallelisms": "Any",
    "target": "Any",
    "targets": "Any",
    "tensor": "Tensor",
    "writer_partition": "Any",
    "writer_partitions": "Any",
}
# "name: type = default", as pybind11 writes it; a default that is an object is shown by its repr.
_ARGUMENT: Final = re.compile(
    r"(\*?\w+)(?:: ([\w.]+(?:\[[^:=]*\])?))?(?: = (<.*?>|'.*?'|[^,]+))?(?:, |$)"
)

HEAD: Final = '''"""Every method of the binding, typed, as the two mirrors have them.

Written by ``scripts/engine_stub.py`` from {wheel}; don't edit it.
Nothing here runs: it tells type checkers, editors and ``help()`` what the mirrors answer.
"""

# ruff: noqa: E501 - summaries that are the binding's own
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn, TypeAlias, overload

from aiomooncake.config import ReplicateConfig
from aiomooncake.engine.protocol import (
    Allocated,
    Mounted,
    NativeBufferHandle,
    NativeReplica,
    NativeTask,
    TaskId,
)

__all__ = ["AwaitableMethods", "BlockingMethods"]

Config: TypeAlias = ReplicateConfig | Any
"""Placement options: ours, or the binding's own, which has no types."""

Tensor: TypeAlias = Any
"""A ``torch.Tensor``: torch is not needed to use the others."""

Value: TypeAlias = Any
"""Anything with the buffer protocol. The binding counts items, not bytes."""

_DEFAULT: Final = ReplicateConfig()
'''


@dataclass(frozen=True)
class Argument:
    """One argument of a method, in Python's terms."""

    name: str
    type: str
    default: str | None

    def __str__(self) -> str:
        default = "" if self.default is None else f" = {self.default}"
        return f"{self.name}: {self.type}{default}"


@dataclass(frozen=True)
class Method:
    """A method of the binding.

    Attributes:
        name: Its name.
        arguments: What it takes.
        answer: The type of what it answers.
        doc: What it does, and what the answer means.
    """

    name: str
    arguments: tuple[Argument, ...]
    answer: str
    doc: tuple[str, str]

    def written(self, *, awaitable: bool) -> Iterator[str]:
        """Write it as a method of a class."""
        parts = ["self", *self.parameters()]
        places = [place for place, each in enumerate(self.arguments, 1) if each.default is not None]
        required = [p for p, each in enumerate(self.arguments, 1) if each.default is None]
        if places and any(place > places[0] for place in required if parts[place][0] != "*"):
            # The binding takes an argument without a default after one with: by name, then.
            first = places[0]
            bare = [part.partition(" = ")[0] for part in parts]
            yield from self._overload(bare, awaitable=awaitable)
            yield from self._overload(
                [*parts[:first], "*", *bare[first + 1 :]], awaitable=awaitable
            )
            parts = [*parts[: first + 1], *(f'{part} = ""' for part in parts[first + 1 :])]
        yield from self._signature(parts, awaitable=awaitable)
        summary, answer = self.doc
        if not answer:
            yield f'        """{summary}."""'
            return
        yield f'        """{summary}.'
        yield ""
        yield "        Returns:"
        yield from (f"            {line}" for line in wrap(answer, _WIDTH - 12))
        yield '        """'

    def parameters(self) -> list[str]:
        """Write its arguments, without ``self``."""
        shown = [str(argument) for argument in self.arguments]
        return [*shown, "/"] if self.name in _POSITIONAL else shown

    def _overload(self, parts: list[str], *, awaitable: bool) -> Iterator[str]:
        yield "    @overload"
        yield from self._signature(parts, awaitable=awaitable, body=" ...")

    def _signature(self, parts: list[str], *, awaitable: bool, body: str = "") -> Iterator[str]:
        """Lay it out as ruff's formatter does."""
        head = f"    {'async ' if awaitable else ''}def {self.name}("
        tail = f") -> {self.answer}:{body}"
        joined = ", ".join(parts)
        if len(head + joined + tail) <= _WIDTH:
            yield head + joined + tail
            return
        yield head
        if len(joined) + 8 <= _WIDTH:
            yield f"        {joined}"
        else:
            yield from (f"        {part}," for part in parts)
        yield f"    {tail}"


def method_of(name: str, doc: str) -> Method:
    """Read one method of the binding.

    Raises:
        ValueError: It is not in :data:`ANSWERS`, or its docstring is of another shape.
    """
    if name not in ANSWERS:
        raise ValueError(f"{name} is new: say in ANSWERS what it does and answers")
    line = next((line for line in doc.splitlines() if f"{name}(self: " in line), None)
    if line is None:
        raise ValueError(f"{name} has no signature that can be read: {doc[:200]!r}")
    given = line[line.index("(self: ") + 7 : line.rindex(") -> ")].partition(", ")[2]
    arguments = tuple(_arguments(name, given))
    summary, answer, meaning = ANSWERS[name]
    if not summary:
        # The paragraph below the signature, up to what is explained argument by argument.
        told = re.search(r"\n\n(.+?)(?:\n\n|\nArgs|$)", doc.strip(), re.DOTALL)
        if told is None:
            raise ValueError(f"{name} has no description: say in ANSWERS what it does")
        summary = told[1].partition(". ")[0].partition(".\n")[0].rstrip(".").replace("\n", " ")
    return Method(name, arguments, answer, (summary, meaning))


def _arguments(name: str, given: str) -> Iterator[Argument]:
    place = 0
    for number, found in enumerate(_ARGUMENT.finditer(given)):
        if found.start() != place:
            break
        place = found.end()
        argument, kind, default = found.groups()
        if argument == f"arg{number}":
            argument = _POSITIONAL[name][number]
        if argument.startswith("*"):
            typed = "Value"
        elif kind == "object":
            typed = _OBJECTS[argument]
        else:
            typed = _TYPES[kind]
        if default is not None and typed == "Config":
            default = "_DEFAULT"
        yield Argument(argument, typed, default.replace("'", '"') if default else default)
    if place != len(given):
        raise ValueError(f"{name} has arguments that can't be read: {given[place:]!r}")


def methods_of(store_class: type[Any]) -> list[Method]:
    """Read every method of a store class.

    Raises:
        ValueError: One is new or gone, or can't be read.
    """
    names = find_methods(store_class)
    gone = sorted(set(ANSWERS) - names)
    if gone:
        raise ValueError(f"the binding has no {', '.join(gone)} any more: take it out of ANSWERS")
    return [method_of(name, getattr(store_class, name).__doc__ or "") for name in sorted(names)]


def module(methods: list[Method], wheel: str) -> str:
    """Write the whole module."""
    lines = [HEAD.format(wheel=wheel), ""]
    for awaitable, cls, what in (
        (True, "AwaitableMethods", "The binding's methods as coroutines, for ``store.engine``."),
        (False, "BlockingMethods", "The binding's methods as they are, for ``store.blocking``."),
    ):
        lines += [f"class {cls}:", f'    """{what}"""', ""]
        for method in methods:
            lines += [*method.written(awaitable=awaitable), ""]
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def fresh() -> str:
    """Write the module for the engine that is installed."""
    binding = load_binding()
    return module(methods_of(binding.store_class), f"the engine's wheel {binding.version}")


if __name__ == "__main__":
    MODULE.write_text(fresh(), encoding="utf-8")
