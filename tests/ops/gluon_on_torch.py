"""Runs Gluon kernels' functions on torch tensors, program after program, as Triton's interpreter does Triton's.

Gluon has no interpreter. Here its operations are torch's, layouts are nothing, shared memory starts as NaN, copies by
the copy engine are made at once, and groups of warps are threads that wait at barriers which count as the hardware's
do. So values, places, masks, and who waits for whom are what the kernel says; a missing fence or a wrong layout does
not show. Memory of barriers that no group uses is refused: the compiler puts tiles in its place.
"""

from __future__ import annotations

import itertools
import math
import operator
import threading
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_SPACE = 40  # bits of an address within a tensor
_DEADLOCK_SECONDS = 30
_SMALLEST = 2.0**-126
_HALF = 65504.0


def _plain(x: Any) -> Any:
    return x.data if isinstance(x, Value) else x


class _Tensor:
    """What a kernel asks of tensors wherever they are."""

    data: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)


class Value(_Tensor):
    """A tensor of a kernel; scalars have no dimensions."""

    type = SimpleNamespace(layout=SimpleNamespace(parent=None))

    def __init__(self, data: Any) -> None:
        self.data = torch.as_tensor(_plain(data))

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        if isinstance(dtype, SimpleNamespace):
            return Pointer(self.data, dtype.element_ty)
        return Value(self.data.view(dtype) if bitcast else self.data.to(dtype))

    def reshape(self, *shape: Any) -> Value:
        return Value(self.data.reshape(*shape))

    def permute(self, *order: Any) -> Value:
        return Value(self.data.permute(*order))

    def split(self) -> tuple[Value, Value]:
        return Value(self.data[..., 0]), Value(self.data[..., 1])

    def __getitem__(self, index: Any) -> Value:
        return Value(self.data[index])

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __neg__(self) -> Value:
        return Value(-self.data)


def _operator(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def apply(left: Any, right: Any) -> Any:
        return NotImplemented if isinstance(right, Pointer) else Value(function(_plain(left), _plain(right)))

    return apply


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "lshift", "rshift", "and_", "or_", "xor")
for _name in (*_ARITHMETIC, "lt", "le", "gt", "ge", "eq", "ne"):
    _function = _operator(getattr(operator, _name))
    setattr(Value, f"__{_name.rstrip('_')}__", _function)
    setattr(Value, f"__r{_name.rstrip('_')}__", lambda right, left, f=_function: f(Value(left), right))


class Pointer:
    """Addresses in bytes."""

    def __init__(self, at: torch.Tensor, element: torch.dtype) -> None:
        self.at, self.element = at, element
        self.dtype = SimpleNamespace(element_ty=element)

    def __add__(self, count: Any) -> Pointer:
        return Pointer(self.at + torch.as_tensor(_plain(count)).long() * self.element.itemsize, self.element)

    __radd__ = __add__

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.at[index], self.element)

    def to(self, dtype: torch.dtype) -> Value:
        assert dtype == torch.int64
        return Value(self.at)


