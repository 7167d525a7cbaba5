"""The HA-NPU planner: from an operator graph and a chip to a static plan of a linear-attention prefill.

Standard library and numpy only. Method: "Empowering Hybrid Attention Models on NPUs", arXiv 2609.32114.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_ext.ha_npu.plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]


def __getattr__(name: str) -> Any:
    """Builds of the kernels import modules of this package where there is no numpy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_ext.ha_npu import plan

    return getattr(plan, name)
