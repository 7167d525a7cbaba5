"""The reference is the definition; these tests hold it to the recurrence written another way, and to its meaning."""

from __future__ import annotations

import numpy as np
import torch

from vllm_ext.ops.linear_attention import chunk_gated_delta_rule, chunk_kda
from vllm_ext.ops.linear_attention.sample import sample_operands, sample_state


def delta_rule_by_matrices(q, k, v, g, beta, state):
    """One head in numpy as a chain of K x K transition matrices: S <- (I - beta k k^T) diag(exp g) S + beta k v^T."""
    outputs = []
    for t in range(len(q)):
        step = np.eye(q.shape[1]) - beta[t] * np.outer(k[t], k[t])
        state = step @ np.diag(np.exp(g[t])) @ state + beta[t] * np.outer(k[t], v[t])
        outputs.append(q.shape[1] ** -0.5 * state.T @ q[t])
    return np.array(outputs), state


def test_reference_is_the_recurrence_in_transition_matrix_form(op, function):
    x = sample_operands(op, 2, 11, 2, 4, 6, 5, dtype=torch.float64)
    initial = sample_state(2, 4, 6, 5).double()
    o, final = function(**x, initial_state=initial, output_final_state=True, backend="reference")
    for b in range(2):
        for head in range(4):
            g = x["g"][b, :, head].double().numpy()
            g = g if op == "kda" else np.repeat(g[:, None], 6, axis=1)
            q, k = (x[name][b, :, head // 2].numpy() for name in "qk")
            v, beta = x["v"][b, :, head].numpy(), x["beta"][b, :, head].numpy()
            expected, state = delta_rule_by_matrices(q, k, v, g, beta, initial[b, head].numpy())
            np.testing.assert_allclose(o[b, :, head].numpy(), expected, rtol=0, atol=1e-12)
            np.testing.assert_allclose(final[b, head].numpy(), state, rtol=0, atol=1e-12)


def test_orthonormal_keys_recall_their_values(op, function):
    """With no decay and beta 1, reading with a stored key returns its value exactly: the point of the delta rule."""
    keys = torch.eye(8, dtype=torch.float64)[None, :, None]
    values = torch.arange(8 * 3, dtype=torch.float64).view(1, 8, 1, 3)
    g = torch.zeros(1, 8, 1, 8) if op == "kda" else torch.zeros(1, 8, 1)
    _, state = function(keys, keys, values, g, torch.ones(1, 8, 1), output_final_state=True, backend="reference")
    assert torch.equal(state[0, 0], values[0, :, 0])


def test_kda_with_equal_channels_is_the_gated_delta_rule(error):
    x = sample_operands("gdn", 1, 70, 2, 4, 16, 8, dtype=torch.float64)
    expected, state = chunk_gated_delta_rule(**x, output_final_state=True, backend="reference")
    x["g"] = x["g"].unsqueeze(-1).expand(-1, -1, -1, 16)
    for backend in ("reference", "cpu"):
        o, final = chunk_kda(**x, output_final_state=True, backend=backend)
        assert error(o, expected) < 1e-13
        assert error(final, state) < 1e-13
