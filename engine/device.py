"""The device that holds the model: choice, memory, streams and timing. No other file names torch.cuda, except for graph
capture."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.settings import DeviceName, DTypeName

FENCE_POLL_S = 20e-6

FILLER_BYTES = 256 * 2**20
"""More than the L2 cache of any GPU."""

FILLS = 6
"""How often it is read before a timed call. On an H200 once takes 60 us, and launching one of Triton's kernels took a
slow host as long: then the GPU waited inside the timed stretch, and cuBLAS, which is launched faster, won."""

TURNS = 11


class DeviceUnavailable(RuntimeError):
    """The settings ask for a device that this machine does not have."""


def resolve_device(name: DeviceName) -> torch.device:
    """auto is the first GPU if there is one, else the CPU."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceUnavailable("device 'cuda' was asked for, but torch sees no GPU")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(name: DTypeName, device: torch.device, checkpoint: torch.dtype) -> torch.dtype:
    """The dtype weights are held in. auto: float32 on a CPU, the checkpoint's own elsewhere."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    return torch.float32 if device.type == "cpu" else checkpoint


def activation_dtype(device: torch.device, weights: torch.dtype) -> torch.dtype:
    """The dtype of activations and KV. A CPU computes in float32 whatever its weights are held in: its
    bfloat16 attention is several times slower."""
    return torch.float32 if device.type == "cpu" else weights


def use_cpu_threads(count: int | None) -> None:
    """How many threads one CPU operator may use, process-wide; None leaves torch's own choice."""
    if count is not None:
        torch.set_num_threads(count)


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def device_name(device: torch.device) -> str:
    """The GPU's name, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def free_gpu_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a GPU; None for a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, _total = torch.cuda.mem_get_info(device)
    return int(free)


def reset_peak(device: torch.device) -> None:
    """Resets the peak of memory use, and frees the memory that torch caches."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most memory used since `reset_peak`, beyond what is in use now. 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device))


def memory_room(device: torch.device, share: float, reserve_bytes: int) -> int:
    """What is left of `share` of a GPU's memory after all that is in use now, by any process, and a reserve."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total * share) - int(total - free) - reserve_bytes


def num_multiprocessors(device: torch.device) -> int:
    """How many blocks of a kernel can run at once without sharing; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def compute_capability(device: torch.device) -> int | None:
    """For example 90 for sm_90; None on a CPU."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def seconds_of_each(
    device: torch.device, calls: Sequence[Callable[[], object]], fills: int = FILLS
) -> list[float]:
    """The median GPU time of each call, with the L2 cache full of other data. The calls take turns, so that a change
    over time, such as of clocks, affects all of them. The cache is filled by reading: dirty lines would be written back
    at the expense of the call. Filling it `fills` times takes longer than launching the call, so the GPU never waits
    for the host."""
    filler = torch.zeros(FILLER_BYTES // 4, device=device)
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(TURNS):
        for call, pairs in zip(calls, marks, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            for _ in range(fills):
                filler.sum()
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
    torch.cuda.synchronize(device)
    return [statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3 for pairs in marks]


class CopyStream:
    """Runs one thread's copies after steps that another thread issued. On a CPU there is nothing to order."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event | None:
        """A mark behind everything that the calling thread has issued so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    @contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Work inside the block runs beside the steps, but after `mark`. It is done at the end of the block."""
        if self._stream is None or mark is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            try:
                yield
            finally:
                self._stream.synchronize()


class Relay:
    """Hands pieces of work from the calling thread's stream to a second one, so that the first half of a piece runs
    beside the second half of the piece before it. The first stream is never more than a piece ahead. On a CPU there is
    nothing to order. One thread at a time may be inside."""

    def __init__(self, device: torch.device) -> None:
        self._second: torch.cuda.Stream | None = None
        self._last: tuple[Tensor, torch.cuda.Event] | None = None
        """A piece whose end the first stream has not been told to wait for: its memory must not be used again."""
        if device.type == "cuda":
            self._second = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        """The first stream goes on once all pieces are done."""
        if self._second is not None:
            torch.cuda.current_stream(self._second.device).wait_stream(self._second)
        self._last = None

    @contextmanager
    def second_half(self, part: Tensor) -> Iterator[None]:
        """Work inside the block runs on the second stream, behind all that the first has issued. `part` is what the
        first half made."""
        if self._second is None:
            yield
            return
        first = torch.cuda.current_stream(self._second.device)
        self._second.wait_stream(first)
        ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._second):
            yield
            ended.record(self._second)
        if self._last is not None:
            first.wait_event(self._last[1])
        self._last = part, ended


def fetch(part: Tensor) -> Tensor:
    """A copy in pinned memory, complete once the stream has passed it; `part` itself if it is in host memory
    already."""
    if part.device.type != "cuda":
        return part
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)


def pinned(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory [size] for copies to and from the device that run asynchronously."""
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


def send(
    numbers: Sequence[int | float] | NDArray[np.int64], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The numbers as a tensor on the device; the copy is asynchronous."""
    tensor = torch.tensor(numbers, dtype=dtype)  # of an array, torch refuses to make a pinned one
    return tensor if device.type != "cuda" else tensor.pin_memory().to(device, non_blocking=True)


def send_bytes(data: bytes, device: torch.device) -> Tensor:
    """Like `send`, for bytes, as uint8."""
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return tensor if device.type != "cuda" else tensor.pin_memory().to(device, non_blocking=True)


class Fence:
    """A point in the work issued to the device. On a CPU all work before it is already done."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def wait(self, timeout_s: float) -> None:
        """Raises TimeoutError if the device does not get there in time."""
        if self._event is None:
            return
        deadline_s = time.monotonic() + timeout_s
        while not self._event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the device did not finish a step within {timeout_s} s")
            time.sleep(FENCE_POLL_S)
