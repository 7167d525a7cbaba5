"""The persistent experts' kernels on `gluon_on_torch`, where what may happen late happens late, and checks itself.

Groups of warps take turns: one runs until it waits, or until it arrives at a barrier for another. Copies
destroy what they are to overwrite when they are asked for, and bring the new values only when nobody could run without
them, in an order drawn from a seed. A product reads its right operand when it is waited for, and what it reads must be
what was there when it began. So a stage that is given back or filled too early, or read before it is full, shows every
time and not by luck. With `late` off copies come at once, and whoever asked for one lets the others run first: so what
is read before it was laid out shows.

Not modelled: layouts (a conversion called trivial is taken for one, the assembly's pairs of elements are neighbours in
a tensor and not in a thread's registers), registers of a left operand that are filled anew while it is read
(`products_in_flight.py` reads the machine code for that), threads of one group, which arrive together, fences between
them and the copy engine, and programs beside each other: they run one after another, highest rank first.
"""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from emulated_assembly import run_assembly
from gluon_on_torch import _SPACE, Machine, Pointer, Shared, Tiles, Value, interpret

# NaN as a pair of factors in either 16-bit format, and no sensible codes.
_GARBAGE = {torch.int32: 0x7FC17FC1, torch.int16: 0x7FC1}


def _destroy(data: torch.Tensor) -> None:
    data.fill_(float("nan") if data.is_floating_point() else _GARBAGE.get(data.dtype, 0))


class Product(Value):
    """A product under way; its value is there once it has been waited for."""

    def __init__(self, left: Value, right: Shared, start: Value | None) -> None:
        self.left, self.right, self.start = left.data, right.data, start
        self.seen = right.data.clone()
        self.result: torch.Tensor | None = None

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        assert self.result is not None, "a product is read before it was waited for"
        return self.result

    def end(self) -> None:
        """Products of 16-bit numbers are exact; FP64 adds them up."""
        assert torch.equal(self.seen, self.right), "a product's operand changed under it, or was never there"
        exact = self.left.double() @ self.right.double()
        self.result = (exact if self.start is None else exact + self.start.data.double()).float()


