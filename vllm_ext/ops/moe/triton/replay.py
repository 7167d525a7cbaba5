"""A call like one before it is launched as that one was, with new addresses: a sixth of the host's time.

The first call of a kind goes through Triton's just-in-time path, and what it launched is noted: compiled kernels, grids
and arguments. They depend on what `_kind` holds and on nothing else, but for addresses: of the call's tensors, of its
weights, of the result, and of scratch memory, which is one piece in a call that repeats them. So whatever Triton
chooses a kernel by is chosen by Triton. Calls that are not of the plainest sort, or are watched, never come here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from vllm_ext.ops.moe.experts import CallOptions, PreparedExperts
from vllm_ext.ops.moe.triton import direct_launch

_ALIGNED = 16  # bytes; what Triton specialises kernels on
_PART = 512  # bytes; parts of the scratch memory begin where tensors of their own would
# Some 8 KB each: a step of vLLM's has up to 8192 tokens by default, and each number of them is a kind.
_MOST_KINDS = 8192
# Words of scratch memory, 256 MiB. A call that needs more keeps the GPU busy for longer than the host is, and so large
# a piece would be a second one beside those of its first call.
_MOST_WORDS = 1 << 26
_OUT, _SCRATCH = 0, 1  # the first of the addresses of a call

Call = Callable[
    [torch.Tensor, PreparedExperts, torch.Tensor, torch.Tensor, torch.Tensor | None, CallOptions], torch.Tensor
]
# A launch: kernel, what it was compiled to, grid, arguments by place and by name.
_Taken = tuple[Any, Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class _Launch:
    """One launch, its addresses left out.

    places  (which argument, which of the call's addresses, bytes after it)
    maps    likewise of tensor descriptors, with their encoding
    """

    kernel: Any
    run: Callable[..., Any]
    grid: tuple[int, ...]
    head: tuple[Any, ...]
    arguments: list[Any]
    places: list[tuple[int, int, int]]
    maps: list[tuple[int, int, int, tuple[Any, ...]]]


@dataclass(frozen=True)
class _Recorded:
    """What a kind of call launches (nothing: not to be repeated), words of scratch memory, and its result's shape."""

    launches: list[_Launch]
    words: int
    shape: torch.Size


class _Notes(threading.local):
    """The launches of the call that this thread records."""

    taken: list[_Taken] | None = None


_notes = _Notes()
_kinds: dict[Any, _Recorded] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> Any:
    """`kernel[grid](*arguments, **named)`, noted where the call is recorded. Launches of a call go through here."""
    compiled = kernel[grid](*arguments, **named)
    if _notes.taken is not None:
        _notes.taken.append((kernel, compiled, grid, arguments, named))
    return compiled


def call(
    usual: Call,
    x: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    options: CallOptions,
) -> torch.Tensor:
    """`usual` of the other arguments: as a call before it was launched, where that is possible."""
    arguments = (x, experts, topk_weights, topk_ids, expert_map, options)
    if torch.compiler.is_compiling() or not (direct_launch.serves(x) and direct_launch.unwatched()):
        return usual(*arguments)
    tensors = [x, topk_weights, topk_ids, *experts.tensors.values()]
    if expert_map is not None:
        tensors.append(expert_map)
    addresses = [tensor.data_ptr() for tensor in tensors]
    kind = _kind(*arguments, tensors, addresses)
    if kind is None:
        return usual(*arguments)
    recorded = _kinds.get(kind)
    if recorded is None:
        return _record(usual, arguments, kind, tensors, addresses)
    if not recorded.launches or any(launch.kernel.pre_run_hooks for launch in recorded.launches):
        return usual(*arguments)
    return _replay(recorded, x, addresses)


def _kind(
    x: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    options: CallOptions,
    tensors: list[torch.Tensor],
    addresses: list[int],
) -> Any:
    """All that a call's launches depend on but addresses; None for a call whose tensors are copied, or not aligned."""
    bits = 0
    for address in addresses:
        bits |= address
    stride, step = x.stride()
    if bits % _ALIGNED or step != 1 or not (topk_weights.is_contiguous() and topk_ids.is_contiguous()):
        return None
    if expert_map is not None and not expert_map.is_contiguous():
        return None
    shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
    where = (x.get_device(), stride, direct_launch.debugging())
    return experts.meta, options, where, tuple(experts.tensors), *shapes


@contextmanager
def _noting() -> Iterator[list[_Taken]]:
    taken: list[_Taken] = []
    _notes.taken = taken
    try:
        yield taken
    finally:
        _notes.taken = None


def _record(usual: Call, arguments: Any, kind: Any, tensors: list[torch.Tensor], addresses: list[int]) -> torch.Tensor:
    with _noting() as taken:
        out = usual(*arguments)
    if len(_kinds) >= _MOST_KINDS:
        _kinds.clear()
    _kinds[kind] = _understood(taken, out, tensors, addresses)
    return out


def _understood(taken: list[_Taken], out: torch.Tensor, tensors: list[torch.Tensor], addresses: list[int]) -> _Recorded:
    """The launches with what their arguments point at; no launches where that, or a launcher, is not known."""
    known = [out.data_ptr(), None, *addresses]
    foreign = {tensor.untyped_storage().data_ptr() for tensor in (out, *tensors)}
    parts: dict[int, int] = {}
    words = 0

    def place(tensor: torch.Tensor) -> tuple[int, int]:
        nonlocal words
        address = tensor.data_ptr()
        if address in known:
            return known.index(address), 0
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        if begin in foreign:
            raise LookupError
        if begin not in parts:
            parts[begin] = words * 4
            words += -(-storage.nbytes() // _PART) * (_PART // 4)
        return _SCRATCH, parts[begin] + address - begin

    launches: list[_Launch] = []
    with suppress(LookupError):
        if len(set(known)) == len(known) and out.is_contiguous() and out.dtype == tensors[0].dtype:
            launches = [_launch(*one, place) for one in taken]
    # What torch computed of the last launch's output would be missing.
    whole = any(source == _OUT for one in launches for _, source, _ in one.places)
    if not whole or words > _MOST_WORDS:
        launches = []
    return _Recorded(launches, words, out.shape)


def _launch(
    kernel: Any,
    compiled: Any,
    grid: tuple[int, ...],
    values: tuple[Any, ...],
    named: dict[str, Any],
    place: Callable[[torch.Tensor], tuple[int, int]],
) -> _Launch:
    """A noted launch with its arguments in the kernel's order. LookupError where something is not known."""
    launcher = direct_launch.launcher(compiled)
    if launcher is None:
        raise LookupError
    arguments: list[Any] = []
    places, maps = [], []
    encodings = list(reversed(launcher.descriptors))
    for value in (*values, *(named[name] for name in kernel.arg_names[len(values) :])):
        if isinstance(value, torch.Tensor):
            if value.numel():
                places.append((len(arguments), *place(value)))
            arguments.append(0)
        elif hasattr(value, "block_shape"):
            encoded = direct_launch.encoding(value, encodings.pop())
            maps.append((len(arguments), *place(value.base), encoded))
            arguments += [None, *value.shape, *value.strides]
        else:
            arguments.append(value)
    return _Launch(kernel, launcher.run, (*grid, 1, 1)[:3], launcher.head, arguments, places, maps)


def _replay(recorded: _Recorded, x: torch.Tensor, addresses: list[int]) -> torch.Tensor:
    out = torch.empty(recorded.shape, dtype=x.dtype, device=x.device)
    scratch = torch.empty(recorded.words, dtype=torch.int32, device=x.device)
    at = [out.data_ptr(), scratch.data_ptr(), *addresses]
    stream = direct_launch.stream_of(x.get_device())
    for launch in recorded.launches:
        arguments = launch.arguments.copy()
        for which, source, after in launch.places:
            arguments[which] = at[source] + after
        for which, source, after, encoded in launch.maps:
            arguments[which] = direct_launch.tensor_map(at[source] + after, encoded)
        launch.run(*launch.grid, stream, *launch.head, *arguments)
    return out
