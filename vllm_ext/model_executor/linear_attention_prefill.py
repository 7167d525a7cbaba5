"""A layer's prefill by our operators: chosen and tried when the layer is built, and what happens when a call fails."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from vllm_ext.model_executor.linear_attention_failures import REASON_MARK, STEP, is_reporting_rank, rows_in_this_step
from vllm_ext.model_executor.linear_attention_mapping import describe_mapping
from vllm_ext.ops.linear_attention import chunk_gated_delta_rule, chunk_kda
from vllm_ext.ops.linear_attention.dispatch import select_backend
from vllm_ext.ops.linear_attention.problem import Problem

logger = logging.getLogger("vllm.vllm_ext.linear_attention")
Result = tuple[torch.Tensor, torch.Tensor | None]

_RULES = {"gdn": "gated delta rule", "kda": "Kimi delta attention"}
_OPERATORS: dict[str, Callable[..., Result]] = {"gdn": chunk_gated_delta_rule, "kda": chunk_kda}
_TRIAL_LENGTHS = (65, 1)  # a ragged second chunk, and a sequence of one token


@dataclass(frozen=True)
class PrefillOperands:
    """What every call of vLLM's prefill kernels comes down to, for N packed sequences.

    q, k [1, T, H, K]; v [1, T, HV, V]; g and beta [1, T, HV ..] as the call has them, ready or before activation;
    initial_state [N, HV, ..] in the caller's layout, gathered by slot, zero where one begins; cu_seqlens [N + 1].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None

    def sequence(self, index: int, begin: int, end: int) -> PrefillOperands:
        """The call for one sequence, tokens begin to end of the packed ones."""
        assert self.initial_state is not None
        assert self.cu_seqlens is not None
        rows = {name: getattr(self, name)[:, begin:end] for name in ("q", "k", "v", "g", "beta")}
        bounds = torch.tensor([0, end - begin], dtype=self.cu_seqlens.dtype, device=self.cu_seqlens.device)
        return replace(self, **rows, initial_state=self.initial_state[index : index + 1], cu_seqlens=bounds)


@dataclass
class LayerPrefill:
    """One layer's prefill. layer_name: vLLM's prefix; op: "gdn" or "kda"; fallback: vLLM's kernel when ours refuses."""

    layer_name: str
    op: str
    fallback: bool = False
    warned: bool = field(default=False, repr=False)

    def run(
        self, operands: PrefillOperands, ours: Callable[[PrefillOperands], Result], stock: Callable[[], Result]
    ) -> Result:
        """Our kernel's result: o like v, and the state after each sequence's last token.

        Ours writes no operand, so after a failure `stock` can take over if that was asked for. Otherwise the sequences
        are tried one by one; a request whose sequence fails is ended by the scheduler (see
        `linear_attention_failures`), the others go on. Raises RuntimeError naming the layer and the rule where that
        cannot be: outside a serving step, on a rank nobody listens to, or when the device itself is lost.
        """
        try:
            return ours(operands)
        except Exception as error:
            if self.fallback:
                self._warn_once("%s; vLLM's own kernel takes over for this layer where that happens", error)
                return stock()
            contained = None if _is_fatal(error) else self._one_by_one(operands, ours)
            if contained is None:
                raise RuntimeError(self.explain(error)) from error
            self._warn_once("%s; only the requests concerned end", error)
            return contained

    def explain(self, error: Exception) -> str:
        """The message for whoever asked: the layer, the rule, the reason and the way out."""
        return (
            f"{self._reason(error)}. Serve without --attention-backend ha_npu, or let vLLM's kernel take over such "
            'calls with --additional-config \'{"vllm_ext": {"on_kernel_error": "fallback"}}\''
        )

    def _reason(self, error: Exception) -> str:
        return f"{self.layer_name}: {REASON_MARK} {_RULES[self.op]} failed: {error}"

    def _warn_once(self, message: str, error: Exception) -> None:
        if not self.warned:
            self.warned = True
            logger.warning(message, self._reason(error))

    def _one_by_one(self, operands: PrefillOperands, ours: Callable[[PrefillOperands], Result]) -> Result | None:
        """The call sequence by sequence, zero for those that fail; None where a failed one could not be reported."""
        if operands.cu_seqlens is None or operands.initial_state is None:
            return None
        bounds = operands.cu_seqlens.tolist()
        rows = rows_in_this_step(self.layer_name, len(bounds) - 1)
        if rows is None:
            return None
        o = torch.zeros_like(operands.v)
        states = torch.zeros_like(operands.initial_state, dtype=torch.float32)
        for index, row in enumerate(rows):
            begin, end = bounds[index : index + 2]
            try:
                part, state = ours(operands.sequence(index, begin, end))
            except Exception as error:
                if _is_fatal(error):
                    return None
                STEP.add(row, self.explain(error))
                continue
            o[:, begin:end] = part
            if state is not None:
                states[index] = state[0]
        return o, states


