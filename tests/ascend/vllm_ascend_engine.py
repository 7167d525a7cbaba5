"""An engine of real vllm-ascend 0.23.0 on real vLLM 0.23.0 (Python of both) and real torch_npu, as far as its layers.

The platform is vLLM-Ascend's and its patches are applied; tensors lie on the CPU, and `npu_emulation` computes the few
operators of torch_npu and of vLLM-Ascend's extension that the checks need. Which chip it is: as the stub calls itself,
and as vLLM-Ascend would have been built for it.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import npu_emulation
import torch
import torch_npu  # noqa: F401
import vllm_ascend
from vllm_ascend import _build_info

ON_310P = os.environ["STUB_SOC_NAME"].startswith("Ascend310P")
_build_info.__device_type__ = "_310P" if ON_310P else "A2"
torch.set_num_threads(1)
torch.set_default_dtype(torch.float16)

from transformers import Qwen3MoeConfig  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm_ascend.utils import adapt_patch  # noqa: E402

from vllm_ext.ops.moe import npu as npu_experts  # noqa: E402

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 64, 32, 2
GROUPS = {"group_size_w13": 32, "group_size_w2": 32}
# On a device of its own "auto" is the NPU's backend; these tensors lie on the CPU.
OPTIONS = {**GROUPS, "moe_backend": "npu"}


def engine_config(packed: dict[str, Any] | None = None, **options: Any) -> Any:
    """What `vllm serve` of a tiny mixture of experts with --quantization w4a16-grouped configures on this platform.

    packed: the `quantization_config` of a packed checkpoint.
    """
    folder = tempfile.mkdtemp()
    Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=64,
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=128,
        dtype="float16",
        **({} if packed is None else {"quantization_config": packed}),
    ).save_pretrained(folder)
    given: dict[str, Any] = {
        "model": folder,
        "quantization": "w4a16-grouped",
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "max_model_len": 128,
        "enforce_eager": True,
        "dtype": "float16",
        "additional_config": {"vllm_ext": OPTIONS},
        **options,
    }
    return EngineArgs(**given).create_engine_config()


CONFIG = engine_config()
# In the order of a worker: general plugins have been loaded, vLLM-Ascend patches vLLM, then the model is built.
adapt_patch(is_global_patch=True)
adapt_patch()

from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm_ascend.ascend_config import init_ascend_config  # noqa: E402
from vllm_ascend.ascend_forward_context import set_ascend_forward_context  # noqa: E402
from vllm_ascend.distributed.parallel_state import init_ascend_model_parallel  # noqa: E402
from vllm_ascend.utils import register_ascend_customop  # noqa: E402

npu_emulation.register()
(EXTENSION,) = Path(vllm_ascend.__file__).parent.glob("vllm_ascend_C.*.so")
npu_emulation.register_ascend(EXTENSION)
npu_experts.usable = lambda device: (True, "")  # CPU tensors stand for the NPU's
npu_experts.npu_device.takes_antiquant = lambda device: not ON_310P

with set_current_vllm_config(CONFIG):
    init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/rendezvous", 0, "gloo")
    initialize_model_parallel(1, 1)
    init_ascend_model_parallel(CONFIG.parallel_config)
    init_ascend_config(CONFIG)
    register_ascend_customop(CONFIG)


@contextmanager
def forward_context(num_tokens: int, metadata: Any = None) -> Any:
    """vLLM-Ascend's context of a step."""
    with (
        set_current_vllm_config(CONFIG),
        set_ascend_forward_context(metadata, CONFIG, num_tokens=num_tokens, num_actual_tokens=num_tokens),
    ):
        yield
