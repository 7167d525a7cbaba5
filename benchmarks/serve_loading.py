"""Time and peak memory of loading a model: BF16, quantised while it loads, and packed, one after another.

    python -m vllm_ext.benchmarks.serve_loading SPEC.json RESULT.json

Each is loaded in a process of its own, as vLLM's worker does it (`get_model`) without the rest of an engine. BF16 comes
first and last: the first load may find the file system cold.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm_ext.benchmarks.serve_checkpoints import BF16, PACKED

METHOD = {"quantization": "w4a16-grouped"}
LOADS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("BF16, first", BF16, {}),
    ("w4a16-grouped at load", BF16, METHOD),
    ("w4a16-grouped, packed", PACKED, METHOD),
    ("BF16", BF16, {}),
)
GIB = 1 << 30


class HostPeak:
    """Largest RssAnon while the block runs: pages of a mapped checkpoint count in the resident size, but are shared."""

    def __enter__(self) -> HostPeak:
        self.bytes = self.before = _anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.bytes = max(self.bytes, _anonymous_bytes())

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def load(model: str, options: dict[str, Any]) -> dict[str, float]:
    """Load one model in this process and let it go; seconds, and GiB on the device and in the process's own memory."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does: loaders call it on any device
    engine = EngineArgs(model=model, skip_tokenizer_init=True, enforce_eager=True, max_model_len=1024, **options)
    config = engine.create_engine_config()
    with set_current_vllm_config(config):
        _join_world()
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with HostPeak() as host:
            loaded = get_model(vllm_config=config)
        if on_gpu:
            torch.cuda.synchronize()
        found = {"seconds": time.perf_counter() - start, "host_peak_gib": (host.bytes - host.before) / GIB}
        if on_gpu:
            found["device_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
            found["device_gib"] = torch.cuda.memory_allocated() / GIB
    del loaded
    return found


def _join_world() -> None:
    import torch
    from vllm import distributed

    if not torch.distributed.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, backend)
        distributed.initialize_model_parallel(1)


def measure_loading(paths: dict[str, Path], folder: Path, timeout: float = 240) -> dict[str, Any]:
    """Every row of LOADS whose checkpoint is there; a load that fails is recorded as {"failed": why}."""
    result = folder / "loading.json"
    spec = folder / "loading_spec.json"
    spec.write_text(json.dumps({name: str(path) for name, path in paths.items()}), encoding="utf-8")
    log = folder / "loading.log"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", "vllm_ext.benchmarks.serve_loading", str(spec), str(result)]
    with log.open("w", encoding="utf-8") as output:
        try:
            subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=timeout)
        except subprocess.TimeoutExpired:
            print(f"bench serve: loading took more than {timeout:.0f} s", file=sys.stderr)
    if not result.exists():
        return {"failed": log.read_text(encoding="utf-8", errors="replace")[-2000:]}
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def _load_into(path: str, model: str, options: dict[str, Any]) -> None:
    try:
        row: dict[str, Any] = dict(load(model, options))
    except Exception as error:
        traceback.print_exc()
        row = {"failed": f"{type(error).__name__}: {error}"[:500]}
    Path(path).write_text(json.dumps(row), encoding="utf-8")


def main(spec_path: str, result_path: str) -> None:
    """See the module. The processes are forks of this one, which has vLLM imported and no device touched."""
    from vllm_ext.plugin import register

    register()
    for module in ("vllm.engine.arg_utils", "vllm.model_executor.model_loader"):
        import_module(module)
    paths = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    fork = multiprocessing.get_context("fork")
    rows: dict[str, Any] = {}
    for name, checkpoint, options in LOADS:
        if checkpoint not in paths:
            continue
        one = Path(result_path).with_suffix(".one")
        one.unlink(missing_ok=True)
        process = fork.Process(target=_load_into, args=(str(one), paths[checkpoint], options))
        process.start()
        process.join()
        done = one.exists()
        rows[name] = json.loads(one.read_text()) if done else {"failed": f"ended with status {process.exitcode}"}
        print(name, rows[name], flush=True)
        Path(result_path).write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
