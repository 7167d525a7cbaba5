"""The HA-NPU planner: from an operator graph and a chip to a static plan of a linear-attention prefill.

Standard library and numpy only. Method: "Empowering Hybrid Attention Models on NPUs", arXiv 2609.32114.
"""

from vllm_ext.ha_npu.plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