def _is_fatal(error: Exception) -> bool:
    """Whether serving cannot go on: a lost device, or a shortage of memory only this rank knows of."""
    lost = getattr(torch, "AcceleratorError", ())
    if isinstance(error, lost) or "CUDA error" in str(error):
        return True
    return isinstance(error, torch.OutOfMemoryError) and not is_reporting_rank()


def make_layer_prefill(
    layer_name: str, problem: Problem, fallback: bool, *, num_tokens: int = 2048
) -> LayerPrefill | None:
    """The prefill of a layer with these sizes; None when nothing here can serve it and a fallback was asked for.

    The kernel is tried once on a small call of the layer's sizes and dtypes, so that a refusal is known before anyone
    is served. num_tokens: of the prompt whose mapping the log describes. Raises RuntimeError when nothing can serve it
    and no fallback was asked for.
    """
    prefill = LayerPrefill(layer_name, problem.op, fallback)
    try:
        module, passed_over = select_backend("ha_npu", "auto", problem)
        _try_kernel(problem)
    except Exception as error:
        if not fallback:
            raise RuntimeError(prefill.explain(error)) from error
        prefill._warn_once("%s; vLLM's own kernel takes over for this layer where that happens", error)
        return None
    _announce(problem.op, module.NAME, passed_over)
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            "%s: %s prefill by vllm_ext backend %s%s (%d key heads of %d, %d value heads of %d, %s, %s states); "
            "mapping: %s",
            layer_name,
            problem.op,
            module.NAME,
            f", because {passed_over}" if passed_over else ", the first choice on this device",
            problem.num_heads,
            problem.key_dim,
            problem.num_value_heads,
            problem.value_dim,
            problem.dtype,
            problem.state_dtype,
            describe_mapping(problem, num_tokens, module.NAME),
        )
    return prefill


@functools.cache
def _announce(op: str, backend: str, passed_over: str) -> None:
    """A kernel that is not the device's first choice may be far slower, which must not take a DEBUG log to find out."""
    if passed_over:
        logger.warning("ha_npu: %s prefill by vllm_ext backend %s, because %s", op.upper(), backend, passed_over)
    else:
        logger.info(
            "ha_npu: %s prefill by vllm_ext backend %s; decode and full attention stay vLLM's", op.upper(), backend
        )


@functools.cache
def _try_kernel(problem: Problem) -> None:
    """Run the chosen kernel on constants. Raises what the kernel raises, RuntimeError when its answer is not finite."""
    tokens, device = sum(_TRIAL_LENGTHS), problem.device

    def full(value: float, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    q, k = (
        full(problem.key_dim**-0.5, 1, tokens, problem.num_heads, problem.key_dim, dtype=problem.dtype)
        for _ in range(2)
    )
    decays = (problem.num_value_heads, problem.key_dim) if problem.op == "kda" else (problem.num_value_heads,)
    sizes = (len(_TRIAL_LENGTHS), problem.num_value_heads, problem.value_dim, problem.key_dim)
    o, state = _OPERATORS[problem.op](
        q,
        k,
        full(1.0, 1, tokens, problem.num_value_heads, problem.value_dim, dtype=problem.dtype),
        full(-0.1, 1, tokens, *decays, dtype=torch.float32),
        full(0.5, 1, tokens, problem.num_value_heads, dtype=torch.float32),
        initial_state=full(0.0, *sizes, dtype=problem.state_dtype or torch.float32),
        output_final_state=True,
        cu_seqlens=torch.tensor([0, _TRIAL_LENGTHS[0], tokens], dtype=torch.int32, device=device),
        use_qk_l2norm_in_kernel=True,
        state_v_first=True,
    )
    assert state is not None
    if not bool(o.isfinite().all() & state.isfinite().all()):
        raise RuntimeError("a call on constants gave a result that is not finite")
