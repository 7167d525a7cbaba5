"""The options: what is accepted, what is refused and how, and which modules a pattern names."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

from vllm_ext.quantization import QUANT_METHOD, Scheme
from vllm_ext.quantization.names import is_routed_experts, matches, unmatched


def test_defaults_are_the_documented_configuration():
    config = Scheme().to_dict()
    assert config["quant_method"] == QUANT_METHOD == "w4a16-grouped"
    assert config["version"] == 1
    assert (config["group_size_w13"], config["group_size_w2"]) == (128, 64)
    assert config["symmetric"] is False
    assert config["zero_point"] == "float"
    assert config["ignore"] == []


def test_round_trips_through_json_and_pickle():
    """It is written to config.json and pickled to every worker."""
    scheme = Scheme(32, 8, symmetric=True, zero_point="int", method="minmax", ignore=["re:.*layers\\.0\\..*"])
    assert Scheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme
    assert pickle.loads(pickle.dumps(scheme)) == scheme
    assert hash(scheme) == hash(Scheme.from_dict(scheme.to_dict()))


def test_unknown_option_is_named_with_the_allowed_ones():
    with pytest.raises(ValueError, match=r"'group_size'.*allowed:.*group_size_w13.*ignore"):
        Scheme.from_dict({"group_size": 32})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size_w13": 12}, "group_size_w13.*multiple of 8"),
        ({"group_size_w2": "64"}, "group_size_w2.*multiple of 8"),
        ({"group_size_w2": -8}, "group_size_w2.*multiple of 8"),
        ({"symmetric": 1}, "symmetric"),
        ({"zero_point": "uint"}, "zero_point"),
        ({"zero_point": None}, "zero_point"),
        ({"method": "gptq"}, "method"),
        ({"ignore": "lm_head"}, "ignore must be a list"),
        ({"ignore": [3]}, "ignore holds"),
        ({"ignore": ["re:("]}, "ignore: .*no regular expression"),
        ({"version": 2}, "version"),
        ({"version": True}, "version"),
        ({"quant_method": "gptq"}, "quant_method"),
    ],
)
def test_every_value_is_checked(options, message):
    with pytest.raises(ValueError, match=f"w4a16-grouped: {message}"):
        Scheme.from_dict(options)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("mlp.gate", "model.layers.1.mlp.gate", True),
        ("mlp.gate", "model.layers.1.mlp.gate_proj", False),
        ("layers.1", "model.layers.1.mlp.experts", True),
        ("layers.1", "model.layers.11.mlp.experts", False),
        ("layers.1", "model.layers.10.mlp.experts", False),
        ("model.layers.1.mlp.experts", "model.layers.1.mlp.experts", True),
        ("model.layers.1.mlp.experts", "other.model.layers.1.mlp.experts", True),
        ("odel.layers", "model.layers.1", False),
        ("re:.*layers\\.[02]\\.", "model.layers.2.mlp.experts", True),
        ("re:.*layers\\.[02]\\.", "model.layers.12.mlp.experts", False),
        ("re:layers", "model.layers.2", False),
        ("re:model\\.layers", "model.layers.2", True),
    ],
)
def test_patterns_match_by_component(pattern, name, expected):
    """C23: `mlp.gate` has been seen to switch off `mlp.gate_proj`, and layer 1 to take layer 11 with it."""
    assert matches(pattern, name) is expected


def test_unmatched_patterns_are_found():
    names = ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts"]
    assert unmatched(["layers.1", "layers.3", "re:.*mlp", "mlp.expert"], names) == ["layers.3", "mlp.expert"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.mlp.experts", True),
        ("model.language_model.layers.0.mlp.experts", True),
        ("model.layers.0.block_sparse_moe.experts", True),
        ("model.layers.0.mlp.gate", False),
        ("model.layers.0.mlp.router", False),
        ("model.layers.0.mlp.shared_expert", False),
        ("model.layers.0.mlp.shared_experts", False),
        ("model.layers.0.mlp.shared_expert_gate", False),
        ("model.layers.0.shared_mlp.experts", False),
        ("model.layers.0.mlp.experts.0.gate_proj", False),
    ],
)
def test_only_routed_experts_are_covered(name, expected):
    """C06: a router in 4 bits sends tokens to the wrong experts."""
    assert is_routed_experts(name) is expected
    assert Scheme().covers(name) is expected
    assert not Scheme(ignore=["layers.0"]).covers(name)


def test_quantize_uses_the_group_of_its_shard():
    scheme = Scheme(group_size_w13=32, group_size_w2=16, symmetric=True)
    weight = torch.randn(4, 64)
    assert scheme.quantize(weight, "w13").group_size == 32
    assert scheme.quantize(weight, "w2").group_size == 16
    assert scheme.quantize(weight, "w2").symmetric
    with pytest.raises(ValueError, match="'w13' or 'w2'"):
        scheme.quantize(weight, "w1")
