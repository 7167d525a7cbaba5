"""How fast quantising is: "hqq" against "minmax" and against copying, and packing a checkpoint against the disk.

    vllm-ext bench quantizer-speed --out build/speed

Refuses to time what fails its check: "hqq" must not have a higher squared error than "minmax" on the tensor timed.
Writes quantizer_speed.json. GB/s count the BF16 bytes read.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm_ext.benchmarks.registry import describe_run

from vllm_ext.quantization import quantize_weight
from vllm_ext.quantization.pack import pack_checkpoint

SHAPE = (1408, 2816)
ROUNDS = 11


def median_seconds(actions: Mapping[str, Callable[[], Any]], device: str) -> dict[str, float]:
    """Median wall times of `ROUNDS` rounds after one to warm up, the device's work included.

    The actions take turns in each round, so that a host or a clock that drifts moves all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(ROUNDS + 1):
        for name, action in actions.items():
            if device != "cpu":
                torch.cuda.synchronize()
            start = time.perf_counter()
            action()
            if device != "cpu":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def quantisers(device: str, experts: int) -> list[dict[str, Any]]:
    """Rows of both methods, every zero point, groups of 128 and 64, for one tensor of `experts`."""
    weight = (torch.randn(experts, *SHAPE, device=device) * 0.02).bfloat16()
    target = torch.empty_like(weight)
    copying = median_seconds({"copy": lambda: target.copy_(weight)}, device)["copy"]
    rows = [{"what": "copy", "experts": experts, "seconds": copying, "gb_per_second": weight.nbytes / copying / 1e9}]
    for group in (128, 64):
        for kind in ("float", "int", None):
            options: dict[str, Any] = {"symmetric": kind is None, "zero_point": kind or "float"}
            errors = {}
            for method in ("minmax", "hqq"):
                sample = quantize_weight(weight[0], group, method=method, **options).dequantize(torch.float64)
                errors[method] = float((sample - weight[0].double()).square().sum())
            if errors["hqq"] > errors["minmax"]:
                raise RuntimeError(f"quantizer_speed: hqq's error {errors['hqq']} exceeds minmax's {errors['minmax']}")
            methods = ("minmax", "hqq")
            actions = {name: partial(quantize_weight, weight, group, method=name, **options) for name in methods}
            seconds = median_seconds(actions, device)
            for method in ("minmax", "hqq"):
                rows.append(
                    {
                        "what": method,
                        "experts": experts,
                        "group": group,
                        "zero_point": kind or "symmetric",
                        "seconds": seconds[method],
                        "gb_per_second": weight.nbytes / seconds[method] / 1e9,
                        "times_minmax": seconds[method] / seconds["minmax"],
                        "squared_error_of_minmax": errors[method] / errors["minmax"],
                    }
                )
    return rows


def packing(folder: Path, device: str, shards: int, experts: int, jobs: int) -> dict[str, Any]:
    """Throughput of packing a checkpoint of `shards` files, beside plainly reading and writing as many bytes."""
    source, destination = folder / "source", folder / "packed"
    shutil.rmtree(folder, ignore_errors=True)
    source.mkdir(parents=True)
    rows, columns = SHAPE
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard:05d}.safetensors"
        tensors = {
            f"layers.{shard}.experts.{part}_proj": (torch.randn(experts, *shape, device=device) * 0.02).bfloat16().cpu()
            for part, shape in (("gate_up", (rows, columns)), ("down", (columns, rows // 2)))
        }
        weight_map.update(dict.fromkeys(tensors, name))
        save_file(tensors, source / name)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (source / "config.json").write_text(json.dumps({"hidden_size": columns}))
    total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    start = time.perf_counter()
    copied = folder / "copy"
    for path in source.glob("*.safetensors"):
        with open(path, "rb") as reader, open(copied, "wb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 24)
            os.fsync(writer.fileno())
    copying = time.perf_counter() - start
    start = time.perf_counter()
    pack_checkpoint(source, destination, device=device, jobs=jobs, progress=False)
    seconds = time.perf_counter() - start
    shutil.rmtree(folder)
    return {
        "source_gb": total / 1e9,
        "jobs": jobs,
        "device": device,
        "seconds": seconds,
        "gb_per_second": total / seconds / 1e9,
        "plain_copy_gb_per_second": total / copying / 1e9,
    }


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="vllm-ext bench quantizer-speed", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON, and for scratch files")
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--experts", type=int, help="experts of 1408 x 2816 in the tensor (default: 128; CPU: 4)")
    parser.add_argument("--shards", type=int, default=2, help="files of the checkpoint that is packed; 0: none")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(argv)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    experts = options.experts or (4 if device == "cpu" else 128)
    # One expert by itself is what a checkpoint of a tensor for each expert is packed by: launches bound it, not bytes.
    rows = [row for count in (experts, 1) for row in quantisers(device, count)]
    results: dict[str, Any] = {"benchmark": "quantizer_speed", "experts": experts, "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    if options.shards:
        results["packing"] = packing(options.out / "scratch", device, options.shards, experts, options.jobs)
    results["device"] = torch.cuda.get_device_name(0) if device != "cpu" else "cpu"
    results["threads"] = torch.get_num_threads()
    results["machine"] = describe_run()
    (options.out / "quantizer_speed.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"{'experts':8}{'what':8}{'group':>6}  {'zero point':11}{'GB/s':>9}{'x minmax':>10}{'error':>8}")
    for row in results["rows"]:
        print(
            f"{row['experts']:<8}{row['what']:8}{row.get('group', ''):>6}  {row.get('zero_point', ''):11}"
            f"{row['gb_per_second']:9.2f}{row.get('times_minmax', 0):10.2f}{row.get('squared_error_of_minmax', 0):8.3f}"
        )
    if "packing" in results:
        row = results["packing"]
        print(
            f"packing {row['source_gb']:.2f} GB with {row['jobs']} job(s): {row['gb_per_second']:.2f} GB/s; "
            f"copying it: {row['plain_copy_gb_per_second']:.2f} GB/s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
