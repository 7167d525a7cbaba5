"""A call that is launched as one before it asks of the driver what the usual path asks, address by address."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from threading import Thread
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets in this process", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

from calls_to_repeat import LAYERS, Arguments, B
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launches_on_record import Asked, Driver, on_record

from vllm_ext.ops.moe.experts import CallOptions, PreparedExperts
from vllm_ext.ops.moe.triton import align, backend, direct_launch, replay


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with on_record() as driver:
        yield driver


@pytest.fixture(autouse=True)
def nothing_before(driver: Driver) -> None:
    driver.clear()
    replay._kinds.clear()


def intervals(usual: list[Asked], direct: list[Asked], kept: list[torch.Tensor]) -> dict[int, tuple[int, int]]:
    """Where a repeated call has each piece of memory of the usual one: {beginning there: (beginning, bytes) here}."""
    addresses = [
        (there, here)
        for one, other in zip(usual, direct, strict=True)
        for there, here in zip(one.addresses, other.addresses, strict=True)
        if there is not None
    ]
    storages = {tensor.data_ptr(): tensor.untyped_storage() for tensor in kept if tensor.numel()}
    found: dict[int, tuple[int, int]] = {}
    for there, here in addresses:
        storage = storages.get(there)
        if storage is None:  # of a tensor descriptor, or of a tensor without elements
            assert there == here
            continue
        begin = here - (there - storage.data_ptr())
        assert found.setdefault(storage.data_ptr(), (begin, storage.nbytes())) == (begin, storage.nbytes())
    return found


def same_launches(driver: Driver, arguments: tuple[Any, ...]) -> bool:
    """Whether the call was launched directly; if so, as usual but for where its own memory is."""
    driver.clear()
    out = backend.apply(*arguments)
    direct, came_from_torch = list(driver.direct), list(driver.given_out)
    assert bool(driver.usual) != bool(direct)
    if not direct:
        return False
    driver.clear()
    wanted = backend._choose_and_launch(*arguments)
    usual = driver.usual
    assert [(one.compiled.key, one.grid, one.values) for one in usual] == [
        (one.compiled.key, one.grid, one.values) for one in direct
    ]
    assert [one.compiled.kernel for one in usual] == [one.compiled.kernel for one in direct]
    x, layer, weights, ids, expert_map, _ = arguments
    given = {
        tensor.untyped_storage().data_ptr()
        for tensor in (x, weights, ids, expert_map, *layer.tensors.values())
        if tensor is not None
    }
    found = intervals(usual, direct, driver.kept)
    assert all(here == there for there, (here, _) in found.items() if there in given)
    assert found[wanted.data_ptr()][0] == out.data_ptr()
    assert (out.shape, out.stride(), out.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    room = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in came_from_torch)
    own = sorted(place for there, place in found.items() if there not in given)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(own))
    within = [(a - begin) for a, size in own for begin, more in room if begin <= a and a + size <= begin + more]
    assert len(within) == len(own)
    # Kernels are compiled for where memory of torch's begins, on a GPU.
    assert not any(after % 512 for after in within)
    return True


MAPS = (None, None, None, torch.int32, torch.int64, torch.int8)
KINDS = st.builds(
    Arguments,
    layer=st.integers(0, len(LAYERS) - 1),
    tokens=st.sampled_from((1, 2, 8, 16, 33, 600, 5000)),
    top_k=st.sampled_from((1, 2, 8)),
    x_offset=st.sampled_from((0, 0, 0, 1, 4, 8, 16)),
    x_gap=st.sampled_from((0, 0, 0, 1, 8, 16)),
    x_reversed=st.sampled_from((False, False, False, True)),
    ids_dtype=st.sampled_from((torch.int32, torch.int64)),
    ids_offset=st.sampled_from((0, 0, 0, 1, 2, 4)),
    ids_gap=st.sampled_from((0, 0, 0, 8)),
    weights_dtype=st.sampled_from((torch.float32, B)),
    weights_offset=st.sampled_from((0, 0, 0, 1, 8)),
    weights_gap=st.sampled_from((0, 0, 0, 8)),
    map_dtype=st.sampled_from(MAPS),
    map_size=st.sampled_from((1, 11, 16, 0)),
    map_step=st.sampled_from((1, 1, 2)),
    options=st.sampled_from(
        (
            CallOptions(),
            CallOptions(),
            CallOptions("gelu"),
            CallOptions(swiglu_alpha=1.0),
            CallOptions(batch_invariant=True),
            CallOptions(apply_router_weight_on_input=True),
        )
    ),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls=st.lists(KINDS, min_size=2, max_size=5))
def test_repeated_calls_ask_what_the_usual_path_asks(driver: Driver, calls: list[Arguments]) -> None:
    """Calls of many kinds one after another, each on the layer and on the one like it: all that is kept is of the
    calls before, of this example and of those before it."""
    for kind in calls:
        backend.apply(*kind.make(0))
        for which in (0, 1):
            same_launches(driver, kind.make(which))


PLAIN = Arguments()
NEIGHBOURS = {
    "tokens": replace(PLAIN, tokens=16),
    "experts a token": replace(PLAIN, top_k=1),
    "a row's stride": replace(PLAIN, x_gap=16),
    "a stride of no multiple of 16": replace(PLAIN, x_gap=8),
    "ids": replace(PLAIN, ids_dtype=torch.int64),
    "weights": replace(PLAIN, weights_dtype=B),
    "a map": replace(PLAIN, map_dtype=torch.int32),
    "a map's size": replace(PLAIN, map_dtype=torch.int32, map_size=16),
    "a map's type": replace(PLAIN, map_dtype=torch.int8, map_size=16),
    "options": replace(PLAIN, options=CallOptions("gelu")),
    "dtype": replace(PLAIN, layer=2),
    "factors": replace(PLAIN, layer=3),
    "groups": replace(PLAIN, layer=1),
    "biases": replace(PLAIN, layer=5),
    "no gate": replace(PLAIN, layer=4),
    "columns that are padding": replace(PLAIN, layer=9),
    "columns of two programs": replace(PLAIN, layer=7),
    "many tokens": replace(PLAIN, tokens=5000),
}


def test_calls_that_differ_in_one_thing_are_not_taken_for_each_other(driver: Driver) -> None:
    """All are repeated, and each as itself, though the others were launched before it."""
    for kind in (PLAIN, *NEIGHBOURS.values()):
        backend.apply(*kind.make(0))
    for name, kind in {"": PLAIN, **NEIGHBOURS}.items():
        for which in (0, 1):
            assert same_launches(driver, kind.make(which)), name
    assert len(replay._kinds) == 1 + len(NEIGHBOURS)


@pytest.mark.parametrize(
    "kind",
    [
        replace(PLAIN, x_offset=1),
        replace(PLAIN, x_offset=4),
        replace(PLAIN, ids_offset=1),
        replace(PLAIN, weights_offset=1),
        replace(PLAIN, x_reversed=True),
        replace(PLAIN, ids_gap=8),
        replace(PLAIN, weights_gap=8),
        replace(PLAIN, map_dtype=torch.int32, map_step=2),
    ],
    ids=str,
)
def test_copied_and_misaligned_tensors_take_the_usual_path(driver: Driver, kind: Arguments) -> None:
    """Even after a call whose launches would fit but for that; and nothing is kept of them."""
    backend.apply(*replace(kind, x_offset=0, ids_offset=0, weights_offset=0, x_reversed=False, map_step=1).make(0))
    backend.apply(*kind.make(0))
    kept = len(replay._kinds)
    assert not same_launches(driver, kind.make(0))
    assert len(replay._kinds) == kept


def test_weights_that_moved_are_read_where_they_are(driver: Driver) -> None:
    """As after sleep or a reload: the parameters are the same, their memory is another; so with tensor descriptors."""
    x, layer, *rest = PLAIN.make(0)
    backend.apply(x, layer, *rest)
    moved = PreparedExperts(layer.meta, {name: tensor.clone() for name, tensor in layer.tensors.items()})
    assert same_launches(driver, (x, moved, *rest))
    for tensor in moved.tensors.values():
        tensor.data = tensor.clone()
    assert same_launches(driver, (x, moved, *rest))
    assert any(
        isinstance(value, tuple) for asked in driver.usual for value in asked.values
    )  # descriptors are among them


def test_weights_of_another_shape_or_out_of_line_are_not_taken_for_those_before(driver: Driver) -> None:
    x, layer, *rest = PLAIN.make(0)
    for _ in range(2):
        backend.apply(x, layer, *rest)
    narrow = dict(layer.tensors)
    words = narrow["w2_words"]
    narrow["w2_words"] = words.view(words.shape[0], -1, words.shape[2], words.shape[3] // 2)
    assert not same_launches(driver, (x, PreparedExperts(layer.meta, narrow), *rest))
    aside = dict(layer.tensors)
    aside["w13_factors"] = torch.zeros(aside["w13_factors"].numel() + 2, dtype=B)[2:].view_as(aside["w13_factors"])
    assert replay._kind(
        x, layer, *rest, [x, *aside.values()], [tensor.data_ptr() for tensor in (x, *aside.values())]
    ) is None  # fmt: skip


def test_weights_in_another_order_are_not_taken_for_those_before(driver: Driver) -> None:
    """Where both GEMMs are square, only names tell their weights apart."""
    x, layer, *rest = replace(PLAIN, layer=10).make(0)
    backend.apply(x, layer, *rest)
    turned = PreparedExperts(layer.meta, dict(sorted(layer.tensors.items(), reverse=True)))
    assert list(turned.tensors) != list(layer.tensors)
    backend.apply(x, turned, *rest)
    assert same_launches(driver, (x, turned, *rest))
    assert same_launches(driver, (x, layer, *rest))


@pytest.mark.parametrize(
    "change",
    [lambda out: out.view(torch.int16), lambda out: out.clone(), lambda out: out.view(-1, 3).t()],
    ids=["bits", "copy", "turned"],
)
def test_a_result_that_no_launch_leaves_so_is_not_repeated(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """What torch does in a call is not noted."""
    last = backend.combine
    monkeypatch.setattr(backend, "combine", lambda *args: change(last(*args)))
    for _ in range(2):
        backend.apply(*PLAIN.make(0))
    assert not driver.direct


def test_calls_of_two_threads_do_not_mix(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's call of the same kind in the middle of a launch, where its arguments are put together."""
    one, other = PLAIN.make(0), PLAIN.make(1)
    backend.apply(*one)
    encode = direct_launch.tensor_map
    came: list[int] = []

    def interrupted(address: int, encoded: tuple[Any, ...]) -> Any:
        if not came:
            came.append(address)
            backend.apply(*other)
        return encode(address, encoded)

    monkeypatch.setattr(direct_launch, "tensor_map", interrupted)
    driver.clear()
    backend.apply(*one)
    assert len(driver.direct) == 8
    weights = [{address for address in asked.addresses if address} for asked in driver.direct]
    mine, theirs = ({tensor.data_ptr() for tensor in call[1].tensors.values()} for call in (one, other))
    assert not any(found & mine and found & theirs for found in weights)


