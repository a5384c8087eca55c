"""The verbs that store and read tensors, in the format of the binding's own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, overload

import anyio.to_thread

from aiomooncake._safetensors import read_elements, read_entries, write_file
from aiomooncake._tasks import caught, together
from aiomooncake._tensor_format import (
    HEADER_SIZE,
    MAX_DIMS,
    Axis,
    Header,
    axes_of,
    check_index,
    has_room,
    manifest,
    manifest_key,
    shard_key,
)
from aiomooncake._tensor_memory import Elements, Like, decode, dtype_of, is_of_torch, memory_at
from aiomooncake._tensor_reads import (
    OwnGets,
    OwnRead,
    Shards,
    answered,
    copied,
    imported,
    joined,
    tensor_of,
)
from aiomooncake._tensor_writes import SLICE_KEYS, Split, Write, shard_write, sliced, writes_of
from aiomooncake.avoiding import suspect_owners
from aiomooncake.batching import WIDTH
from aiomooncake.buffers import Buffer, Place, Slice
from aiomooncake.errors import (
    BufferTooSmallError,
    InvalidArgumentError,
    MooncakeError,
    ObjectNotFoundError,
    SerializationError,
)
from aiomooncake.moves import Progress
from aiomooncake.observe.logs import StoreLog
from aiomooncake.transfers import LARGE, MANY_KEYS
from aiomooncake.zero_copy import ZeroCopyVerbs

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy.typing as npt
    import torch
    from typing_extensions import Buffer as HasBuffer  # for type checkers only, which bring it

    from aiomooncake.batching import Batching
    from aiomooncake.config import ReplicateConfig, StoreConfig

    TensorLike: TypeAlias = torch.Tensor | npt.NDArray[Any] | HasBuffer

__all__ = ["HEADER_SIZE", "Axis", "TensorVerbs", "tensor_in"]

# Bytes of a file that are in memory at once, if no tensor is larger.
_FILE_BYTES: Final = 64 << 20


class TensorVerbs(ZeroCopyVerbs):
    """What a store does with tensors. Part of :class:`Store`."""

    config: StoreConfig | None
    _tensor_gets: tuple[Batching, OwnGets] | None = None

    # What the store itself does for these verbs.
    if TYPE_CHECKING:

        async def _write(
            self, verb: str, key: str, value: Any, config: ReplicateConfig | None
        ) -> None: ...
        async def _get_all(self, keys: list[str]) -> list[Any]: ...

    # ------------------------------------------------------------------ storing

    async def put_tensor(
        self,
        key: str,
        tensor: TensorLike,
        *,
        tp_size: int | None = None,
        split_dim: int = 0,
        config: ReplicateConfig | None = None,
    ) -> None:
        """Store a tensor, as the binding's own ``put_tensor`` does; otherwise as :meth:`put`.

        Args:
            key: The key.
            tensor: A ``torch.Tensor`` in the CPU's memory, a NumPy array, or anything else with
                the buffer protocol. Its elements are read from where they are; a strided one is
                copied, off the loop. What it requires of gradients is not stored.
            tp_size: Split it for so many ranks: each shard becomes a value of its own, named
                ``{key}_tp_{rank}``, and none is named by the key itself.
            split_dim: The dimension that is split, into equal shards; with ``tp_size``.
            config: Placement options; a routing group is that of all shards.

        Raises:
            InvalidArgumentError: No such tensor: a type that values can't have, another device,
                or it can't be split so.
            MooncakeError: Any other failure; of some shards others may be stored all the same.
        """
        await self._put_tensor("put", key, tensor, Split(tp_size, split_dim), config)

    async def upsert_tensor(
        self,
        key: str,
        tensor: TensorLike,
        *,
        tp_size: int | None = None,
        split_dim: int = 0,
        config: ReplicateConfig | None = None,
    ) -> None:
        """Store a tensor in place of the one that is there; as :meth:`put_tensor`, :meth:`upsert`.

        A large one is copied, off the loop.
        """
        await self._put_tensor("upsert", key, tensor, Split(tp_size, split_dim), config)

    async def put_tensors(
        self,
        items: Mapping[str, TensorLike],
        *,
        tp_size: int | None = None,
        split_dim: int = 0,
        config: ReplicateConfig | None = None,
        return_exceptions: bool = False,
    ) -> dict[str, MooncakeError | None]:
        """Store many tensors; each as :meth:`put_tensor` does.

        Returns:
            One entry per key: None, or with ``return_exceptions`` the error of that key.

        Raises:
            InvalidArgumentError: A key or tensor is bad; then nothing was stored.
            BatchError: Some keys failed, the others are stored; ``.results`` has one entry per
                key.
        """
        if not isinstance(items, Mapping):
            raise InvalidArgumentError(
                f"put_tensors needs a mapping from key to tensor, not {type(items).__name__}",
                rank=self.rank,
            )
        pairs = list(items.items())  # a copy: the caller may change the mapping meanwhile
        groups = self._groups_of(config, len(pairs), "put_tensors")
        parts = Split(tp_size, split_dim)
        writes: list[Write] = []
        bounds = [0]
        for place, ((key, tensor), group) in enumerate(zip(pairs, groups, strict=True)):
            if place and not place % SLICE_KEYS:
                await asyncio.sleep(0)  # many of them take their time
            one = replace(config, group_ids=[group]) if config and group is not None else config
            self._check_key(key, "put_tensors")
            writes += writes_of("put_tensors", key, tensor, parts, config=one, rank=self.rank)
            bounds.append(len(writes))
        answers = await self._write_tensors("put", writes)
        results: dict[str, MooncakeError | None] = {}
        for (key, _), (start, end) in zip(pairs, pairwise(bounds), strict=True):
            results[key] = _first(answers[start:end])
        self._settle(
            "put_tensors", results, list(results.values()), return_exceptions=return_exceptions
        )
        return results

    async def put_tensor_shard(
        self,
        key: str,
        shard: TensorLike,
        axes: Sequence[Axis],
        *,
        config: ReplicateConfig | None = None,
    ) -> None:
        """Store what one rank has of a tensor, as ``put_tensor_with_parallelism`` names it.

        Where the tensor is split, the other ranks' shards are as large, and the engine is told
        under a key of its own how to put them together.

        Args:
            key: The key of the whole; that of the shard follows from it and the axes.
            shard: The shard itself, as for :meth:`put_tensor`.
            axes: Where it belongs; one of each kind at most, in any order.
            config: Placement options.
        """
        self._check_key(key, "put_tensor_shard")
        self._groups_of(config, 1, "put_tensor_shard")
        write = shard_write(
            "put_tensor_shard", key, shard, axes_of(axes), config=config, rank=self.rank
        )
        await self._write_tensor("put", write)
        axis = write.header.tp_axis
        if axis is not None:
            await self._write("put", manifest_key(key), manifest(write.header, axis), config)

    # ------------------------------------------------------------------ reading

    @overload
    async def get_tensor(
        self,
        key: str,
        *,
        tp_rank: int | None = ...,
        tp_size: int | None = ...,
        like: Literal["torch"] = ...,
    ) -> torch.Tensor | None: ...
    @overload
    async def get_tensor(
        self,
        key: str,
        *,
        tp_rank: int | None = ...,
        tp_size: int | None = ...,
        like: Literal["numpy"],
    ) -> npt.NDArray[Any] | None: ...
    async def get_tensor(
        self,
        key: str,
        *,
        tp_rank: int | None = None,
        tp_size: int | None = None,
        like: Like = "torch",
    ) -> Any:
        """Read a tensor, also one that the binding's own ``put_tensor`` has stored.

        Args:
            key: The key.
            tp_rank: Read the shard of this rank; with None all shards are read and put together.
            tp_size: For how many ranks it was split; ``tp_rank`` needs it.
            like: Whose tensors: ``"torch"`` or ``"numpy"``, which is imported at the first use.

        Returns:
            A tensor in memory of its own, which may be written to; None when the key is not there.

        Raises:
            SerializationError: The value is no tensor, or of a type that NumPy does not have.
            InvalidArgumentError: It was split in another way.
            ObjectNotFoundError: Some of its shards are there and others are not.
            ImportError: PyTorch (or NumPy) is not installed.
            MooncakeError: The read failed; a failure is never reported as a miss.
        """
        self._check_key(key, "get_tensor")
        shards = Shards.of(tp_rank, tp_size)
        await imported(like)
        if len(shards.axes) <= 1:
            return await self._get_own("get_tensor", shards.names(key)[0], like, shards.axes)
        (answer,) = await self._get_tensors("get_tensor", [key], shards, like)
        if isinstance(answer, MooncakeError):
            raise answer
        return answer

    @overload
    async def get_tensors(
        self,
        keys: Iterable[str],
        *,
        tp_rank: int | None = ...,
        tp_size: int | None = ...,
        like: Literal["torch"] = ...,
        return_exceptions: bool = ...,
    ) -> list[torch.Tensor | None]: ...
    @overload
    async def get_tensors(
        self,
        keys: Iterable[str],
        *,
        tp_rank: int | None = ...,
        tp_size: int | None = ...,
        like: Literal["numpy"],
        return_exceptions: bool = ...,
    ) -> list[npt.NDArray[Any] | None]: ...
    async def get_tensors(
        self,
        keys: Iterable[str],
        *,
        tp_rank: int | None = None,
        tp_size: int | None = None,
        like: Like = "torch",
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Read many tensors: a list aligned with the keys, None where a key is not there.

        Args:
            keys: Keys; one given twice is read once, and answered by two tensors.
            tp_rank: As for :meth:`get_tensor`.
            tp_size: As for :meth:`get_tensor`.
            like: As for :meth:`get_tensor`.
            return_exceptions: Put the error of a key in its place instead of raising.

        Raises:
            BatchError: Some keys failed; ``.results`` has a tensor, None or an error for each.
        """
        wanted = self._check_keys(keys, "get_tensors")
        shards = Shards.of(tp_rank, tp_size)
        await imported(like)
        answers = await self._get_tensors("get_tensors", wanted, shards, like)
        self._settle("get_tensors", answers, answers, return_exceptions=return_exceptions)
        return answers

    @overload
    async def get_tensor_shard(
        self, key: str, axes: Sequence[Axis], *, like: Literal["torch"] = ...
    ) -> torch.Tensor | None: ...
    @overload
    async def get_tensor_shard(
        self, key: str, axes: Sequence[Axis], *, like: Literal["numpy"]
    ) -> npt.NDArray[Any] | None: ...
    async def get_tensor_shard(
        self, key: str, axes: Sequence[Axis], *, like: Like = "torch"
    ) -> Any:
        """Read what one rank has of a tensor; otherwise as :meth:`get_tensor`.

        Args:
            key: The key of the whole.
            axes: Which shard, as it was given to :meth:`put_tensor_shard`.
            like: As for :meth:`get_tensor`.
        """
        self._check_key(key, "get_tensor_shard")
        places = axes_of(axes)
        await imported(like)
        return await self._get_own("get_tensor_shard", shard_key(key, places), like, places)

    # ------------------------------------------------------------------ memory of the caller

    async def put_tensor_from(
        self,
        key: str,
        memory: Place,
        *,
        config: ReplicateConfig | None = None,
        on_release: Callable[[], object] | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        """Store a tensor that lies in registered memory with its header; as :meth:`put_from`.

        Args:
            key: The key.
            memory: Where :func:`aiomooncake.tensors.tensor_in` has put a tensor, or
                :meth:`get_tensor_into`; what is behind it is left out.
            config: Placement options.
            on_release: As for :meth:`put_from`.
            on_progress: As for :meth:`put_from`.
        """
        with self._given_back(on_release):
            self._check_key(key, "put_tensor_from")
            place = self._filled("put_tensor_from", key, memory)
        await self.put_from(
            key, place, config=config, on_release=on_release, on_progress=on_progress
        )

    async def put_tensors_from(
        self,
        items: Mapping[str, Place],
        *,
        config: ReplicateConfig | None = None,
        return_exceptions: bool = False,
        on_release: Callable[[], object] | None = None,
    ) -> dict[str, MooncakeError | None]:
        """Store many tensors from registered memory; :meth:`put_tensor_from`, many at a time."""
        with self._given_back(on_release):
            places = {
                key: self._filled("put_tensors_from", key, memory)
                for key, memory in self._places_of("put_tensors_from", items).items()
            }
        return await self.put_many_from(
            places, config=config, return_exceptions=return_exceptions, on_release=on_release
        )

    @overload
    async def get_tensor_into(
        self,
        key: str,
        memory: Place,
        *,
        like: Literal["torch"] = ...,
        on_release: Callable[[], object] | None = ...,
        on_progress: Progress | None = ...,
    ) -> torch.Tensor | None: ...
    @overload
    async def get_tensor_into(
        self,
        key: str,
        memory: Place,
        *,
        like: Literal["numpy"],
        on_release: Callable[[], object] | None = ...,
        on_progress: Progress | None = ...,
    ) -> npt.NDArray[Any] | None: ...
    async def get_tensor_into(
        self,
        key: str,
        memory: Place,
        *,
        like: Like = "torch",
        on_release: Callable[[], object] | None = None,
        on_progress: Progress | None = None,
    ) -> Any:
        """Read a tensor into registered memory; otherwise as :meth:`get_into`.

        Args:
            key: The key.
            memory: Room for the header too: :data:`aiomooncake.tensors.HEADER_SIZE` bytes.
            like: As for :meth:`get_tensor`.
            on_release: As for :meth:`put_from`.
            on_progress: As for :meth:`put_from`.

        Returns:
            A tensor that *is* the memory: what is written to one is seen in the other. None when
            the key is not there.

        Raises:
            BufferTooSmallError: The tensor is larger than the memory.
            SerializationError: The value is no tensor; the memory has its bytes.
        """
        with self._given_back(on_release):
            self._check_key(key, "get_tensor_into")
            self._check_place(memory, "get_tensor_into")
            await imported(like)
        try:
            read = await self.get_into(key, memory, on_release=on_release, on_progress=on_progress)
        except BufferTooSmallError as exc:
            raise _no_room("get_tensor_into", memory, key, exc) from None
        return None if read is None else self._lying_in("get_tensor_into", memory, read, key, like)

    async def get_tensors_into(
        self,
        items: Mapping[str, Place],
        *,
        like: Like = "torch",
        return_exceptions: bool = False,
        on_release: Callable[[], object] | None = None,
    ) -> list[Any]:
        """Read many tensors into registered memory; :meth:`get_tensor_into`, many at a time.

        Returns:
            A list aligned with the keys: tensors, or None where a key is not there.

        Raises:
            BatchError: Some keys failed; ``.results`` has a tensor, None or an error for each.
        """
        with self._given_back(on_release):
            places = self._places_of("get_tensors_into", items)
            for memory in places.values():
                self._check_place(memory, "get_tensors_into")
            await imported(like)
        read = await self.get_many_into(places, return_exceptions=True, on_release=on_release)
        answers = [
            self._answer_in(memory, size, key, like)
            for (key, memory), size in zip(places.items(), read, strict=True)
        ]
        self._settle("get_tensors_into", answers, answers, return_exceptions=return_exceptions)
        return answers

    # ------------------------------------------------------------------ files

    async def save_tensors(self, path: str | os.PathLike[str], keys: Iterable[str]) -> None:
        """Write tensors into a file of safetensors, each under its key.

        All of them are in memory meanwhile. The file is there when all of it is written, in place
        of one of that name.

        Args:
            path: The file.
            keys: Keys of what is stored; tensors of yours are stored by :meth:`put_tensors` first.

        Raises:
            ObjectNotFoundError: A key is not there; then nothing was written.
            MooncakeError: A read failed, or a value is no tensor; likewise.
            OSError: The file can't be written.
        """
        if isinstance(keys, Mapping):
            raise InvalidArgumentError(
                "save_tensors takes keys, and saves what is stored under them, not a "
                f"{type(keys).__name__}: for tensors of yours await put_tensors(...) first, then "
                "pass list(tensors)",
                rank=self.rank,
            )
        names = list(dict.fromkeys(self._check_keys(keys, "save_tensors")))
        tensors: dict[str, tuple[Header, memoryview]] = {}
        for name, value in zip(names, await self._get_all(names), strict=True):
            if isinstance(value, MooncakeError):
                raise value
            if value is None:
                raise ObjectNotFoundError(
                    f"save_tensors: there is no {name!r}, so nothing was written",
                    key=name,
                    rank=self.rank,
                )
            header = Header.parse(value, name)
            tensors[name] = header, memoryview(value)[header.offset : header.end]
        await anyio.to_thread.run_sync(write_file, Path(path), tensors)

    async def load_tensors(
        self,
        path: str | os.PathLike[str],
        *,
        prefix: str = "",
        config: ReplicateConfig | None = None,
    ) -> list[str]:
        """Store the tensors of a file of safetensors, each under its name; as :meth:`put_tensor`.

        Args:
            path: The file; it is read a part at a time.
            prefix: What the keys begin with, before the names.
            config: Placement options, without ``group_ids``.

        Returns:
            The keys, in the order of the file.

        Raises:
            SerializationError: No such file, or a type that values can't have; nothing was stored.
            BatchError: Some keys failed, and what is behind them in the file was not stored;
                ``.results`` has an entry for each that was tried.
            OSError: The file can't be read.
        """
        if config is not None and config.group_ids:
            raise InvalidArgumentError(
                "load_tensors takes no group_ids, since the file tells the keys; use put_tensors",
                rank=self.rank,
            )
        self._groups_of(config, 1, "load_tensors")
        entries = await anyio.to_thread.run_sync(read_entries, Path(path))
        for entry in entries:
            self._check_key(prefix + entry.name, "load_tensors")
        results: dict[str, MooncakeError | None] = {}
        for some in sliced(entries, lambda entry: entry.header.nbytes, _FILE_BYTES):
            found = await anyio.to_thread.run_sync(read_elements, Path(path), some)
            writes = [
                Write(prefix + entry.name, entry.header, Elements(entry.header, elements), config)
                for entry, elements in zip(some, found, strict=True)
            ]
            answers = await self._write_tensors("put", writes)
            results |= {write.key: answer for write, answer in zip(writes, answers, strict=True)}
            self._settle("load_tensors", results, answers, return_exceptions=False)
        return list(results)

    # ------------------------------------------------------------------ how

    async def _put_tensor(
        self, way: str, key: str, tensor: Any, parts: Split, config: ReplicateConfig | None
    ) -> None:
        verb = f"{way}_tensor"
        self._check_key(key, verb)
        self._groups_of(config, 1, verb)
        writes = writes_of(verb, key, tensor, parts, config=config, rank=self.rank)
        if len(writes) == 1:
            await self._write_tensor(way, writes[0])
            return
        error = _first(await self._write_tensors(way, writes))
        if error is not None:
            raise error

    async def _write_tensors(self, way: str, writes: Sequence[Write]) -> list[MooncakeError | None]:
        answers: list[MooncakeError | None] = []
        for some in sliced(writes, lambda write: write.copied):
            answers += await together(caught(self._write_tensor, way, write) for write in some)
        return answers

    async def _write_tensor(self, way: str, write: Write) -> None:
        if write.is_small:  # what is stored is what was given at the call
            await self._write(way, write.key, write.value(), write.config)
            return
        job = partial(write.job, self._transfers, replace=way == "upsert")
        await self._merging().write_alone(
            self._client.bulk, f"{way}_tensor", write.key, job, drain=True
        )

    async def _get_own(self, verb: str, key: str, like: Like, axes: Sequence[Axis]) -> Any:
        """Read one value, and make a tensor of it that nobody else has."""
        read = OwnRead(key)
        value = await self._gets_for_tensors().ask(read)
        if value is LARGE:
            client, get = self._client, self._transfers.get_large
            knock = partial(suspect_owners, client, [key])
            value = await client.run(client.bulk, "get", get, key, reads=True, knock=knock)
        elif read.shared:
            value = await copied(value)
        return tensor_of(key, value, like, verb=verb, axes=axes)

    def _gets_for_tensors(self) -> OwnGets:
        batching = self._merging()
        if self._tensor_gets is None or self._tensor_gets[0] is not batching:
            merge = self.config is None or self.config.merge
            lane = OwnGets(
                self._client,
                self._transfers,
                "get",
                lambda calls: self._transfers.get_keys([call.key for call in calls]),
                width=WIDTH if merge else sys.maxsize,
                max_keys=MANY_KEYS if merge else 1,
            )
            self._tensor_gets = batching, lane
        return self._tensor_gets[1]

    async def _get_tensors(
        self, verb: str, keys: Sequence[str], shards: Shards, like: Like
    ) -> list[Any]:
        """Read the values of each key, and make one tensor of them, or an error."""
        names = list(dict.fromkeys(name for key in keys for name in shards.names(key)))
        values = dict(zip(names, await self._get_all(names), strict=True))
        answers: list[Any] = []
        seen: set[str] = set()
        for place, key in enumerate(keys):
            if place and not place % SLICE_KEYS:
                await asyncio.sleep(0)  # many of them take their time
            names = shards.names(key)
            found = [values[name] for name in names]
            if key in seen:
                found = [await copied(value) for value in found]
            tensors = [
                value
                if isinstance(value, MooncakeError)
                else answered(tensor_of, name, value, like, verb=verb, axes=shards.where(i))
                for i, (name, value) in enumerate(zip(names, found, strict=True))
            ]
            seen.add(key)
            answers.append(
                tensors[0]
                if len(names) == 1
                else await joined(names, found, tensors, like, verb=verb)
            )
        return answers

    @contextlib.contextmanager
    def _given_back(self, on_release: Callable[[], object] | None) -> Iterator[None]:
        """Tell that the memory is the caller's again when a call is refused beforehand."""
        try:
            yield
        except BaseException:
            log = StoreLog(self.rank, self.hostname)
            try:
                if on_release is not None:
                    on_release()
            except Exception:
                log.exception("an on_release callback failed")
            raise

    def _places_of(self, verb: str, items: Mapping[str, Place]) -> dict[str, Place]:
        """Copy a mapping, which the caller may change meanwhile."""
        if not isinstance(items, Mapping):
            raise InvalidArgumentError(
                f"{verb} needs a mapping from key to memory, not {type(items).__name__}",
                rank=self.rank,
            )
        return dict(items)

    def _filled(self, verb: str, key: str, memory: Place) -> Place:
        """Find how much of the memory a tensor fills."""
        try:
            header = Header.parse(self._view_in(memory, verb), key, exact=False)
        except SerializationError as exc:
            raise InvalidArgumentError(
                f"{verb} of {key!r}: the memory does not hold a tensor with its header; put it "
                f"there with tensor_in() ({exc})",
                key=key,
                rank=self.rank,
            ) from None
        return memory[: header.end]

    def _answer_in(self, memory: Place, read: Any, key: str, like: Like) -> Any:
        """Make a tensor of what was read into memory, or find what went wrong with it."""
        if isinstance(read, BufferTooSmallError):
            return _no_room("get_tensors_into", memory, key, read)
        if not isinstance(read, int):
            return read
        return answered(self._lying_in, "get_tensors_into", memory, read, key, like)

    def _lying_in(self, verb: str, memory: Place, nbytes: int, key: str, like: Like) -> Any:
        view = self._view_in(memory, verb)
        header = Header.parse(view, key, nbytes=nbytes)
        if (memory.address + header.offset) % header.dtype.itemsize:
            raise InvalidArgumentError(
                f"{verb} of {key!r}: the memory begins at an odd address for "
                f"{header.dtype.name}; begin at a multiple of {header.dtype.itemsize}",
                key=key,
                rank=self.rank,
            )
        return decode(header, view, like, key=key)

    def _view_in(self, memory: Place, verb: str) -> Any:
        self._check_place(memory, verb)
        return _view_of(memory)

    def _check_place(self, memory: object, verb: str) -> None:
        if not isinstance(memory, (Buffer, Slice)):
            raise InvalidArgumentError(
                f"{verb} needs registered memory (await store.register(...) or "
                f"store.allocate(...)), not {type(memory).__name__}",
                rank=self.rank,
            )


def tensor_in(memory: Place, shape: Sequence[int], dtype: Any) -> Any:
    """Put a tensor into registered memory, behind the header that ``put_tensor_from`` needs.

    Args:
        memory: What :meth:`Store.allocate` or :meth:`Store.register` gave, or a slice of it:
            :data:`HEADER_SIZE` bytes more than the elements take.
        shape: Shape of the tensor.
        dtype: Type of its elements: that of torch, or NumPy's (also by name).

    Returns:
        A tensor, of torch or NumPy as the type is, that *is* the memory: what was in it.

    Raises:
        BufferTooSmallError: The memory is too small.
        InvalidArgumentError: No such type or shape.
    """
    kind = dtype_of(dtype)
    dims = tuple(check_index(size, "shape", least=0) for size in shape)
    header = Header(kind, dims, dims)
    if header.end > memory.nbytes:
        raise BufferTooSmallError(
            f"a tensor of {header.nbytes} bytes needs {header.end} with its header, the memory has "
            f"{memory.nbytes}"
        )
    view = _view_of(memory)
    if (memory.buffer if isinstance(memory, Slice) else memory).readonly:
        raise InvalidArgumentError("tensor_in would write into read-only memory")
    if not has_room(dims):
        raise InvalidArgumentError(
            f"a tensor has {MAX_DIMS} dimensions at most, each below 2**63, not {dims}"
        )
    memoryview(view).cast("B")[:HEADER_SIZE] = header.pack()
    like: Like = "torch" if is_of_torch(dtype) else "numpy"
    return decode(header, view, like, key="")


def _view_of(memory: Place) -> Any:
    """Look at registered memory; what is made of it keeps it.

    Raises:
        InvalidArgumentError: It is closed, and may be somebody else's by now.
    """
    whole = memory.buffer if isinstance(memory, Slice) else memory
    if whole.closed:
        raise InvalidArgumentError("this buffer is closed; allocate or register a new one")
    if memory.view is not None:
        return memory.view
    return memory_at(memory.address, memory.nbytes, whole.held)


def _no_room(verb: str, memory: Place, key: str, exc: BufferTooSmallError) -> BufferTooSmallError:
    return BufferTooSmallError(
        f"{verb} of {key!r}: the tensor with its header has more than the {memory.nbytes} bytes of "
        "the memory; give as many as await store.size(key) tells",
        code=exc.code,
        key=key,
        rank=exc.rank,
    )


def _first(errors: Iterable[MooncakeError | None]) -> MooncakeError | None:
    return next((error for error in errors if error is not None), None)
