"""Replays an expert layer from a CUDA graph where it is called eagerly with the same number of rows again and again.

A layer is half a dozen launches from Python. In an eager forward, which on a fast GPU waits for its host, that is most
of what the experts cost. One replay, three small copies in and one out take their place. A loop that allocates the same
tensors again and again is given the same addresses again: for those a graph is recorded that reads the arguments and
writes the output where they lie, and the copies go too.

Memory: all layers share the buffers of a shape of call (its arguments and its output) and, on a stream, one pool for
what the kernels keep in between, which is as large as the largest shape needs. A layer holds its graphs alone.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

logger = logging.getLogger(__name__)

_CALLS_BEFORE = 2  # plain calls of a shape before it is recorded: kernels are compiled by then
_SHAPES = 8
_PLACES = 4  # sets of addresses for which a shape has graphs without copies
_COUNTED = 256
MAX_ROWS = 1024  # more rows keep the GPU busy for longer than launches take
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _Space:
    """Where the graphs of one device and stream keep what lies between their kernels: they run one after another."""

    shared: ClassVar[weakref.WeakValueDictionary[tuple[int, int], _Space]] = weakref.WeakValueDictionary()
    lock: ClassVar[threading.Lock] = threading.Lock()  # keeps two threads from mixing their buffers

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        # The allocator hands freed memory to the same stream only: recording on one lets layers share it.
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.buffers: dict[Any, tuple[torch.Tensor, ...]] = {}

    @classmethod
    def get(cls, device: int, stream: int) -> _Space:
        """The space of a device, which is current, and of a stream on it."""
        found = cls.shared.get((device, stream))
        if found is None:
            found = cls.shared[device, stream] = cls()
        return found

    def arguments(self, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Buffers like `given`, and one like the first for the output. Tensors of inference mode could not be
        written to outside it."""
        key = tuple((tensor.shape, tensor.dtype) for tensor in given)
        if key not in self.buffers:
            with torch.inference_mode(False):
                self.buffers[key] = tuple(
                    torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (*given, given[0])
                )
        return self.buffers[key]


class _Recorded:
    """The graphs of one shape of call, what they read and write, and what keeps their memory alive."""

    def __init__(self, graph: Any, buffers: tuple[torch.Tensor, ...], space: _Space) -> None:
        self.graph, self.space = graph, space
        self.x, self.ids, self.weights, self.out = buffers
        self.in_place: dict[tuple[int, ...], Any] = {}
        self.met: dict[tuple[int, ...], int] = {}

    def run(self, call: Call, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """A fresh tensor."""
        out = _output_like(x)
        # The graph of these addresses reads what is there now, whichever tensors had them when it was recorded.
        places = (x.data_ptr(), ids.data_ptr(), weights.data_ptr(), out.data_ptr())
        graph = self.in_place.get(places)
        plain = x.is_contiguous() and ids.is_contiguous() and weights.is_contiguous()
        if graph is not None and plain:
            graph.replay()
            return out
        with _Space.lock:
            self.x.copy_(x)
            self.ids.copy_(ids)
            self.weights.copy_(weights)
            self.graph.replay()
            out.copy_(self.out)
        if plain and len(self.in_place) < _PLACES:
            self._meet(places, call, (x, ids, weights), out)
        return out

    def _meet(self, places: tuple[int, ...], call: Call, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Count a set of addresses, and record it when it keeps coming."""
        if len(self.met) >= _COUNTED:
            self.met.clear()
        count = self.met[places] = self.met.get(places, 0) + 1
        if count > _CALLS_BEFORE:
            wanted = out.clone()
            with _on_device(out), _Space.lock:
                graph = _capture(call, given, out, self.space)
            graph.replay()
            if not _same_bits(out, wanted):
                out.copy_(wanted)
                raise RuntimeError("a replay in place computed something else")
            self.in_place[places] = graph


class LayerGraphs:
    """The graphs of one layer, by shape of call, stream and the memory its weights are in."""

    def __init__(self) -> None:
        self.seen: dict[Any, int] = {}
        self.graphs: dict[Any, _Recorded] = {}
        self.broken = False

    def clear(self) -> None:
        """Forget all graphs: the weights they read have moved."""
        self.seen.clear()
        self.graphs.clear()

    def __call__(
        self, call: Call, addresses: tuple[int, ...], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """`call(x, ids, weights)`, replayed where it has been recorded; a fresh tensor in either case.

        addresses  of all else that `call` reads: a graph of other memory is not replayed
        """
        if self.broken or not 0 < x.shape[0] <= MAX_ROWS or not _recordable(x):
            return call(x, ids, weights)
        device = x.get_device()
        where = (device, _current_stream(device), ids.get_device(), weights.get_device(), addresses)
        key = (where, x.shape, ids.shape, weights.shape, x.dtype, ids.dtype, weights.dtype)
        found = self.graphs.get(key)
        if found is None:
            return self._plain(key, call, x, ids, weights)
        try:
            return found.run(call, x, ids, weights)
        except RuntimeError as error:
            self._give_up(error)
            return call(x, ids, weights)

    def _give_up(self, error: RuntimeError) -> None:
        self.broken = True
        self.clear()
        logger.warning("vllm_ext: experts are launched kernel by kernel, recording them failed: %s", error)

    def _plain(self, key: Any, call: Call, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The call itself; a shape that keeps coming is recorded, and kept where its replay gives the call's bits."""
        wanted = call(x, ids, weights)
        if len(self.graphs) >= _SHAPES:
            return wanted
        if len(self.seen) >= _COUNTED:
            self.seen.clear()
        count = self.seen[key] = self.seen.get(key, 0) + 1
        if count <= _CALLS_BEFORE:
            return wanted
        try:
            with _on_device(x):
                recorded = _record(call, (x, ids, weights), *key[0][:2])
                if not _same_bits(recorded.run(call, x, ids, weights), wanted):
                    raise RuntimeError("the replay computed something else")
        except RuntimeError as error:
            self._give_up(error)
            return wanted
        self.graphs[key] = recorded
        return wanted


def _recordable(x: torch.Tensor) -> bool:
    """A tensor of a GPU and of no subclass (which may trace), outside of any capture."""
    return x.is_cuda and type(x) is torch.Tensor and not torch.cuda.is_current_stream_capturing()


def _output_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _current_stream(device: int) -> int:
    # `torch.cuda.current_stream` makes a Python object of it, which takes as long as a launch.
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


def _on_device(x: torch.Tensor) -> Any:
    return torch.cuda.device(x.device)


def _same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), wanted.contiguous().view(torch.uint8))


def _record(call: Call, given: tuple[torch.Tensor, ...], device: int, stream: int) -> _Recorded:
    """The graph of a shape of call, over the buffers of its space."""
    with _Space.lock:
        space = _Space.get(device, stream)
        *inputs, out = buffers = space.arguments(given)
        for buffer, tensor in zip(inputs, given, strict=True):
            buffer.copy_(tensor)
        return _Recorded(_capture(call, inputs, out, space), buffers, space)


def _capture(call: Call, inputs: Sequence[torch.Tensor], out: torch.Tensor, space: _Space) -> Any:
    """Not with `torch.cuda.graph`: that collects garbage and empties the cache, a tenth of a second a layer."""
    graph = torch.cuda.CUDAGraph()
    space.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(space.stream):
        graph.capture_begin(pool=space.pool, capture_error_mode="thread_local")
        try:
            out.copy_(call(*inputs))
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(space.stream)
    return graph
