"""What registering does to every supported vLLM, each tried in a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

PREAMBLE = """
import json, os, sys
MODEL = sys.argv[1]

def message(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"

def show(value):
    print("RESULT " + json.dumps(value))
"""


def run(code: str, vllm_path: str = "", model: Path | str = "", **environment: str) -> Any:
    """Run `code` in a fresh interpreter with `vllm_path` first; what it gave to `show`."""
    env = {**os.environ, "PYTHONPATH": vllm_path, "VLLM_LOGGING_LEVEL": "WARNING", **environment}
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), str(model)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    pytest.fail(f"no result\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def test_register_is_quick_idempotent_and_imports_nothing_heavy() -> None:
    """vLLM calls register() in every process; a slow or importing one delays each start."""
    seconds, again, loaded = run(
        """
        import time, vllm
        from vllm_ext import plugin
        before = set(sys.modules)
        start = time.process_time(); plugin.register(); first = time.process_time() - start
        finders = len(sys.meta_path)
        plugin.register(); plugin.platform()
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        heavy = new & {"triton", "torch_npu", "torch"}
        models = [name for name in set(sys.modules) - before if name.startswith("vllm.model_executor")]
        show([first, len(sys.meta_path) - finders, sorted(heavy) + models])
        """
    )
    assert seconds < 0.05
    assert again == 0
    assert loaded == []


def test_register_is_quick_where_vllm_is_fully_imported() -> None:
    """Then the hooks run at once instead of later; the bound is the same.

    CPU time, because on a busy machine the wall clock counts what other processes do; no garbage collection, because
    one of all that vLLM's import left behind takes 0.3 s, and whether it comes now is chance.
    """
    seconds, loaded = run(
        """
        import gc, time
        import vllm.engine.arg_utils, vllm.model_executor.layers.quantization, vllm.v1.attention.backends.registry
        import vllm.model_executor.model_loader.base_loader
        from vllm_ext import plugin
        plugin._registered = False
        gc.disable()
        before = set(sys.modules)
        start = time.process_time(); plugin.register(); seconds = time.process_time() - start
        show([seconds, sorted(name for name in set(sys.modules) - before if not name.startswith("vllm_ext"))])
        """,
        VLLM_PLUGINS="",
    )
    assert seconds < 0.05
    assert loaded == []


@pytest.mark.vllm
def test_register_survives_our_own_module_being_imported_first() -> None:
    """Unpickling a configuration imports our module, whose import brings in vLLM's registry half way through."""
    known = run(
        """
        from vllm_ext import plugin
        plugin.register()
        import vllm_ext.model_executor.quantization
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
        show(["w4a16-grouped" in QUANTIZATION_METHODS, get_quantization_config("w4a16-grouped").__name__])
        """
    )
    assert known == [True, "W4A16GroupedConfig"]


def test_register_without_vllm_leaves_python_alone(tmp_path: Path) -> None:
    """A package that is installed beside no vLLM, or a broken one, must not raise."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('broken vLLM')")
    text = run(
        """
        from vllm_ext.plugin import register
        register()
        show(message(__import__, "vllm"))
        """,
        vllm_path=str(tmp_path),
    )
    assert text == "ImportError: broken vLLM"


def test_missing_hook_target_costs_one_line_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """A vLLM whose registry changed shape is left as it was, with one line that names the module."""
    from types import ModuleType

    from vllm_ext import plugin

    callback = plugin._guarded(
        "vllm.v1.attention.backends.registry", dict(plugin._HOOKS)["vllm.v1.attention.backends.registry"]
    )
    with caplog.at_level("WARNING", logger="vllm.vllm_ext.plugin"):
        callback(ModuleType("empty"))
    assert len(caplog.records) == 1
    assert "vllm.v1.attention.backends.registry is left as it was" in caplog.text


SCENARIOS = """
import pathlib, pickle
from vllm import LLM  # what a script imports before it builds an engine
from vllm.config import AttentionConfig

results = {"parsed_early": AttentionConfig(backend="ha_npu").backend.name}

from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

def config(*flags):
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", MODEL, "--skip-tokenizer-init", "--max-model-len", "64", *flags])
    return EngineArgs.from_cli_args(args).create_engine_config()

def quantized(*flags):
    return config("--quantization", "w4a16-grouped", *flags)

def refused(options):
    return message(quantized, "--additional-config", json.dumps({"vllm_ext": options}))

c = EngineArgs(model=MODEL, skip_tokenizer_init=True, max_model_len=64,
               attention_config={"backend": "HA_NPU"}).create_engine_config()
results["attention_config"] = [c.attention_config.backend, c.additional_config]
results["unknown_backend"] = message(AttentionConfig, backend="nonsense")

c = quantized("--attention-backend", "Ha_Npu",
              "--additional-config", '{"vllm_ext": {"group_size_w13": 32}, "theirs": 1}')
again = pickle.loads(pickle.dumps(c))
results["both_flags"] = [c.attention_config.backend, c.additional_config, c.quant_config.get_name(),
                         again.additional_config == c.additional_config]

results["bad_key"] = refused({"group_size": 32})
results["bad_group"] = refused({"group_size_w13": 12})
results["bad_zero_point"] = refused({"zero_point": "maybe"})
results["bad_backend"] = refused({"moe_backend": "abacus"})
results["bad_groups"] = {
    repr(size): refused({"group_size_w2": size}) for size in (0, -8, True, "32", None, 8.0)
}
results["no_options"] = [
    message(quantized, "--attention-backend", "ha_npu", "--additional-config", json.dumps({"vllm_ext": given}))
    for given in ([1], "group_size_w13=32", 5)
]

flag = "--quantization-config"
results["quantization_config"] = quantized(flag, '{"group_size_w13": 64}').additional_config
results["bad_quantization_config"] = message(quantized, flag, '{"group_size_w2": 8, "groups": 64}')
results["only_ignore"] = quantized(flag, '{"ignore": ["layers.0"]}').additional_config
results["upper_case_method"] = config(
    "--quantization", "W4A16-Grouped", flag, '{"group_size_w13": 64}'
).additional_config

path = pathlib.Path(MODEL) / "config.json"
text = path.read_text()
document = json.loads(text)
try:
    document["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    path.write_text(json.dumps(document))
    results["fp8"] = message(quantized)
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    document["quantization_config"] = {"quant_method": "compressed-tensors", "format": "float-quantized",
                                       "config_groups": {"all": {"weights": weights, "targets": ["Linear"]}}}
    path.write_text(json.dumps(document))
    results["fp8_compressed_tensors"] = message(quantized)
    document["quantization_config"] = {"quant_method": "w4a16-grouped", "version": 1, "groups": 128}
    path.write_text(json.dumps(document))
    results["bad_checkpoint"] = message(config)
finally:
    path.write_text(text)
show(results)
"""


@pytest.fixture(scope="session")
def outcome(vllm_path: str, tiny_moe_config: Path) -> dict[str, Any]:
    """What one supported vLLM made of every scenario: one interpreter each, since starting one takes seconds."""
    return run(SCENARIOS, vllm_path, tiny_moe_config)


@pytest.mark.vllm
def test_both_flags_become_configuration(outcome: dict[str, Any]) -> None:
    """ha_npu must not stay in attention_config.backend: the engine core unpickles it before plugins load."""
    backend, ours, quantization, pickled = outcome["both_flags"]
    assert backend is None
    assert ours == {"vllm_ext": {"group_size_w13": 32, "linear_attn_backend": "ha_npu"}, "theirs": 1}
    assert quantization == "w4a16-grouped"
    assert pickled


@pytest.mark.vllm
def test_attention_config_takes_ha_npu_before_general_plugins(outcome: dict[str, Any]) -> None:
    """`LLM(attention_config={"backend": "ha_npu"})` is validated before vLLM loads general plugins."""
    assert outcome["parsed_early"] == "HA_NPU"
    assert outcome["attention_config"] == [None, {"vllm_ext": {"linear_attn_backend": "ha_npu"}}]


@pytest.mark.vllm
def test_unknown_attention_backend_is_still_vllms_error(outcome: dict[str, Any]) -> None:
    """It now lists ours among the valid names."""
    assert "nonsense" in outcome["unknown_backend"].lower()
    assert "HA_NPU" in outcome["unknown_backend"]


@pytest.mark.vllm
def test_bad_options_are_refused_by_name(outcome: dict[str, Any]) -> None:
    """Nothing starts on an option that would be ignored, or fail in a worker later."""
    assert "unknown option 'group_size'" in outcome["bad_key"]
    assert "group_size_w13" in outcome["bad_key"]
    assert "multiple of 8" in outcome["bad_group"]
    assert "12" in outcome["bad_group"]
    assert "maybe" in outcome["bad_zero_point"]
    assert "'abacus'" in outcome["bad_backend"]
    assert "'triton'" in outcome["bad_backend"]


@pytest.mark.vllm
def test_every_bad_group_size_is_refused_with_rule_number_and_remedy(outcome: dict[str, Any]) -> None:
    """JSON has more kinds of wrong numbers than 12: true is an int in Python, and "32" is quoted by mistake."""
    assert outcome["bad_groups"].keys() == {"0", "-8", "True", "'32'", "None", "8.0"}
    for given, text in outcome["bad_groups"].items():
        assert f"group_size_w2: group_size must be a positive multiple of 8, got {given}." in text
        assert "leave it out for its default" in text


@pytest.mark.vllm
def test_options_that_are_no_object_are_refused_before_they_are_merged(outcome: dict[str, Any]) -> None:
    """ha_npu is merged into them; merging with a list said "'list' object is not a mapping"."""
    assert all("expected an object of options" in text for text in outcome["no_options"])


@pytest.mark.vllm
def test_checkpoints_of_another_scheme_are_refused_with_a_remedy(outcome: dict[str, Any]) -> None:
    """vLLM's own words for an FP8 checkpoint name a mismatch and no way out."""
    assert "'fp8'" in outcome["fp8"]
    assert "BF16" in outcome["fp8"]
    assert "'groups'" in outcome["bad_checkpoint"]
    assert "vllm-ext quantize" in outcome["bad_checkpoint"]
    assert "'float-quantized'" in outcome["fp8_compressed_tensors"]
    assert "Drop the flag" in outcome["fp8_compressed_tensors"]


@pytest.mark.vllm
def test_quantization_config_flag_carries_the_scheme(outcome: dict[str, Any]) -> None:
    """vLLM's own schema of that flag does not know our keys."""
    assert outcome["quantization_config"] == {"vllm_ext": {"group_size_w13": 64}}
    assert "unknown option 'groups'" in outcome["bad_quantization_config"]
    assert outcome["only_ignore"] == {"vllm_ext": {"ignore": ["layers.0"]}}
    assert outcome["upper_case_method"] == {"vllm_ext": {"group_size_w13": 64}}


def test_option_names_are_the_schemes() -> None:
    """`options` repeats the scheme's keys so that it need not import torch."""
    from dataclasses import fields

    from vllm_ext.options import SCHEME_KEYS
    from vllm_ext.quantization import Scheme

    assert set(SCHEME_KEYS) == {field.name for field in fields(Scheme)}


def test_backend_names_are_the_operators() -> None:
    """As above, for the backends of the experts."""
    from vllm_ext.ops.moe import backend_status
    from vllm_ext.options import MOE_BACKENDS

    assert set(MOE_BACKENDS) == {"auto", *(name for name, _, _ in backend_status())}
