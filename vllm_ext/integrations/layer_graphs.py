"""Replays an expert layer from a CUDA graph where it is called eagerly with the same number of rows again and again.

A layer is half a dozen launches from Python. In an eager forward, which on a fast GPU waits for its host, that is most
of what the experts cost; one replay, three small copies in and one out take their place.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch

logger = logging.getLogger(__name__)

_CALLS_BEFORE = 2  # plain calls of a shape before it is recorded: kernels are compiled by then
_SHAPES = 4
MAX_ROWS = 1024  # more rows keep the GPU busy for longer than launches take
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _Inputs:
    """Buffers that all layers of one shape share; a lock keeps two threads from mixing theirs."""

    shared: ClassVar[dict[Any, _Inputs]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, given: tuple[torch.Tensor, ...]) -> None:
        self.tensors = tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in given)
        self.pool = torch.cuda.graph_pool_handle()

    def fill(self, given: tuple[torch.Tensor, ...]) -> None:
        """Copy a call's arguments in."""
        for buffer, tensor in zip(self.tensors, given, strict=True):
            buffer.copy_(tensor)

    @classmethod
    def get(cls, key: Any, given: tuple[torch.Tensor, ...]) -> _Inputs:
        """The buffers of a shape on a device and stream."""
        if key not in cls.shared:
            cls.shared[key] = cls(given)
        return cls.shared[key]


class LayerGraphs:
    """The graphs of one layer, by shape of call."""

    def __init__(self) -> None:
        self.seen: dict[Any, int] = {}
        self.graphs: dict[Any, tuple[Any, torch.Tensor, _Inputs]] = {}
        self.broken = False

    def clear(self) -> None:
        """Forget all graphs: the weights they read have moved."""
        self.seen.clear()
        self.graphs.clear()

    def __call__(self, call: Call, *given: torch.Tensor) -> torch.Tensor:
        """`call(*given)`, replayed where it has been recorded; a fresh tensor in either case."""
        x = given[0]
        if (
            self.broken
            or not x.is_cuda
            or x.shape[0] > MAX_ROWS
            or not x.shape[0]
            or torch.cuda.is_current_stream_capturing()
        ):
            return call(*given)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        key = (x.device, stream, x.shape, given[1].shape, *(t.dtype for t in given))
        found = self.graphs.get(key)
        if found is None:
            return self._plain(key, call, given)
        graph, out, inputs = found
        with _Inputs.lock:
            inputs.fill(given)
            graph.replay()
            return out.clone()

    def _plain(self, key: Any, call: Call, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The call itself; a shape that keeps coming is recorded, and kept where its replay gives the call's bits."""
        wanted = call(*given)
        count = self.seen[key] = self.seen.get(key, 0) + 1
        if count <= _CALLS_BEFORE or len(self.graphs) >= _SHAPES:
            return wanted
        try:
            with _Inputs.lock, torch.cuda.device(given[0].device):
                inputs = _Inputs.get(key, given)
                inputs.fill(given)
                graph, out = _record(lambda: call(*inputs.tensors), inputs.pool)
                graph.replay()
                if not torch.equal(out, wanted):
                    raise RuntimeError("the replay computed something else")
        except RuntimeError as error:
            self.broken = True
            logger.warning("vllm_ext: experts are launched kernel by kernel, recording them failed: %s", error)
            return wanted
        self.graphs[key] = (graph, out, inputs)
        return wanted


def _record(call: Callable[[], torch.Tensor], pool: Any) -> tuple[Any, torch.Tensor]:
    """Not `torch.cuda.graph`: that collects garbage and empties the cache, a tenth of a second a layer."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            out = call()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, out
