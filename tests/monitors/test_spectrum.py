"""The small cores against the dense matrices that they stand for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trimtab.monitors.spectrum import (
    effective_rank,
    frobenius_norm,
    qk_increment,
    spectral_entropy,
    stable_rank,
    wide_product,
)

# Widths of model and head: tall heads, and heads as wide as half the model, as the model, and wider.
SHAPES = [(48, 8), (16, 8), (15, 8), (8, 8), (6, 8), (1, 3), (5, 1)]
# Four rounding errors of float64 for each of the few dozen terms of a sum.
EXACT = 1e-12


def weights(d_model: int, d_head: int, relative: float = 1e-2, lead: tuple[int, ...] = (3,)) -> list[Tensor]:
    """Query and key weights of two snapshots in float64, the update ``relative`` times as large as the weights."""
    generator = torch.Generator().manual_seed(d_model * 100 + d_head)
    wq, wk, dwq, dwk = torch.randn(4, *lead, d_model, d_head, generator=generator, dtype=torch.float64)
    return [wq, wk, wq + relative * dwq, wk + relative * dwk]


def dense_increments(wq_old: Tensor, wk_old: Tensor, wq_new: Tensor, wk_new: Tensor) -> dict[str, Tensor]:
    """The slow truth: the matrices themselves."""
    dwq, dwk = wq_new - wq_old, wk_new - wk_old
    return {
        "d1": wq_new @ wk_new.mT - wq_old @ wk_old.mT,
        "d2": dwq @ wk_old.mT + wq_old @ dwk.mT,
        "d3": dwq @ dwk.mT,
        "dwq": dwq,
        "dwk": dwk,
    }


def entropy_of(values: np.ndarray) -> float:
    """The slow truth of one spectrum, as it is defined."""
    shares = [v**2 / sum(w**2 for w in values) for v in values]
    return -sum(p * math.log(p) for p in shares if p > 0) / math.log(len(shares))


@pytest.mark.parametrize(("d_model", "d_head"), SHAPES)
def test_the_singular_values_of_the_cores_are_those_of_the_dense_matrices(d_model, d_head):
    given_weights = weights(d_model, d_head)
    values = qk_increment(*given_weights)
    for name, dense in dense_increments(*given_weights).items():
        expected = torch.linalg.svdvals(dense)
        kept = values[name].shape[-1]
        scale = expected[:, :1]
        torch.testing.assert_close(values[name] / scale, expected[:, :kept] / scale, rtol=0, atol=EXACT)
        # Nothing that is left out was there.
        assert (expected[:, kept:] / scale <= EXACT).all()


@pytest.mark.parametrize(("d_model", "d_head"), SHAPES)
def test_there_are_as_many_values_as_the_matrix_can_have_rank(d_model, d_head):
    values = qk_increment(*weights(d_model, d_head))
    assert {name: v.shape[-1] for name, v in values.items()} == {
        "d1": min(2 * d_head, d_model),
        "d2": min(2 * d_head, d_model),
        **dict.fromkeys(("d3", "dwq", "dwk"), min(d_head, d_model)),
    }


def test_first_and_second_order_make_up_the_whole_increment():
    given_weights = weights(48, 8)
    dense = dense_increments(*given_weights)
    torch.testing.assert_close(dense["d1"], dense["d2"] + dense["d3"], rtol=0, atol=EXACT)
    wq_old, wk_old, wq_new, wk_new = given_weights
    dwq, dwk = wq_new - wq_old, wk_new - wk_old
    by_midpoints = dwq @ (wk_old + dwk / 2).mT + (wq_old + dwq / 2) @ dwk.mT
    torch.testing.assert_close(torch.linalg.svdvals(by_midpoints)[:, :16], qk_increment(*given_weights)["d1"])


@pytest.mark.parametrize("relative", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("rank", [2, 16])
def test_in_float32_the_entropy_is_that_of_the_dense_matrix_however_small_the_update(relative, rank):
    generator = torch.Generator().manual_seed(rank)
    wq, wk = 0.02 * torch.randn(2, 4, 96, 16, generator=generator)
    factors = torch.randn(4, 4, 96, rank, generator=generator)
    dwq, dwk = (0.02 * relative * f @ torch.randn(4, rank, 16, generator=generator) / rank**0.5 for f in factors[:2])
    of_float32 = [wq, wk, wq + dwq, wk + dwk]
    values = qk_increment(*of_float32)
    for name, dense in dense_increments(*(w.double() for w in of_float32)).items():
        expected = spectral_entropy(torch.linalg.svdvals(dense)[:, : values[name].shape[-1]])
        assert values[name].dtype == torch.float32
        torch.testing.assert_close(spectral_entropy(values[name]).double(), expected, rtol=0, atol=1e-6)


def test_the_root_of_a_gram_matrix_would_not_do_in_place_of_qr():
    wq, wk, wq_new, wk_new = (w.float() for w in weights(96, 16, relative=1e-4))

    def root(block: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(block.mT @ block)
        return values.clamp(min=0).sqrt()[..., None] * vectors.mT

    core = root(torch.cat([wq_new - wq, wq], -1)) @ root(torch.cat([wk, wk_new - wk], -1)).mT
    right = spectral_entropy(qk_increment(wq, wk, wq_new, wk_new)["d2"])
    assert ((spectral_entropy(torch.linalg.svdvals(core)) - right).abs() > 1e-2).all()


def test_query_heads_can_share_a_key_head():
    wq_old, wk_old, wq_new, wk_new = weights(24, 4, lead=(2, 3))
    wk_old, wk_new = wk_old[:, :1], wk_new[:, :1]
    shared = qk_increment(wq_old, wk_old, wq_new, wk_new)
    repeated = qk_increment(wq_old, wk_old.expand_as(wq_old), wq_new, wk_new.expand_as(wq_new))
    for name in shared:
        assert shared[name].shape[:2] == (2, 3)
        torch.testing.assert_close(shared[name], repeated[name], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", range(4))
def test_a_head_that_is_not_finite_leaves_the_heads_beside_it_alone(bad, where):
    given_weights = weights(24, 4)
    clean = qk_increment(*given_weights)
    given_weights[where][1, 0, 0] = bad
    broken = qk_increment(*given_weights)
    side = "dwq" if where in (0, 2) else "dwk"
    for name in ("d1", "d2", "d3", side):
        assert broken[name][1].isnan().all()
        assert spectral_entropy(broken[name])[1].isnan()
        torch.testing.assert_close(broken[name][[0, 2]], clean[name][[0, 2]], rtol=0, atol=0)


def test_weights_that_overflow_are_values_that_are_not_finite():
    huge = [w.float() * 1e30 for w in weights(24, 4)]
    assert qk_increment(*huge)["d2"].isnan().all()


def test_an_update_of_zero_has_the_norm_zero_and_spreads_over_nothing():
    wq, wk, _, _ = weights(24, 4)
    for values in qk_increment(wq, wk, wq, wk).values():
        assert (frobenius_norm(values) == 0).all()
        for measure in (spectral_entropy, effective_rank, stable_rank):
            assert measure(values).isnan().all()


def test_an_update_of_rank_one_has_entropy_zero():
    wq, wk, _, _ = weights(24, 4)
    direction = torch.ones(24, 4, dtype=torch.float64)
    values = qk_increment(wq, wk, wq + direction, wk)
    for name in ("dwq", "d2"):
        assert spectral_entropy(values[name]).abs().max() < EXACT
        torch.testing.assert_close(effective_rank(values[name]), torch.ones(3, dtype=torch.float64))
        torch.testing.assert_close(stable_rank(values[name]), torch.ones(3, dtype=torch.float64))


def test_no_value_is_below_zero_and_a_single_direction_has_entropy_zero():
    assert spectral_entropy(torch.tensor([[3.0], [0.5]])).tolist() == [0.0, 0.0]
    assert math.isnan(spectral_entropy(torch.tensor([0.0])))


@settings(deadline=None)
@given(
    st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=12),
    st.sampled_from([1.0, 1e-30, 1e30]),
)
def test_the_measures_are_those_of_their_definitions_at_any_scale(values, scale):
    spectrum = torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
    scaled = (spectrum * scale).float()
    expected = entropy_of(spectrum.numpy())
    assert float(spectral_entropy(scaled)) == pytest.approx(expected, abs=1e-6)
    assert float(effective_rank(scaled)) == pytest.approx(math.exp(expected * math.log(len(values))), rel=1e-5)
    assert float(stable_rank(scaled)) == pytest.approx(float((spectrum**2).sum() / spectrum[0] ** 2), rel=1e-5)
    assert float(frobenius_norm(scaled)) == pytest.approx(float(spectrum.norm() * scale), rel=1e-5)
    assert 0 <= float(spectral_entropy(scaled)) <= 1 + 1e-6


def test_a_power_of_one_weighs_the_values_themselves():
    assert float(spectral_entropy(torch.tensor([2.0, 1.0, 1.0, 0.0]), power=1)) == pytest.approx(0.75)


def test_a_wide_product_on_the_cpu_is_the_product():
    a, b = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(wide_product(a, b), a @ b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_a_lower_matmul_precision_does_not_reach_the_cores():
    given_weights = [w.float().cuda() for w in weights(256, 64, relative=1e-4)]
    expected = qk_increment(*(w.double() for w in given_weights))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        values = qk_increment(*given_weights)
    finally:
        torch.set_float32_matmul_precision(before)
    for name, of_head in values.items():
        torch.testing.assert_close(
            spectral_entropy(of_head).double(), spectral_entropy(expected[name]), rtol=0, atol=1e-6
        )
