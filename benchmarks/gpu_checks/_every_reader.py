"""The streaming kernels in a form that racecheck can follow: every thread that has read a stage of the ring says so.

As compiled, the consumer's threads pass a barrier and then one of them arrives at the stage's mbarrier for all, so that
the producer may fill the stage anew. That orders every read before the copy, but racecheck (2025.3 and 2026.4) counts
the arriving thread's reads only, and reports each other read of the sums of x as a hazard with the copy. Here each
thread arrives for itself; nothing else of the PTX differs. That no read stands between the barrier and the arrival, so
that the one does speak for all, `test_triton_compiles.py` holds.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

_CONSUMERS = re.compile(r"bar\.sync\s+0, (\d+);")
_ONE_ARRIVAL = re.compile(r"(mbarrier\.init\.shared::cta\.b64 \[%r\d+\]), 1;")
_BY_ONE = re.compile(r"@%p\d+ (mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];)")


def every_reader_arrives(ptx: str) -> str:
    """A streaming kernel's PTX with as many arrivals as the consumer has threads; any other kernel's as it is."""
    if ".entry stream_kernel" not in ptx:
        return ptx
    threads = _CONSUMERS.search(ptx)
    ptx, barriers = _ONE_ARRIVAL.subn(rf"\1, {threads[1] if threads else 0};", ptx)
    ptx, arrivals = _BY_ONE.subn(r"\1", ptx)
    if not (threads and barriers and arrivals):
        raise RuntimeError(
            f"every_reader_arrives: {barriers} barriers of one arrival and {arrivals} arrivals of one thread in the "
            "PTX: Triton writes them in another way now, and racecheck would report hazards that are none"
        )
    return ptx


@contextlib.contextmanager
def compiled_so() -> Iterator[None]:
    """Within, Triton assembles its kernels in that form; they are cached apart from the others."""
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

    make = CUDABackend.make_cubin

    def make_cubin(self: Any, ptx: str, *rest: Any) -> Any:
        return make(self, every_reader_arrives(ptx), *rest)

    folder = {"TRITON_CACHE_DIR": f"{triton.knobs.cache.dir}_every_reader"}
    with mock.patch.object(CUDABackend, "make_cubin", make_cubin), mock.patch.dict(os.environ, folder):
        yield
