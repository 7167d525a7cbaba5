"""`--ray`: shards spread over a real two-node cluster come out as the same bytes."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file
from tiny_checkpoints import contents

from vllm_ext.quantization.cli import quantize_main

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
cluster_utils = pytest.importorskip("ray.cluster_utils")


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one CPU each on this machine."""
    head = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    head.add_node(num_cpus=1)
    yield head
    head.shutdown()


def test_a_two_node_cluster_writes_the_same_bytes(cluster, checkpoint, tmp_path, capsys):
    """Also when a task fails for good on a node: the error is the task's own, and what is finished is kept."""
    source = checkpoint("fused", layers=4)
    options = ["--group-size-w13", "32", "--group-size-w2", "16", "--quiet"]
    assert quantize_main([str(source), str(tmp_path / "here"), *options]) == 0

    shard = source / "model-00004-of-00004.safetensors"
    good = shard.read_bytes()
    tensors = load_file(shard)
    tensors["model.layers.3.experts.down_proj"][1, 2, 3] = float("nan")
    save_file(tensors, shard)
    arguments = [str(source), str(tmp_path / "spread"), "--ray", cluster.address, *options]
    assert quantize_main(arguments) == 1
    assert "model.layers.3.experts.1.down_proj" in capsys.readouterr().err
    shard.write_bytes(good)
    assert quantize_main([*arguments, "--resume"]) == 0
    assert contents(tmp_path / "spread") == contents(tmp_path / "here")


def test_an_address_without_a_cluster_is_an_error(checkpoint, tmp_path, capsys):
    source = checkpoint()
    assert quantize_main([str(source), str(tmp_path / "packed"), "--ray", "nonsense", "--quiet"]) == 1
    assert "--ray nonsense: no cluster there" in capsys.readouterr().err
