"""What a client of the server, or a caller of beam search, reads when a prefill failed: the reason.

The engine's last output of the request carries the reason as its stop reason (see `linear_attention_failures`). The
server drops that where it answers a bare status 500, and beam search where it looks for the token after it, so it is
kept from one place to the other, both in the caller's process.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from vllm_ext._wrapping import wrap_once
from vllm_ext.model_executor.linear_attention_failures import REASON_MARK

_MOST_KEPT = 1000
_reasons: OrderedDict[str, str] = OrderedDict()


def hook_output_processor(module: Any) -> None:
    """`vllm.v1.engine.output_processor`: note the reason of each of our failures as it arrives."""

    @wrap_once(module.OutputProcessor, "process_outputs")
    def noted(process: Any, self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            reason = output.stop_reason
            if isinstance(reason, str) and REASON_MARK in reason and output.finish_reason is not None:
                state = self.request_states.get(output.request_id)
                if state is not None:
                    keep(state.external_req_id, reason)
        return process(self, engine_core_outputs, *args, **kwargs)


def keep(request_id: str, reason: str) -> None:
    """Keep a reason until it is asked for; the oldest go when nobody asks (a client that has gone away)."""
    _reasons[request_id] = reason
    while len(_reasons) > _MOST_KEPT:
        _reasons.popitem(last=False)


def take(request_id: str) -> str | None:
    """The reason kept for a request, or for one of its parts: `cmpl-1` has prompts `cmpl-1-0`, `cmpl-1-1`, ..; the
    turns of a response and a batch's conversations are `resp_1_0`, `resp_1_1`, ...
    """
    for known in _reasons:
        if known == request_id or known.startswith((f"{request_id}-", f"{request_id}_")):
            return _reasons.pop(known)
    return None


def hook_serving(module: Any) -> None:
    """The server's module with `_raise_if_error`: answer with the reason where there is one."""

    def raise_with_reason(raise_if_error: Any, self: Any, finish_reason: str | None, request_id: str) -> None:
        reason = take(request_id) if finish_reason == "error" else None
        if reason is not None:
            raise module.GenerationError(reason)
        raise_if_error(self, finish_reason, request_id)

    for cls in list(vars(module).values()):
        if isinstance(cls, type) and "_raise_if_error" in vars(cls):
            wrap_once(cls, "_raise_if_error")(raise_with_reason)


def hook_beam_search(module: Any) -> None:
    """The module with `LLM.beam_search`: an answer without a token, of which it asks for the first, is our failure."""

    def search_with_reason(search: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        _reasons.clear()  # of earlier calls, which have answered them as stop reasons
        try:
            return search(self, *args, **kwargs)
        except IndexError as error:
            if not _reasons:
                raise
            raise RuntimeError(next(iter(_reasons.values()))) from error

    for cls in list(vars(module).values()):
        if isinstance(cls, type) and "beam_search" in vars(cls):
            wrap_once(cls, "beam_search")(search_with_reason)
