"""Where shards are packed: in this process, in several, or over a Ray cluster. The bytes written are the same."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from vllm_ext.quantization.pack_shard import PackError, ShardRecord, Workplace, pack_shard
from vllm_ext.quantization.plan import Shard
from vllm_ext.quantization.scheme import Scheme

POLL_SECONDS = 0.2
Tick = Callable[[], None]


def run_here(
    shards: Sequence[Shard], scheme: Scheme, workplace: Workplace, device: str, tick: Tick
) -> Iterator[ShardRecord]:
    """One shard after the other in this process."""
    for shard in shards:
        yield pack_shard(shard, scheme, workplace, device, tick=tick)


def run_processes(
    shards: Sequence[Shard], scheme: Scheme, workplace: Workplace, device: str, tick: Tick, jobs: int
) -> Iterator[ShardRecord]:
    """`jobs` shards at a time, each in a process of its own. Raises PackError when one of them is killed."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _follow_parent, (os.getpid(),))
    try:
        pending = {pool.submit(pack_shard, shard, scheme, workplace, device, threads) for shard in shards}
        while pending:
            done, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
            tick()
            for future in done:
                yield future.result()
    except BrokenProcessPool as error:
        raise PackError(
            "a worker process was killed, most often for lack of memory; run again with --resume and fewer --jobs"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _follow_parent(parent: int) -> None:
    """End this worker when its parent is gone: an orphan would write beside the run that resumes."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_ray(
    shards: Sequence[Shard], scheme: Scheme, workplace: Workplace, device: str, tick: Tick, address: str
) -> Iterator[ShardRecord]:
    """One task a shard over the Ray cluster at `address`, whose nodes must share the destination's file system.

    Raises PackError when Ray is not installed, the cluster cannot be reached, or a task fails for good.
    """
    try:
        import ray
    except ImportError as error:
        raise PackError("--ray needs Ray: pip install 'vllm-ext[ray]'") from error
    started = not ray.is_initialized()
    try:
        if started:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PackError(f"--ray {address}: no cluster there: {error}") from error
    gpus = 1 if device.startswith("cuda") else 0
    task: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=3)(pack_shard)
    pending = [task.remote(shard, scheme, workplace, device, 1) for shard in shards]
    try:
        while pending:
            done, pending = ray.wait(pending, timeout=POLL_SECONDS)
            tick()
            for reference in done:
                try:
                    yield ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause if isinstance(error.cause, Exception) else error from None
                except ray.exceptions.RayError as error:
                    raise PackError(f"--ray {address}: a task was lost: {error}; run again with --resume") from error
    finally:
        for reference in pending:
            ray.cancel(reference, force=True)
        if started:
            ray.shutdown()
