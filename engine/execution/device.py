"""Owns the interface to the device that the engine runs on: memory, copies without waiting, captured steps.
Never decides anything from measured memory; `engine.execution.gpu.memory` does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.config import ConfigError, EngineConfig
from engine.models.recurrent_state import RecurrentState
from engine.step import ExecutorFatalError, ExecutorOutOfMemoryError, StepPlan

NO_MEMORY = (
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
)
"""What torch, cuBLAS and Triton say of an allocation that failed, besides torch's own type. The device goes on."""
FAULTS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")
"""What torch, of the runtime and of the driver, and Triton say of a device that can do nothing more."""
LOST_STATE = "There is no memory for the step, and it cannot be run again: recurrent states may have moved on."


class Download(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> Sequence[Tensor]:
        """The tensors on the CPU, with the values they had when the download was requested."""


class Graph(Protocol):
    """Captured work that can be replayed."""

    def replay(self) -> None:
        """Run the work again, on the current values of its tensors."""


class TimingEvent(Protocol):
    """A point in the queue of work. The device records the time when it gets there."""

    @property
    def is_past(self) -> bool:
        """Whether the device has got there."""

    def ms_until(self, later: Any) -> float:
        """Milliseconds on the device's clock until `later`, an event of the same device. Waits for `later`."""


class Mark(Protocol):
    """A point in a queue of work."""

    @property
    def is_past(self) -> bool:
        """Whether the device has got there."""

    def wait(self) -> None:
        """Return when the device has got there. Any thread."""


class SideQueue(Protocol):
    """Work that the device does beside the steps, in the order of the calls. Any thread may queue some."""

    def mark_steps(self) -> Mark:
        """Return the point behind all work of steps that is queued. Only the thread that runs the steps."""

    def run(self, work: Callable[[], None], after: Any) -> Mark:
        """Queue what `work` does, once the steps are past `after`, a mark of theirs; return the point behind it."""

    def hold_steps(self, mark: Any) -> None:
        """Let work of steps that is queued from now on wait for `mark`. Only the thread that runs the steps."""


class Device(Protocol):
    """One device. Work is queued in the order of the calls, and done in that order."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def name(self) -> str: ...

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability; None for the CPU."""

    def memory(self) -> tuple[int, int]:
        """(free, total) in bytes, once all queued work is done."""

    def release_unused(self) -> None:
        """Give back cached memory that no tensor holds."""

    def upload(self, host: Tensor, into: Tensor | None = None) -> Tensor:
        """Copy `host` to the device, without waiting. The caller never writes to `host` again. into: the tensor to copy
        to, if it exists already."""

    def staged(self, host: Tensor) -> Tensor:
        """Return `host` in memory from which an upload takes it without a copy on the host."""

    def download(self, tensors: Sequence[Tensor]) -> Download: ...

    @property
    def captures(self) -> bool:
        """Whether `capture` may be called."""

    def capture(self, work: Callable[[], None], beside: Graph | None = None) -> Graph:
        """Run `work` and record what it does. It may allocate nothing that outlives it, and may read no value back.
        beside: a graph to share memory with; the two never run at the same time."""

    def timing_event(self) -> TimingEvent:
        """An event after all queued work. For measurements; no step needs one."""

    def side_queue(self) -> SideQueue:
        """Make a queue of its own."""

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Make memory of the host known to the device, which then copies to and from it without waiting. Return what
        undoes that, once nothing is copied any more.

        Raises:
            ConfigError: the device refuses so much.
        """


class HostDevice:
    """The CPU: every call completes its work at once. Nothing is captured on it, and its memory is not asked for, since
    on the CPU the number of blocks follows from the config."""

    torch_device = torch.device("cpu")
    name = "cpu"
    capability: tuple[int, int] | None = None
    captures = False

    def memory(self) -> tuple[int, int]:
        raise AssertionError("blocks on the CPU follow from kv_cache_memory_gib")

    def release_unused(self) -> None:
        """torch's CPU allocator keeps nothing."""

    def upload(self, host: Tensor, into: Tensor | None = None) -> Tensor:
        return host if into is None else into.copy_(host)

    def staged(self, host: Tensor) -> Tensor:
        return host

    def download(self, tensors: Sequence[Tensor]) -> Download:
        return _Done([tensor.clone() for tensor in tensors])  # a later step may write to the same memory

    def capture(self, work: Callable[[], None], beside: Graph | None = None) -> Graph:
        raise AssertionError("the CPU captures nothing")

    def timing_event(self) -> TimingEvent:
        return _HostEvent()

    def side_queue(self) -> SideQueue:
        return _HostQueue()

    def pin(self, memory: memoryview) -> Callable[[], None]:
        return lambda: None


class _HostQueue:
    """Whose work is done when it is queued."""

    def mark_steps(self) -> _HostMark:
        return _HostMark()

    def run(self, work: Callable[[], None], after: Any) -> _HostMark:
        work()
        return _HostMark()

    def hold_steps(self, mark: Any) -> None: ...


class _HostMark:
    is_past = True

    def wait(self) -> None: ...


class _HostEvent:
    is_past = True

    def __init__(self) -> None:
        self._s = time.perf_counter()

    def ms_until(self, later: _HostEvent) -> float:
        return (later._s - self._s) * 1000


class _Done:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> Sequence[Tensor]:
        return self._tensors


class CudaDevice:
    """The one GPU that this process sees."""

    captures = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", 0)
        self.name: str = torch.cuda.get_device_name(0)
        self.capability: tuple[int, int] | None = torch.cuda.get_device_capability(0)
        self._side: Any = None
        """Where captures are. cuBLAS keeps a workspace for each stream that it has seen."""

    def memory(self) -> tuple[int, int]:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info(0)

    def release_unused(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def upload(self, host: Tensor, into: Tensor | None = None) -> Tensor:
        # A copy from pageable memory would wait for all queued work. torch keeps the pinned block until the copy is
        # done.
        pinned = host.pin_memory()
        if into is None:
            return pinned.to(self.torch_device, non_blocking=True)
        return into.copy_(pinned, non_blocking=True)

    def staged(self, host: Tensor) -> Tensor:
        return host.pin_memory()  # which a pinned tensor returns as it is

    def download(self, tensors: Sequence[Tensor]) -> Download:
        return _CudaDownload(tensors)

    def capture(self, work: Callable[[], None], beside: Any = None) -> Graph:
        side = self._side = self._side or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()  # libraries allocate and choose at their first call, which must not happen while capturing
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=None if beside is None else beside.pool(), stream=side):
            work()
        return graph

    def timing_event(self) -> TimingEvent:
        return _CudaEvent()

    def side_queue(self) -> SideQueue:
        return _CudaQueue()

    def pin(self, memory: memoryview) -> Callable[[], None]:
        # Not by torch, whose allocator of pinned memory takes the next power of two.
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        if error := int(runtime.cudaHostRegister(address, len(memory), 0)):
            raise ConfigError(
                f"kv_tiers takes {len(memory)} bytes of the machine's memory, and CUDA does not copy to and from it "
                f"(cudaHostRegister: error {error}). Lower kv_tiers.host_memory_gib."
            )
        return lambda: runtime.cudaHostUnregister(address) and None


class _CudaQueue:
    def __init__(self) -> None:
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def mark_steps(self) -> _CudaMark:
        return _CudaMark()

    def run(self, work: Callable[[], None], after: _CudaMark) -> _CudaMark:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after.event)
            work()
            return _CudaMark()

    def hold_steps(self, mark: _CudaMark) -> None:
        torch.cuda.current_stream().wait_event(mark.event)


