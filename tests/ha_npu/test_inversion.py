from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.ha_npu.inversion import METHODS, inversion_counts, invert


@settings(max_examples=20, deadline=None)
@given(
    method=st.sampled_from(sorted(METHODS)),
    tiles=st.integers(1, 4),
    seed=st.integers(0, 2**16),
    size=st.sampled_from([0.05, 0.3]),
)
def test_every_method_inverts(method: str, tiles: int, seed: int, size: float) -> None:
    n = 16 * tiles
    a = np.tril(size * np.random.default_rng(seed).standard_normal((n, n)), -1)
    result = invert(a, method).inverse
    # The inverse grows with the condition of the matrix; 1e-9 of its largest entry is far below FP16's 1e-3.
    np.testing.assert_allclose(result, np.linalg.inv(np.eye(n) + a), atol=1e-9 * np.abs(result).max())


@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_the_counts_are_those_of_the_formulas(tiles: int) -> None:
    """Independent counts: 6 products and 9 operands a diagonal tile; row i of the merge has i(i+1)/2 + i products and
    brings i tiles of A, i(i+1)/2 of T, T_ii and i sums."""
    rows = range(1, tiles)
    merge_products = sum(i * (i + 1) // 2 + i for i in rows)
    merge_fractals = sum(i + i * (i + 1) // 2 + 1 + i for i in rows)
    assert inversion_counts(16 * tiles, "neumann-merge") == (6 * tiles + merge_products, 9 * tiles + merge_fractals)
    assert inversion_counts(16 * tiles, "vector-merge") == (merge_products, merge_fractals)
    assert inversion_counts(16 * tiles, "vector-rows") == (0, 0)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_without_reuse_every_product_brings_two_fractals(method: str) -> None:
    products, fractals = inversion_counts(64, method, reuse=False)
    assert fractals == 2 * products
    assert inversion_counts(64, method)[1] <= fractals


def test_an_unknown_method_or_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="neumann-merge"):
        invert(np.zeros((16, 16)), "lu")
    with pytest.raises(ValueError, match="multiple of 16"):
        invert(np.zeros((24, 24)))
    with pytest.raises(ValueError, match="multiple of 16"):
        invert(np.zeros((16, 32)))
