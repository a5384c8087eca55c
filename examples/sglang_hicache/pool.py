"""Host memory in pages, as SGLang's host pools lay it out, over NumPy arrays.

A pool knows where the bytes of a page lie (``get_page_buffer_meta``); ``host_indices`` name tokens,
``page_size`` of them to a page. Anything that NumPy can read as integers will do for them, a torch
tensor too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["HostPool", "MHAHostPool", "MLAHostPool", "StatePool"]

Array = npt.NDArray[Any]
Places = tuple[list[int], list[int]]
"""Addresses and sizes, object by object."""


class HostPool:
    """Pages of tokens in one array.

    Attributes:
        kv_buffer: The array.
        page_size: Tokens of a page.
        size: Tokens of all pages.
    """

    def __init__(self, kv_buffer: Array, pages: int, page_size: int) -> None:
        self.kv_buffer = kv_buffer
        self.page_size = page_size
        self.size = pages * page_size

    def get_hybrid_pool_buffer(self) -> list[Array]:
        """List the arrays that must be registered."""
        return [self.kv_buffer]

    def get_page_buffer_meta(self, indices: Any) -> Places:
        """Tell where the objects of pages lie."""
        raise NotImplementedError

    def indices(self, pages: Iterable[int]) -> npt.NDArray[np.int64]:
        """Name the tokens of pages, as the cache's allocator does."""
        first = np.fromiter(pages, np.int64) * self.page_size
        named: npt.NDArray[np.int64] = (first[:, None] + np.arange(self.page_size)).ravel()
        return named

    def _pages(self, indices: Any) -> npt.NDArray[np.int64]:
        return np.asarray(indices, np.int64)[:: self.page_size] // self.page_size


class MHAHostPool(HostPool):
    """Keys and values of all heads: a page is two objects, K and V, or two for each part of it.

    The heads come before the tokens (SGLang's layout ``page_head``), so that a page can be cut
    by heads.
    """

    layout = "page_head"

    def __init__(
        self,
        pages: int,
        page_size: int = 64,
        *,
        layers: int = 2,
        heads: int = 4,
        head_dim: int = 32,
        dtype: npt.DTypeLike = np.float16,
    ) -> None:
        shape = (2, pages, heads, page_size, layers, head_dim)
        super().__init__(np.zeros(shape, dtype), pages, page_size)
        self._half = self.kv_buffer.nbytes // 2
        self._nbytes = self._half // pages

    @property
    def k_buffer(self) -> Array:
        """The keys."""
        half: Array = self.kv_buffer[0]
        return half

    @property
    def v_buffer(self) -> Array:
        """The values."""
        half: Array = self.kv_buffer[1]
        return half

    def get_ksize_per_token(self) -> int:
        """Bytes of a token's keys."""
        return self._nbytes // self.page_size

    def page(self, number: int) -> Array:
        """Look at a page: K and V of all its heads."""
        both: Array = self.kv_buffer[:, number]
        return both

    def get_page_buffer_meta(self, indices: Any) -> Places:
        """Tell where K and V of each page lie."""
        return self.get_split_heads_page_buffer_meta(indices, 1)

    def get_split_heads_page_buffer_meta(self, indices: Any, split_factor: int) -> Places:
        """Tell where K and V of each part of each page lie."""
        part = self._nbytes // split_factor
        k = self.kv_buffer.ctypes.data + self._pages(indices)[:, None] * self._nbytes
        k = k + np.arange(split_factor) * part
        places: list[int] = np.stack([k, k + self._half], axis=-1).ravel().tolist()
        return places, [part] * len(places)


class MLAHostPool(HostPool):
    """Compressed keys and values: a page is one object.

    Args:
        pages: How many.
        page_size: Tokens of a page.
        layers: Layers of the model.
        dim: Numbers of a token in each layer.
        dtype: Their type.
        layout: ``"page_first"``: a page in one piece; ``"layer_first"``: in one piece per layer.
    """

    def __init__(
        self,
        pages: int,
        page_size: int = 64,
        *,
        layers: int = 2,
        dim: int = 64,
        dtype: npt.DTypeLike = np.float16,
        layout: str = "page_first",
    ) -> None:
        self.layout = layout
        by_page = layout == "page_first"
        shape = (pages, layers, page_size, dim) if by_page else (layers, pages, page_size, dim)
        super().__init__(np.zeros(shape, dtype), pages, page_size)
        self._nbytes = self.kv_buffer.nbytes // pages
        self._layers = layers

    def get_ksize_per_token(self) -> int:
        """Bytes of a token."""
        return self._nbytes // self.page_size

    def page(self, number: int) -> Array:
        """Look at a page."""
        whole: Array = (
            self.kv_buffer[number] if self.layout == "page_first" else self.kv_buffer[:, number]
        )
        return whole

    def get_page_buffer_meta(self, indices: Any) -> Places:
        """Tell where the one piece of each page lies, or its piece of each layer."""
        first, pages = self.kv_buffer.ctypes.data, self._pages(indices)
        if self.layout == "page_first":
            places: list[int] = (first + pages * self._nbytes).tolist()
            return places, [self._nbytes] * len(places)
        piece = self._nbytes // self._layers
        layers = np.arange(self._layers) * (self.kv_buffer.nbytes // self._layers)
        places = (first + pages[:, None] * piece + layers).ravel().tolist()
        return places, [piece] * len(places)


class StatePool:
    """States of a model with Mamba layers: for each slot a temporal one and some of convolutions.

    Attributes:
        page_size: A slot is a page.
        kv_buffer: None: this pool has no keys and values.
        temporal_state_elem_size: Bytes of a number of the temporal state.
        conv_buffer: One array for each convolution.
    """

    kv_buffer = None
    page_size = 1

    def __init__(self, slots: int, *, temporal: int = 512, convs: int = 2, conv: int = 128) -> None:
        self.temporal_buffer = np.zeros((slots, temporal), np.float32)
        self.conv_buffer = [np.zeros((slots, conv), np.float32) for _ in range(convs)]
        self.temporal_state_elem_size = self.temporal_buffer.itemsize

    def get_hybrid_pool_buffer(self) -> list[Array]:
        """List the arrays that must be registered."""
        return [self.temporal_buffer, *self.conv_buffer]

    def get_page_buffer_meta(self, indices: Any) -> Places:
        """Tell where the states of each slot lie."""
        slots = np.asarray(indices, np.int64)
        parts = self.get_hybrid_pool_buffer()
        places = np.stack([part.ctypes.data + slots * part[0].nbytes for part in parts], axis=1)
        return places.ravel().tolist(), [part[0].nbytes for part in parts] * len(slots)
