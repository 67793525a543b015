"""Owns the list of LoRA adapters in an engine's memory, and which of them live requests hold.
Never reads a file on an event loop or on the step thread, and never holds weights: an executor does."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from engine.protocol import AdapterRef, ErrorCode, RequestRejected
from engine.step import AdapterError, AdapterHost


class AdapterCache:
    """The adapter cache of one engine. Any thread may use it. The digest of its files identifies an adapter, never a
    name.

    At most `most` adapters are in memory. One that no live request holds makes room, the least recently used first, and
    is read again when a request asks for it.
    """

    def __init__(self, host: AdapterHost | None, most: int) -> None:
        """`host` is from the executor's capabilities."""
        self._host = host
        self._most = most
        self._lock = threading.Lock()
        self._loaded: OrderedDict[str, None] = OrderedDict()  # the least recently used first
        self._held: dict[str, str] = {}  # request id -> digest
        self._leaving: set[str] = set()  # to be dropped with their last holder
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-adapters")

    @property
    def loaded(self) -> tuple[str, ...]:
        """Digests of the adapters in memory, the least recently used first."""
        with self._lock:
            return tuple(self._loaded)

    async def load(self, path: str) -> str:
        """Load the adapter at `path` into memory and return its digest.

        Raises:
            RequestRejected: the adapter cannot be used, or all adapters in memory are in use.
        """
        host = self._checked("lora_path")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._load, host, path, None)
        except AdapterError as error:
            raise RequestRejected(ErrorCode.INVALID_PARAMETER, str(error), "lora_path") from error

    async def have(self, adapter: AdapterRef) -> None:
        """Load the adapter of a request into memory if it is not there.

        Raises:
            RequestRejected: its files are missing or have changed, or all adapters in memory are in use.
        """
        host = self._checked("model")
        work = asyncio.get_running_loop().run_in_executor
        while not self._use(adapter.digest):  # again after a load: it may have made room for the next one already
            try:
                await work(self._thread, self._load, host, adapter.path, adapter.digest)
            except AdapterError as error:
                text = f"The adapter {adapter.name} cannot be read again: {error}"
                raise RequestRejected(ErrorCode.ADAPTER_UNAVAILABLE, text, "model") from error

    def _checked(self, param: str) -> AdapterHost:
        if self._host is None or not self._most:
            text = "This engine serves no adapters: max_loras is 0."
            raise RequestRejected(ErrorCode.INVALID_PARAMETER, text, param, 0)
        return self._host

    def _use(self, digest: str) -> bool:
        """Whether the adapter is in memory. Marks it as the most recently used."""
        with self._lock:
            if digest in self._loaded:
                self._loaded.move_to_end(digest)
            return digest in self._loaded

    def _load(self, host: AdapterHost, path: str, expected: str | None) -> str:
        """Runs on the loading thread, one load at a time."""
        if expected is not None and self._use(expected):  # another request has loaded it meanwhile
            return expected
        digest, weights = host.read(path)
        if expected is not None and digest != expected:
            raise AdapterError("its files have changed since it was loaded: load it again.")
        with self._lock:
            if digest not in self._loaded:
                self._make_room(host)
                host.keep(digest, weights)
            self._loaded[digest] = None
            self._loaded.move_to_end(digest)
            self._leaving.discard(digest)
        return digest

    def _make_room(self, host: AdapterHost) -> None:
        if len(self._loaded) < self._most:
            return
        in_use = set(self._held.values())
        oldest = next((digest for digest in self._loaded if digest not in in_use), None)
        if oldest is None:
            raise RequestRejected(
                ErrorCode.ADAPTER_UNAVAILABLE,
                f"This engine has {self._most} adapters in memory (max_loras), and requests that run use all of them.",
                "model",
                self._most,
                self._most + 1,
            )
        self._drop(host, oldest)

    def _drop(self, host: AdapterHost, digest: str) -> None:
        del self._loaded[digest]
        self._leaving.discard(digest)
        host.drop(digest)

    def unload(self, digest: str) -> None:
        """Drop an adapter, at once or with the last request that holds it. Idempotent."""
        with self._lock:
            if self._host is None or digest not in self._loaded:
                return
            if digest in self._held.values():
                self._leaving.add(digest)
            else:
                self._drop(self._host, digest)

    # --- requests ------------------------------------------------------------------------------------------------

    def hold(self, adapter: AdapterRef, request_id: str) -> None:
        """Keep the adapter in memory until the request lets go of it.

        Raises:
            RequestRejected: the adapter was dropped meanwhile.
        """
        self._checked("model")
        with self._lock:
            if adapter.digest not in self._loaded:
                text = f"The adapter {adapter.name} had to make room for others (max_loras is {self._most})."
                raise RequestRejected(ErrorCode.ADAPTER_UNAVAILABLE, text, "model", self._most)
            self._held[request_id] = adapter.digest

    def let_go(self, request_id: str) -> None:
        """Release the adapter of a request that has ended. Does nothing if the request holds none."""
        if not self._held:  # the usual case: an engine without adapters
            return
        with self._lock:
            digest = self._held.pop(request_id, None)
            if digest in self._leaving and digest not in self._held.values() and self._host is not None:
                assert digest is not None
                self._drop(self._host, digest)

    def shutdown(self) -> None:
        """Cancel pending loads. A load that is running ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)