class ExpertsMachine(Machine):
    """Runs `stream_kernel` and `wide_kernel`."""

    def __init__(self, late: bool = True, seed: int = 0) -> None:
        super().__init__()
        self.late, self.random = late, random.Random(seed)
        self.here = threading.local()
        self.copies: list[Callable[[], None]] = []
        self.unready: set[int] = set()

    def launch(
        self, kernel: Callable[..., None], programs: int, names: Sequence[str], *operands: Any, **given: Any
    ) -> None:
        """The kernel's programs, in the order they begin in: one that waits for a later one could wait for ever."""
        self.begin()
        self.programs = (programs, 1, 1)
        before = ["x", "group_sums"]
        if given["GATE_UP"]:
            before += ["sorted_slots", "blocks", "flags"]
        pointers = []
        self.unready = set()
        for name, operand in zip(names, operands, strict=False):
            if isinstance(operand, torch.Tensor):
                if name in before:
                    self.unready.add(len(self.memory))
                pointers.append(self.pointer(operand))
            elif hasattr(operand, "block_shape"):
                pointers.append(Tiles(operand.base.view(operand.shape), operand.block_shape))
            else:
                pointers.append(operand)
        for place in range(programs):
            self.program = (place, 0, 0)
            self.begin_program()
            kernel(*pointers, **given)
        self.refuse_idle_barriers()

    def _access(self, pointer: Pointer, mask: Any, value: torch.Tensor | None, found: torch.Tensor) -> None:
        if not self.here.waited:
            spaces = set((pointer.at.reshape(-1) >> _SPACE).tolist())
            assert value is None, "written before the kernel before has ended"
            assert not spaces & self.unready, "read before the kernel before has ended"
        super()._access(pointer, mask, value, found)

    def allocate(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        made = super().allocate(dtype, shape, layout)
        _destroy(made.data)
        return made

    def specialize(self, parts: Sequence[Any], warps: Sequence[int] = (), *_: Any) -> None:
        """The groups of warps, one at a time."""
        count = len(parts)
        self.gates = [threading.Semaphore(0) for _ in range(count)]
        self.ready: list[Callable[[], bool] | None] = [lambda: True] * count
        self.stuck = False
        self.failed: list[str] = []

        def group(number: int, function: Callable[..., None], operands: tuple[Any, ...]) -> None:
            self.here.group, self.here.warps = number, [self.warps, *warps][number]
            self.here.products, self.here.rows, self.here.waited = [], [], False
            self.gates[number].acquire()
            try:
                function(*operands)
                assert not any(product.result is None for product in self.here.products), "a product nobody waited for"
            except Exception:
                self.failed.append(traceback.format_exc())
            self.ready[number] = None
            self._choose(number)

        threads = [threading.Thread(target=group, args=(number, *part)) for number, part in enumerate(parts)]
        for thread in threads:
            thread.start()
        self.gates[0].release()
        for thread in threads:
            thread.join()
        left, self.copies = self.copies, []
        assert not self.failed, "\n".join(self.failed)
        assert not left, "copies that nobody waited for"
        half_way = [state for state in self.barriers.values() if (state.missing, state.bytes) != (state.count, 0)]
        assert not half_way, "barriers that some arrive at and others never will"

    def _choose(self, last: int) -> None:
        """Let the next group that can run do so; copies come when none can."""
        count = len(self.gates)
        while True:
            for step in range(1, count + 1):
                number = (last + step) % count
                ready = self.ready[number]
                if ready is not None and (self.stuck or ready()):
                    self.gates[number].release()
                    return
            if all(ready is None for ready in self.ready):
                return
            if self.copies and not self.failed:
                try:
                    self.copies.pop(self.random.randrange(len(self.copies)))()
                except AssertionError:
                    self.failed.append(traceback.format_exc())
            else:
                self.stuck = True

    def _pass_on(self, ready: Callable[[], bool]) -> None:
        own = self.here.group
        self.ready[own] = ready
        self._choose(own)
        self.gates[own].acquire()
        assert not self.stuck, "a group of warps waits for ever"

    def wait(self, barrier: Shared, parity: Any) -> None:
        self.used.add(self._block(barrier))
        state = self.barriers[barrier.data.data_ptr()]
        if state.phase % 2 == int(parity):
            self._pass_on(lambda: state.phase % 2 != int(parity))

    def _later(self, copy: Callable[[], None]) -> None:
        if self.late:
            self.copies.append(copy)
        else:
            copy()
            self._pass_on(lambda: True)

    def fetch(self, tiles: Tiles, place: Sequence[Any], barrier: Shared, shared: Shared) -> None:
        begin = [int(x) for x in place]
        ends = tiles.matrix.shape
        assert all(0 <= x < end for x, end in zip(begin, ends, strict=True)), f"a tile at {begin} of {list(ends)}"
        # Past the end come zeros.
        found = torch.zeros(tiles.block, dtype=tiles.dtype)
        part = tiles.matrix[tuple(slice(x, x + size) for x, size in zip(begin, tiles.block, strict=True))]
        found[tuple(slice(0, size) for size in part.shape)] = part
        _destroy(shared.data)

        def copy() -> None:
            shared.data.copy_(found.view(shared.data.shape))
            self._signal(barrier, 0, -found.numel() * tiles.dtype.itemsize)

        self._later(copy)

    def load_rows(self, shared: Shared, pointer: Pointer, mask: Any) -> None:
        """Zeros where the mask is off."""
        found = self.load(pointer, mask).data
        assert list(found.shape) == shared.shape
        _destroy(shared.data)
        self.here.rows.append((shared.data, found))

    def arrive_with_rows(self, barrier: Shared, increment_count: bool) -> None:
        """Every thread of the group arrives, when the rows that it asked for have come."""
        assert not increment_count
        rows, self.here.rows = self.here.rows, []
        arrivals = 32 * self.here.warps

        def copy() -> None:
            for data, found in rows:
                data.copy_(found)
            self._signal(barrier, arrivals, 0)

        self._later(copy)

    def product(
        self, left: Value, right: Shared, start: Value, use_acc: bool = True, is_async: bool = False
    ) -> Product:
        made = Product(left, right, start if use_acc else None)
        self.here.products.append(made)
        if not is_async:
            self.end_products(0)
        return made

    def end_products(self, pending: int, deps: Sequence[Any] = ()) -> Any:
        """All but the last `pending` of the products under way."""
        products = self.here.products
        while len(products) > pending:
            products.pop(0).end()
        return tuple(deps) if len(deps) != 1 else deps[0]

    def assembly(
        self, text: str, constraints: str, operands: Sequence[Any], dtype: Any, is_pure: bool, pack: int
    ) -> Any:
        if text.startswith("st.release"):
            return self.store(operands[0], Value(1))
        if text.startswith("ld.acquire"):
            came = self.load(operands[0])
            assert came != 0, "a program waits for one that has not begun"
            return came
        assert pack == 2
        inputs = [x.data.contiguous().view(-1).view(torch.int16).numpy().view(np.uint32) for x in operands]
        assert all(x.shape == operands[0].shape for x in operands)
        several = isinstance(dtype, tuple)
        dtypes = dtype if several else (dtype,)
        found = [
            Value(torch.from_numpy(register.view(np.int16).copy()).view(kind).view(operands[0].shape))
            for register, kind in zip(run_assembly(text, inputs, len(dtypes)), dtypes, strict=True)
        ]
        return tuple(found) if several else found[0]

    def language(self) -> SimpleNamespace:
        def loaded(pointer: Pointer, mask: Any = None, other: float = 0, cache_modifier: str = "") -> Value:
            return self.load(pointer, mask, other)

        def stored(pointer: Pointer, value: Any, mask: Any = None) -> None:
            self.store(pointer, Value(value), mask)

        def checked(condition: bool) -> None:
            assert condition

        return SimpleNamespace(
            **vars(super().language())
            | {
                "NVMMASharedLayout": _nothing,
                "int32": torch.int32,
                "num_warps": lambda: self.here.warps,
                "load": loaded,
                "store": stored,
                "split": lambda x: x.split(),
                "exp": lambda x: Value(x.data.exp()),
                "erf": lambda x: Value(x.data.erf()),
                "broadcast_to": lambda x, shape: Value(x.data.expand(shape)),
                "static_assert": checked,
                "inline_asm_elementwise": self.assembly,
            }
        )

    def names(self) -> dict[str, Any]:
        def arrive(barrier: Shared, count: int, pred: Any = True) -> None:
            if pred:
                self._signal(barrier, count, 0)
                if self.late:
                    self._pass_on(lambda: True)

        def previous_ended() -> None:
            self.here.waited = True

        names = super().names()
        names["mbarrier"].arrive = arrive
        return names | {
            "tl": names["gl"],
            "warpgroup_mma": self.product,
            "warpgroup_mma_init": lambda x: x,
            "warpgroup_mma_wait": self.end_products,
            "load_tile": self.fetch,
            "load_rows": self.load_rows,
            "async_copy": SimpleNamespace(mbarrier_arrive=self.arrive_with_rows),
            "barrier": _nothing,
            "gdc_wait": previous_ended,
            "gdc_launch_dependents": _nothing,
        }


def _nothing(*_: Any, **__: Any) -> None:
    return None


class Kernel:
    """In a kernel's place: its launches run on the machine, with the kernels' modules interpreted meanwhile."""

    def __init__(self, machine: ExpertsMachine, kernel: Any, modules: Sequence[ModuleType]) -> None:
        self.machine, self.kernel, self.modules = machine, kernel, modules

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*operands: Any, num_warps: int, maxnreg: int, launch_pdl: bool, **given: Any) -> None:
            assert launch_pdl, "the kernel waits for the one before it"
            self.machine.warps = num_warps
            with pytest.MonkeyPatch.context() as patched:
                interpret(patched, self.machine, *self.modules)
                self.machine.launch(self.kernel.fn, grid[0], self.kernel.arg_names, *operands, **given)

        return launch