class _CudaMark:
    """A point behind what is queued on the current stream."""

    def __init__(self) -> None:
        self.event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # to sleep, not to spin
        self.event.record()

    @property
    def is_past(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class _CudaEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    @property
    def is_past(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def ms_until(self, later: _CudaEvent) -> float:
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event))


class _CudaDownload:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for host, tensor in zip(self._tensors, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # to sleep, not to spin: the server needs the core
        self._arrived.record()

    def wait(self) -> Sequence[Tensor]:
        self._arrived.synchronize()
        return self._tensors


def choose_device(config: EngineConfig) -> tuple[Device, str]:
    """Choose the device that steps run on, and say why.

    Raises:
        ConfigError: a GPU was asked for, and torch sees none.
    """
    if config.device == "cpu":
        return HostDevice(), "asked for"
    build = f"torch {torch.__version__}"
    if torch.cuda.is_available():
        device = CudaDevice()
        return device, f"{build} sees {device.name}, the GPU that this process has"
    if config.device == "cuda":
        raise ConfigError(f"device is cuda, but {build} sees no GPU; does the replica have one (engine_num_gpus)?")
    return HostDevice(), f"{build} sees no GPU"


@contextmanager
def device_faults() -> Iterator[None]:
    """Turn torch's errors for a failed allocation or a dead device into the errors of engine.step.

    The CPU allocator has no type of its own for it, nor have cuBLAS, Triton, and a graph that is made ready to run. A
    fault inside a kernel is reported by whichever call comes next, and by every call from then on.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, torch.cuda.OutOfMemoryError) or any(sign in text for sign in NO_MEMORY):
            raise ExecutorOutOfMemoryError(text) from error
        if any(sign in text for sign in FAULTS):
            raise ExecutorFatalError(text) from error
        raise


class StateLostError(Exception):
    """A step failed because memory ran out, and the recurrent states of its requests are lost."""


@contextmanager
def advancing(state: RecurrentState | None, plan: StepPlan) -> Iterator[None]:
    """Copy recurrent states before and after a step, as the plan says. state: None if the model has none.

    Raises:
        StateLostError: the step ran out of memory. It cannot be tried again once states may have moved on in place.
    """
    if state is None:
        yield
        return
    state.place(plan)
    try:
        with device_faults():
            yield
    except ExecutorOutOfMemoryError as error:
        raise StateLostError(LOST_STATE) from error
    state.save(plan)


class TorchThreads:
    """Sets how many threads torch's operators use on the CPU. OpenMP keeps the number per calling thread."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._set_in: int | None = None

    def use(self) -> None:
        """Set the number for the calling thread, which must be the one that runs the steps."""
        if self._set_in != threading.get_ident():
            torch.set_num_threads(self._count)
            self._set_in = threading.get_ident()