def test_first_calls_of_two_threads_do_not_mix(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's first call of another kind while this one's launches are noted: both are repeated whole."""
    other, last = NEIGHBOURS["dtype"], backend.combine
    came: list[Thread] = []

    def interrupted(*args: Any) -> torch.Tensor:
        if not came:
            came.append(Thread(target=backend.apply, args=other.make(0)))
            came[0].start()
            came[0].join()
        return last(*args)

    monkeypatch.setattr(backend, "combine", interrupted)
    backend.apply(*PLAIN.make(0))
    assert len(replay._kinds) == 2
    for kind in (PLAIN, other):
        assert same_launches(driver, kind.make(1))


def test_a_tensor_in_two_places_of_a_call_is_not_repeated(driver: Driver) -> None:
    """A later call with two tensors there would get one of them twice."""
    x, layer, weights, ids, _, options = replace(PLAIN, tokens=8, top_k=1).make(0)
    one = ids.flatten()
    for _ in range(2):
        backend.apply(x, layer, weights, one.view(8, 1), one, options)
    assert not driver.direct
    other = replace(PLAIN, tokens=8, top_k=1, map_dtype=torch.int32, map_size=8)
    assert not same_launches(driver, other.make(0))


def test_a_view_of_a_call_s_tensor_is_not_taken_for_scratch_memory(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = align.align

    def shifted(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return replace(inner(x, *args, **kwargs), x=x[1:])

    monkeypatch.setattr(backend, "align", shifted)
    for _ in range(2):
        backend.apply(*PLAIN.make(0))
    assert not driver.direct
    assert len(driver.usual) == 8


@pytest.mark.parametrize("chain", ["launch_enter_hook", "launch_exit_hook"])
def test_who_watches_launches_sees_them(driver: Driver, monkeypatch: pytest.MonkeyPatch, chain: str) -> None:
    """Proton adds to these chains; older tools put a function there."""
    for _ in range(2):
        backend.apply(*PLAIN.make(0))
    assert driver.direct
    runtime = direct_launch.triton.knobs.runtime
    hooks = type(getattr(runtime, chain))()
    monkeypatch.setattr(runtime, chain, hooks)
    assert direct_launch.unwatched()
    hooks.add(print)
    assert not same_launches(driver, PLAIN.make(0))
    hooks.remove(print)
    assert same_launches(driver, PLAIN.make(0))
    monkeypatch.setattr(runtime, chain, print)
    assert not same_launches(driver, PLAIN.make(0))
    monkeypatch.setattr(runtime, chain, None)
    assert same_launches(driver, PLAIN.make(0))


def test_a_kernel_s_own_hooks_are_called(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        backend.apply(*PLAIN.make(0))
    assert driver.direct
    monkeypatch.setattr(driver.direct[2].compiled.kernel, "pre_run_hooks", [print])
    assert not same_launches(driver, PLAIN.make(0))


def test_kernels_compiled_for_debugging_are_others(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        backend.apply(*PLAIN.make(0))
    monkeypatch.setattr(direct_launch.triton.knobs.runtime, "debug", True)
    assert not same_launches(driver, PLAIN.make(0))


def test_devices_are_told_apart(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        backend.apply(*PLAIN.make(0))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 3)
    assert not same_launches(driver, PLAIN.make(0))
    asked: list[int] = []
    monkeypatch.setattr(direct_launch, "stream_of", lambda device: asked.append(device) or 7)
    assert same_launches(driver, PLAIN.make(0))
    assert asked == [3]


def test_a_graph_that_is_traced_gets_the_usual_path(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        backend.apply(*PLAIN.make(0))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not same_launches(driver, PLAIN.make(0))


def test_without_a_known_launcher_calls_take_the_usual_path(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_launch, "launcher", lambda compiled: None)
    for _ in range(3):
        backend.apply(*PLAIN.make(0))
    assert not driver.direct
    assert len(driver.usual) == 12


def test_a_call_that_fails_is_not_kept(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one begins anew: its launches are not put behind those of the one that failed."""

    def fails(*args: Any) -> None:
        raise RuntimeError("out of resources")

    with monkeypatch.context() as patched:
        patched.setattr(backend, "combine", fails)
        with pytest.raises(RuntimeError, match="out of resources"):
            backend.apply(*PLAIN.make(0))
    assert not replay._kinds
    assert replay._notes.taken is None
    for _ in range(2):
        assert backend.apply(*PLAIN.make(0)).shape == (3, 512)
    assert same_launches(driver, PLAIN.make(1))


def test_calls_of_much_scratch_memory_take_the_usual_path(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        backend.apply(*PLAIN.make(0))
    (recorded,) = replay._kinds.values()
    for most, repeated in ((recorded.words, True), (recorded.words - 1, False)):
        monkeypatch.setattr(replay, "_MOST_WORDS", most)
        replay._kinds.clear()
        backend.apply(*PLAIN.make(0))
        assert same_launches(driver, PLAIN.make(0)) is repeated


def test_memory_of_what_is_kept_is_bounded(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST_KINDS", 3)
    for tokens in range(1, 9):
        backend.apply(*replace(PLAIN, tokens=tokens).make(0))
        assert len(replay._kinds) <= 3
    assert same_launches(driver, replace(PLAIN, tokens=8).make(0))
