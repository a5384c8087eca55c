"""The verbs of tensors as a user's type checker sees them; nothing of it runs.

To mypy torch may be unknown, and anything a tensor then, so the mistakes are Pyright's to find.
"""

from __future__ import annotations

import mmap
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aiomooncake import Store
from aiomooncake.buffers import Buffer
from aiomooncake.tensors import Axis

if TYPE_CHECKING:
    import torch

Arrays = npt.NDArray[Any]
axes = [Axis("tp", 0, 2, split_dim=1)]


async def storing(store: Store, tensor: torch.Tensor, memory: mmap.mmap) -> None:
    await store.put_tensor("k", tensor, tp_size=2, split_dim=1)
    await store.put_tensor("k", np.ones(3, dtype=np.float32))
    for buffer in (b"x", bytearray(1), memoryview(b"x"), array("d", [1.0]), memory):
        await store.upsert_tensor("k", buffer)
    tensors = {"a": tensor}
    await store.put_tensors(tensors)
    await store.put_tensors({"a": tensor, "b": np.ones(3), "c": b"x"})
    await store.put_tensor_shard("k", tensor, axes)
    await store.save_tensors("file", list(tensors))


async def reading(store: Store, buffer: Buffer) -> None:
    tensor: torch.Tensor | None = await store.get_tensor("k", tp_rank=0, tp_size=2)
    array: Arrays | None = await store.get_tensor("k", like="numpy")
    many: list[Arrays | None] = await store.get_tensors(["k"], like="numpy")
    shard: torch.Tensor | None = await store.get_tensor_shard("k", axes)
    into: Arrays | None = await store.get_tensor_into("k", buffer[:512], like="numpy")
    del tensor, array, many, shard, into


async def mistakes(store: Store) -> None:
    numbers = [1.0]
    await store.put_tensor("k", numbers)  # type: ignore[arg-type,unused-ignore]  # pyright: ignore[reportArgumentType]
    await store.put_tensor("k", "text")  # type: ignore[arg-type,unused-ignore]  # pyright: ignore[reportArgumentType]
    await store.upsert_tensor("k", 1j)  # type: ignore[arg-type,unused-ignore]  # pyright: ignore[reportArgumentType]
    await store.put_tensors({"k": 1.0})  # type: ignore[dict-item,unused-ignore]  # pyright: ignore[reportArgumentType]
    await store.put_tensor_shard("k", numbers, axes)  # type: ignore[arg-type,unused-ignore]  # pyright: ignore[reportArgumentType]