class Shared(_Tensor):
    """A block of shared memory, or a part of one."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.layout = data, None

    def store(self, value: Value) -> None:
        assert value.shape == self.shape
        self.data.copy_(value.data)

    def load(self, layout: Any = None) -> Value:
        return Value(self.data.clone())

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, int(start), length))

    def index(self, place: Any) -> Shared:
        return Shared(self.data[int(place)])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.data.view(*shape))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        """From where this begins, which may be more than it has of its block."""
        assert self.data.is_contiguous()
        begin = self.data.storage_offset() * self.dtype.itemsize // dtype.itemsize
        block = torch.empty(0, dtype=dtype).set_(self.data.untyped_storage())
        return Shared(block[begin : begin + math.prod(shape)].view(list(shape)))


class Tiles:
    """A descriptor: a matrix that is copied by tiles."""

    def __init__(self, matrix: torch.Tensor, block: Sequence[int]) -> None:
        self.matrix, self.block, self.dtype, self.layout = matrix, tuple(block), matrix.dtype, None


class Machine:
    """Memory, barriers, and the names a kernel's module looks up."""

    def __init__(self, warps: int = 4) -> None:
        self.warps = warps
        self.program, self.programs = (0, 0, 0), (1, 1, 1)
        self.memory: list[torch.Tensor] = []
        self.shared_bytes = 0  # of the last program
        self.changed = threading.Condition()
        self.barriers: dict[int, SimpleNamespace] = {}
        self.blocks: list[torch.Tensor] = []  # of shared memory, in the last program
        self.of_barriers: set[int] = set()  # numbers of blocks, in all programs of a run
        self.used: set[int] = set()  # those with a barrier that somebody waited for or arrived at

    def pointer(self, tensor: torch.Tensor | None) -> Pointer | None:
        if tensor is None:
            return None
        self.memory.append(tensor.view(-1))
        return Pointer(torch.tensor((len(self.memory) - 1) << _SPACE), tensor.dtype)

    def run(
        self, kernel: Callable[..., None], programs: int | tuple[int, int, int], *operands: Any, **constants: Any
    ) -> None:
        """The kernel's programs, tensors as pointers; the last one first, for none may count on those before it."""
        self.begin()
        self.programs = programs if isinstance(programs, tuple) else (programs, 1, 1)
        given = [self.pointer(x) if isinstance(x, torch.Tensor) else x for x in operands]
        for z, y, x in reversed(list(itertools.product(*map(range, reversed(self.programs))))):
            self.program = (x, y, z)
            self.begin_program()
            kernel(*given, **constants)
            self.refuse_bytes_not_announced()
        self.refuse_idle_barriers()

    def begin(self) -> None:
        for kept in (self.memory, self.of_barriers, self.used):
            kept.clear()

    def begin_program(self) -> None:
        self.barriers.clear()
        self.blocks.clear()
        self.shared_bytes = 0

    def refuse_idle_barriers(self) -> None:
        idle = self.of_barriers - self.used if self.used else set()
        assert not idle, f"blocks {sorted(idle)} of shared memory hold barriers for nobody: tiles may lie over them"

    def refuse_bytes_not_announced(self) -> None:
        """A barrier that expects too few would let whoever waits go on before the rest has come."""
        over = [-state.bytes for state in self.barriers.values() if state.bytes]
        assert not over, f"barriers got {over} bytes more than were announced"

    def _access(self, pointer: Pointer, mask: Any, value: torch.Tensor | None, found: torch.Tensor) -> None:
        at, wanted = torch.broadcast_tensors(  # type: ignore[no-untyped-call]
            pointer.at, torch.as_tensor(True if mask is None else _plain(mask))
        )
        for space in (at[wanted] >> _SPACE).unique().tolist():
            here = wanted & ((at >> _SPACE) == space)
            place = (at[here] & ((1 << _SPACE) - 1)) // pointer.element.itemsize
            memory = self.memory[space].view(pointer.element)
            if value is None:
                found[here] = memory[place]
            else:
                memory[place] = value.expand(at.shape)[here].to(pointer.element)

    def load(self, pointer: Pointer, mask: Any = None, other: float = 0.0) -> Value:
        shape = (pointer.at if mask is None else pointer.at + 0 * _plain(mask).long()).shape
        found = torch.full(shape, other).to(pointer.element)
        self._access(pointer, mask, None, found)
        return Value(found)

    def store(self, pointer: Pointer, value: Value, mask: Any = None) -> None:
        at, data = torch.broadcast_tensors(pointer.at, value.data)  # type: ignore[no-untyped-call]
        self._access(Pointer(at, pointer.element), mask, data, data)

    def allocate(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        self.shared_bytes += math.prod(shape) * dtype.itemsize
        data = torch.full(list(shape), float("nan") if dtype.is_floating_point else 0, dtype=dtype)
        self.blocks.append(data)
        return Shared(data)

    def _block(self, part: Shared) -> int:
        place = part.data.untyped_storage().data_ptr()
        return [block.data_ptr() for block in self.blocks].index(place)

    def init(self, barrier: Shared, count: int) -> None:
        state = SimpleNamespace(count=count, missing=count, bytes=0, phase=0)
        self.barriers[barrier.data.data_ptr()] = state
        self.of_barriers.add(self._block(barrier))

    def _signal(self, barrier: Shared, arrivals: int, more_bytes: int) -> None:
        with self.changed:
            self.used.add(self._block(barrier))
            state = self.barriers[barrier.data.data_ptr()]
            state.missing -= arrivals
            state.bytes += more_bytes
            assert state.missing >= 0
            if state.missing == 0 and state.bytes == 0:
                state.missing, state.phase = state.count, state.phase + 1
                self.changed.notify_all()

    def wait(self, barrier: Shared, parity: Any) -> None:
        state = self.barriers[barrier.data.data_ptr()]
        with self.changed:
            self.used.add(self._block(barrier))
            passed = self.changed.wait_for(lambda: state.phase % 2 != int(parity), _DEADLOCK_SECONDS)
        assert passed, "a group of warps waits for ever"

    def fetch(self, tiles: Tiles, place: Sequence[Any], barrier: Shared, shared: Shared) -> None:
        row, column = (int(x) for x in place)
        found = tiles.matrix[row : row + tiles.block[0], column : column + tiles.block[1]]
        shared.data.zero_()
        shared.data.view(tiles.block)[: found.shape[0]] = found
        self._signal(barrier, 0, -shared.data.numel() * tiles.dtype.itemsize)

    def specialize(self, parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
        failed: list[str] = []

        def group(function: Callable[..., None], operands: tuple[Any, ...]) -> None:
            try:
                function(*operands)
            except Exception:
                failed.append(traceback.format_exc())

        threads = [threading.Thread(target=group, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, "\n".join(failed)

    def names(self) -> dict[str, Any]:
        """What takes the place of the names that kernels import."""
        barrier = SimpleNamespace(
            init=self.init,
            wait=self.wait,
            MBarrierLayout=_nothing,
            expect=lambda barrier, count: self._signal(barrier, 1, int(count)),
            arrive=lambda barrier, count: self._signal(barrier, count, 0),
        )
        copies = SimpleNamespace(
            async_copy_global_to_shared=self.fetch, async_copy_shared_to_global=_put, store_wait=_nothing
        )
        return {
            "gl": self.language(),
            "mbarrier": barrier,
            "tma": copies,
            "warpgroup_mma": _product,
            "warpgroup_mma_wait": lambda pending, deps: tuple(deps) if len(deps) > 1 else deps[0],
            "fence_async_shared": _nothing,
        }

    def language(self) -> SimpleNamespace:
        layouts = ("SliceLayout", "BlockedLayout", "NVMMADistributedLayout", "DotOperandLayout", "SwizzledSharedLayout")
        return SimpleNamespace(
            **dict.fromkeys(layouts, _nothing),
            NVMMASharedLayout=SimpleNamespace(get_default_for=_nothing),
            constexpr=lambda x: x,
            float32=torch.float32,
            float16=torch.float16,
            bfloat16=torch.bfloat16,
            int64=torch.int64,
            int32=torch.int64,
            int16=torch.int16,
            pointer_type=lambda element: SimpleNamespace(element_ty=element),
            program_id=lambda axis: Value(self.program[axis]),
            num_programs=lambda axis: Value(self.programs[axis]),
            num_warps=lambda: self.warps,
            static_range=range,
            arange=lambda start, stop, layout=None: Value(torch.arange(start, stop)),
            load=self.load,
            store=self.store,
            allocate_shared_memory=self.allocate,
            warp_specialize=self.specialize,
            thread_barrier=_nothing,
            where=_where,
            sum=lambda x, axis: Value(x.data.sum(axis)),
            max=lambda x, axis: Value(x.data.amax(axis)),
            min=lambda x, axis: Value(x.data.amin(axis)),
            maximum=lambda x, y: _where(Value(x) > y, x, y),
            minimum=lambda x, y: _where(Value(x) < y, x, y),
            rsqrt=lambda x: Value(x.data.rsqrt()),
            full=lambda shape, value, dtype, layout=None: Value(torch.full(shape, value, dtype=dtype)),
            zeros=lambda shape, dtype, layout=None: Value(torch.zeros(shape, dtype=dtype)),
            join=lambda x, y: Value(torch.stack([x.data, y.data], -1)),
            permute=lambda x, order: x.permute(order),
            convert_layout=lambda x, layout=None, assert_trivial=False: x,
            associative_scan=lambda x, axis, combine: Value(x.data.cumsum(axis)),
            inline_asm_elementwise=_assembly,
        )


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _where(condition: Any, left: Any, right: Any) -> Value:
    left, right = _plain(left), _plain(right)
    dtype = next((x.dtype for x in (left, right) if isinstance(x, torch.Tensor)), None)
    left, right = torch.as_tensor(left, dtype=dtype), torch.as_tensor(right, dtype=dtype)
    return Value(torch.where(torch.as_tensor(_plain(condition)), left, right))


def _product(left: Any, right: Any, accumulator: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    product = left.data.float() @ right.data.float()
    return Value(product + accumulator.data if use_acc else product)


def _put(tiles: Tiles, place: Sequence[Any], shared: Shared) -> None:
    row, column = (int(x) for x in place)
    tiles.matrix[row : row + tiles.block[0], column : column + tiles.block[1]] = shared.data


def _assembly(text: str, constraints: str, operands: Sequence[Value], *_: Any) -> Value | None:
    if "griddepcontrol" in text:
        return None
    x = operands[0].data
    if "ex2" in text:
        power = torch.exp2(x)
        return Value(torch.where(power < _SMALLEST, 0.0, power))
    if "fma.rn.f16x2" in text:
        return Value((x.double() + operands[1].data.double() * operands[2].data.double()).half())
    if "mul.f32" in text:
        return Value(x * operands[1].data)
    if text.startswith(("cvt.rn.bf16x2", "cvt.rn.f16x2")):
        return Value(x.bfloat16() if "bf16" in text else x.half())
    if "mul.rn.f16x2" in text:
        return Value(x * operands[1].data)
    half = x.clamp(-_HALF, _HALF).half()
    if "bf16x2" in text:
        return Value(torch.where(operands[1].data != 0, half.view(torch.int16), x.bfloat16().view(torch.int16)))
    assert "cvt.rn.satfinite.f16x2" in text
    return Value(half)


def interpret(monkeypatch: Any, machine: Machine, *modules: ModuleType) -> None:
    """Let kernels of these modules run on the machine, for the length of a test."""
    names = machine.names()
    for module in modules:
        for name, value in list(vars(module).items()):
            if name in names:
                monkeypatch.setattr(module, name, names[name])
            elif hasattr(value, "arg_names") and hasattr(value, "fn"):
                monkeypatch.setattr(module, name, value.fn)
            elif type(value).__name__ == "constexpr":
                monkeypatch.setattr(module, name, value.value)
