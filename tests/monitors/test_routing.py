"""Measures of routers are held against slow ones in NumPy, and against what they must be where that is known."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.monitors import routing


def weights(num_experts=6, width=5, seed=0, dtype=torch.float64):
    return torch.randn(num_experts, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def slow_cosines(weight):
    rows = np.asarray(weight, dtype=np.float64)
    cosines = []
    for i in range(len(rows)):
        for j in range(len(rows)):
            sizes = np.linalg.norm(rows[i]) * np.linalg.norm(rows[j])
            if i != j:
                cosines.append(rows[i] @ rows[j] / sizes if sizes else 0.0)
    return np.array(cosines)


def slow_conditioning(weight):
    rows = np.asarray(weight, dtype=np.float64)
    mean = rows.mean(0)
    return max(np.linalg.norm(row - mean) for row in rows) / np.linalg.norm(mean)


def slow_entropy(logits, scores="softmax"):
    found = []
    for row in np.asarray(logits, dtype=np.float64):
        p = np.exp(row - row.max()) if scores == "softmax" else 1 / (1 + np.exp(-row))
        p = p / p.sum()
        found.append(-sum(x * math.log(x) for x in p if x > 0) / math.log(len(row)))
    return np.array(found)


class TestSimilarity:
    @pytest.mark.parametrize("seed", range(5))
    def test_it_is_the_mean_cosine_over_all_pairs(self, seed):
        weight = weights(seed=seed)
        assert routing.router_similarity(weight).item() == pytest.approx(slow_cosines(weight).mean(), abs=1e-12)

    def test_it_is_the_formula_of_the_mean_unit_row(self):
        weight = weights()
        mean = (weight / weight.norm(dim=-1, keepdim=True)).mean(0)
        expected = (6 * mean.square().sum() - 1) / 5
        assert routing.router_similarity(weight).item() == pytest.approx(expected.item(), abs=1e-12)

    def test_two_opposite_rows_give_minus_one_and_equal_rows_one(self):
        row = weights(1)
        assert routing.router_similarity(torch.cat([row, -3 * row])).item() == pytest.approx(-1)
        assert routing.router_similarity(torch.cat([row, 3 * row])).item() == pytest.approx(1)

    def test_a_row_of_zeros_is_orthogonal_to_the_rest(self):
        weight = weights()
        weight[2] = 0
        assert routing.router_similarity(weight).item() == pytest.approx(slow_cosines(weight).mean(), abs=1e-12)
        assert routing.router_similarity(torch.zeros(3, 4)).item() == 0

    @pytest.mark.parametrize("scale", [1e-30, 1e30])
    def test_the_scale_of_the_weight_does_not_matter(self, scale):
        weight = weights(dtype=torch.float32)
        for measure in (routing.router_similarity, routing.router_conditioning):
            # Rounding of the scaling itself: one unit in the last place of each entry.
            assert measure(weight * scale).item() == pytest.approx(measure(weight).item(), rel=1e-5)

    def test_one_expert_has_no_pair(self):
        assert routing.router_similarity(weights(1)).isnan()

    def test_a_weight_that_is_not_finite_gives_nan_and_its_neighbours_in_the_batch_do_not_notice(self):
        stack = torch.stack([weights(seed=0), weights(seed=1), weights(seed=2)])
        stack[1, 0, 0] = torch.nan
        for measure in (routing.router_similarity, routing.router_conditioning):
            found = measure(stack)
            assert found.isnan().tolist() == [False, True, False]
            assert found[2] == measure(stack[2])
            stack[1, 0, 0] = torch.inf
            assert measure(stack).isnan().tolist() == [False, True, False]


class TestConditioning:
    @pytest.mark.parametrize("seed", range(5))
    def test_it_is_the_farthest_row_over_the_mean(self, seed):
        weight = weights(seed=seed)
        assert routing.router_conditioning(weight).item() == pytest.approx(slow_conditioning(weight), rel=1e-12)

    def test_equal_rows_give_zero_rows_that_cancel_infinity_and_zeros_nan(self):
        assert routing.router_conditioning(torch.ones(3, 4)).item() == 0
        assert routing.router_conditioning(torch.tensor([[1.0, 2.0], [-1.0, -2.0]])).item() == math.inf
        assert routing.router_conditioning(torch.zeros(3, 4)).isnan()

    def test_half_precision_is_computed_in_float32(self):
        weight = weights(dtype=torch.bfloat16)
        assert routing.router_conditioning(weight).dtype == torch.float32
        assert routing.router_conditioning(weight) == routing.router_conditioning(weight.float())


class TestSimilarityBound:
    @settings(max_examples=200, deadline=None)
    @given(
        num_experts=st.integers(2, 6),
        width=st.integers(1, 5),
        spread=st.floats(0.0, 1.5),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_no_two_rows_are_less_alike(self, num_experts, width, spread, seed):
        rng = np.random.default_rng(seed)
        weight = rng.normal(size=width) + spread * rng.normal(size=(num_experts, width)) / math.sqrt(width)
        bound = routing.similarity_bound(routing.router_conditioning(torch.tensor(weight)))
        # float64 rounds each of a few dozen operations by 1e-16.
        assert slow_cosines(weight).min() >= bound.item() - 1e-12

    @pytest.mark.parametrize("eps", [0.1, 0.3, 0.5])
    def test_it_is_reached(self, eps):
        # Two rows on the tangents of the ball, and a third that brings the mean back to (1, 0).
        x, y = 1 - eps**2, eps * math.sqrt(1 - eps**2)
        weight = torch.tensor([[x, y], [x, -y], [3 - 2 * x, 0.0]], dtype=torch.float64)
        conditioning = routing.router_conditioning(weight)
        assert conditioning.item() == pytest.approx(eps)
        assert slow_cosines(weight).min() == pytest.approx(routing.similarity_bound(conditioning).item())

    def test_from_one_on_nothing_is_known(self):
        given = torch.tensor([0.0, 0.5, 1.0, 5.0, math.inf, math.nan])
        found = routing.similarity_bound(given)
        assert found[:5].tolist() == [1.0, 0.5, -1.0, -1.0, -1.0]
        assert found[5].isnan()


class TestRoutingEntropy:
    @pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
    def test_it_is_the_entropy_of_the_normalised_scores(self, scores):
        logits = 3 * weights(50, 7)
        found = routing.routing_entropy(logits, scores)
        assert found.numpy() == pytest.approx(slow_entropy(logits, scores), abs=1e-12)
        assert ((found >= 0) & (found <= 1 + 1e-12)).all()

    @pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
    @pytest.mark.parametrize("level", [-1000.0, 0.0, 1000.0])
    def test_equal_logits_give_one_at_any_level(self, scores, level):
        assert routing.routing_entropy(torch.full((1, 8), level), scores).item() == pytest.approx(1, abs=1e-6)

    def test_softmax_knows_no_level_and_sigmoids_saturate(self):
        logits = torch.tensor([[20.0, 25.0, 30.0]])
        assert routing.routing_entropy(logits).item() == pytest.approx(
            routing.routing_entropy(logits - 100).item(), abs=1e-6
        )
        assert routing.routing_entropy(logits, "sigmoid").item() == pytest.approx(1, abs=1e-6)
        # Far below zero a sigmoid is an exponential, and the two agree.
        assert routing.routing_entropy(logits - 100, "sigmoid").item() == pytest.approx(
            routing.routing_entropy(logits).item(), abs=1e-6
        )

    def test_an_excluded_expert_takes_no_part(self):
        found = routing.routing_entropy(torch.tensor([[1.0, 1.0, -math.inf, -math.inf]]))
        assert found.item() == pytest.approx(0.5)

    def test_a_token_that_is_not_finite_is_nan_and_no_other_is(self):
        logits = torch.zeros(3, 4)
        logits[0, 1], logits[2, 1] = torch.nan, torch.inf
        assert routing.routing_entropy(logits).isnan().tolist() == [True, False, True]

    def test_one_expert_leaves_nothing_to_decide(self):
        assert routing.routing_entropy(torch.zeros(3, 1)).isnan().all()


class TestLowPercentile:
    @pytest.mark.parametrize("count", [1, 2, 7, 100, 4096])
    def test_it_is_that_of_numpy(self, count):
        values = torch.rand(count, generator=torch.Generator().manual_seed(count))
        for share in (0.0, 0.05, 0.5, 1.0):
            assert routing.low_percentile(values, share=share).item() == pytest.approx(
                np.percentile(values.numpy(), 100 * share), rel=1e-6
            )

    def test_only_what_counts_is_looked_at(self):
        generator = torch.Generator().manual_seed(0)
        values, valid = torch.rand(300, generator=generator), torch.rand(300, generator=generator) < 0.4
        values[~valid] = torch.nan
        assert routing.low_percentile(values, valid).item() == pytest.approx(
            np.percentile(values[valid].numpy(), 5), rel=1e-6
        )

    def test_a_value_that_is_nan_is_not_hidden_behind_the_rest(self):
        assert routing.low_percentile(torch.tensor([0.1, math.nan, 0.2])).isnan()

    def test_nothing_that_counts_is_nan(self):
        assert routing.low_percentile(torch.rand(5), torch.zeros(5, dtype=torch.bool)).isnan()
        assert routing.low_percentile(torch.rand(0)).isnan()

    def test_of_many_tokens_some_are_looked_at(self):
        values = torch.arange(3.0 * routing.MOST_SAMPLED)
        # One of every three: it is off by three places at most.
        assert abs(routing.low_percentile(values).item() - np.percentile(values.numpy(), 5)) <= 3

    def test_the_first_tokens_of_sequences_count_as_much_as_they_are(self):
        """They are one of 2,048 tokens each, and know less than all others to which expert they go."""
        entropies = torch.rand(64, 2048, generator=torch.Generator().manual_seed(0)) + 1
        entropies[:, 0] = 0
        found = routing.low_percentile(entropies.flatten()).item()
        # The share below is that of 4,096 of them, of standard deviation 0.0034; three of these are looked past.
        assert 1.05 - 0.0105 < found < 1.05 + 0.0105


class TestLoad:
    def test_choices_are_counted(self):
        generator = torch.Generator().manual_seed(0)
        chosen, valid = (
            torch.randint(0, 5, (40, 2), generator=generator),
            torch.rand(40, generator=generator) < 0.5,
        )
        assert routing.load_of(chosen, 7).tolist() == np.bincount(chosen.flatten().numpy(), minlength=7).tolist()
        expected = np.bincount(chosen[valid].flatten().numpy(), minlength=7)
        assert routing.load_of(chosen, 7, valid).tolist() == expected.tolist()

    def test_an_index_of_no_expert_counts_nowhere(self):
        assert routing.load_of(torch.tensor([[-1, 0], [3, 2]]), 3).tolist() == [1, 0, 1]

    def test_measures_of_known_loads(self):
        load = torch.tensor([[4, 4, 4, 4], [8, 8, 0, 0], [16, 0, 0, 0]])
        assert routing.load_entropy(load).tolist() == pytest.approx([1.0, 0.5, 0.0])
        assert routing.busiest_share(load).tolist() == [0.25, 0.5, 1.0]
        assert routing.unused_experts(load).tolist() == [0, 2, 3]

    def test_without_tokens_there_is_nothing_to_say(self):
        load = torch.zeros(4, dtype=torch.int64)
        for measure in (routing.load_entropy, routing.busiest_share, routing.unused_experts):
            assert measure(load).isnan()


class TestMaxLogit:
    def test_padding_is_left_out_and_nan_is_not(self):
        logits, valid = torch.tensor([[1.0, 9.0], [2.0, 3.0]]), torch.tensor([False, True])
        assert routing.max_logit(logits).item() == 9
        assert routing.max_logit(logits, valid).item() == 3
        logits[1, 0] = torch.nan
        assert routing.max_logit(logits, valid).isnan()

    def test_no_token_gives_minus_infinity(self):
        assert routing.max_logit(torch.zeros(0, 4)).item() == -math.inf
