"""Claims about what a conversion leaves alone, gives back and refuses."""

from __future__ import annotations

import copy
import io
import json
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.control import Policy
from trimtab.errors import ConfigError
from trimtab.guard import attach
from trimtab.precision import Conversion, Recipe
from trimtab.testing.recipe_hooks import ConvertedPair, RecipeHooks, assert_same
from trimtab.testing.snapshots import changes_since, snapshot_of, values_of

__all__ = ["ConversionClaims"]


class ConversionClaims(RecipeHooks):
    """Converting a model in place, undoing it, copying it, and what is refused."""

    def test_the_recipe_and_its_conversion_keep_the_protocols(self) -> None:
        """Names that a guard calls are there."""
        recipe = self.recipe()
        assert isinstance(recipe, Recipe), f"{type(recipe).__name__} lacks something of trimtab.precision.Recipe"
        with self.converted(self.model()) as conversion:
            assert isinstance(conversion, Conversion), (
                f"{type(conversion).__name__} lacks something of trimtab.precision.Conversion"
            )
            assert conversion.pull is None, "a fresh conversion has a pull that nobody has set"

    def test_its_units_are_some_of_those_offered_in_their_order(self) -> None:
        """With one cost each."""
        model, recipe = self.model(), self.recipe()
        offered = self.find_units(model, recipe)
        conversion = recipe.convert(model, offered)
        remaining = iter(offered)
        try:
            assert len(conversion.units) > 0, "nothing was converted, and nothing refused"
            for unit in conversion.units:
                assert any(unit is other for other in remaining), (
                    f"the unit {unit.name} is none of those offered, or not in their order"
                )
            assert len(conversion.costs) == len(conversion.units), (
                f"{len(conversion.costs)} costs are reported for {len(conversion.units)} units"
            )
        finally:
            conversion.undo()

    def test_keys_values_and_identity_of_all_parameters_stay(self) -> None:
        """Through conversion, training on each path, and undoing."""
        model = self.model()
        values, identities, shown = values_of(model), _identities(model), repr(model)

        def check(when: str) -> None:
            assert list(model.state_dict()) == list(values), f"{when}, state_dict() has other keys or another order"
            assert _identities(model) == identities, (
                f"{when}, parameters or buffers are other objects or in another order"
            )
            assert_same(values, values_of(model), f"{when}, values in state_dict() changed")
            assert repr(model) == shown, f"{when}, repr(model) is another"

        with self.converted(model) as conversion:
            check("after converting")
            for active in (False, True):
                conversion.route([active] * len(conversion.units))
                path = "recovery" if active else "low-cost"
                self.gradients(model, self.batch(model))
                check(f"after a forward and backward on the {path} path")
                self.evaluate(model)
                check(f"after an evaluation on the {path} path")
        check("after undoing")

    def test_undo_gives_every_module_back_as_it_was(self) -> None:
        """Classes, forwards, attributes, hooks, those of others included; and what holds in the whole process."""
        model = self.model()
        calls: list[str] = []
        model.register_forward_hook(lambda *args: calls.append("model"))
        before = snapshot_of(model)
        with self.converted(model) as conversion:
            self.gradients(model, self.batch(model))
            conversion.route([True] * len(conversion.units))
            self.gradients(model, self.batch(model))
            self.evaluate(model)
        model.zero_grad()
        changed = changes_since(before, model)
        assert not changed, f"undo left behind: {'; '.join(changed[:3])}"
        model(self.batch(model))
        assert len(calls) == 4, "a hook of somebody else's is gone, or called more than once a forward"

    def test_an_undone_model_trains_as_the_plain_one(self) -> None:
        """Nothing steers it any more."""
        with self.pair() as pair:
            self.gradients(pair.model, self.batch(pair.model))
        expected, got = (self.gradients(m, self.batch(m)) for m in (pair.plain, pair.model))
        assert_same(expected, got, "an undone model does not train as the plain one")

    def test_detach_gives_every_module_back_as_it_was(self) -> None:
        """After a guard has stepped."""
        model = self.model()
        before = snapshot_of(model)
        guard = attach(model, self.recipe(), policy=Policy(alpha=1.5, beta=1.5))
        self.gradients(model, self.batch(model))
        guard.step(max_norm=1.0)
        guard.detach()
        changed = changes_since(before, model)
        assert not changed, f"detach left behind: {'; '.join(changed[:3])}"

    def test_a_converted_model_is_not_converted_again(self) -> None:
        """It is left as the first conversion left it."""
        model = self.model()
        recipe = self.recipe()
        with self.converted(model) as conversion:
            conversion.route([i % 2 == 1 for i in range(len(conversion.units))])
            expected = self.gradients(model, self.batch(model))
            before = snapshot_of(model)
            error = _refusal(recipe, model, self)
            assert error is not None, "a second conversion of the same model was not refused with a ConfigError"
            changed = changes_since(before, model)
            assert not changed, f"a refused conversion changed: {'; '.join(changed[:3])}"
            conversion.begin_step(1)
            got = self.gradients(model, self.batch(model))
            assert_same(expected, got, "after a refused second conversion the first computes something else")

    def test_a_model_with_nothing_to_convert_is_refused_with_the_reason(self) -> None:
        """It is left as it was."""
        model = self.unconvertible_model()
        before, values = snapshot_of(model), values_of(model)
        error = _refusal(self.recipe(), model, self)
        assert error is not None, "a model with nothing to convert was not refused with a ConfigError"
        known = {n for n, _ in model.named_modules()} | {type(m).__name__ for m in model.modules()}
        assert any(word and word in error.allowed for word in known), (
            f"the refusal names neither a module nor its class as the reason: {error}"
        )
        changed = changes_since(before, model)
        assert not changed, f"a refused conversion changed: {'; '.join(changed[:3])}"
        assert_same(values, values_of(model), "a refused conversion changed values")

    def test_an_offer_of_no_units_is_refused(self) -> None:
        """There is nothing to switch."""
        model = self.model()
        before = snapshot_of(model)
        try:
            self.recipe().convert(model, []).undo()
        except ConfigError:
            changed = changes_since(before, model)
            assert not changed, f"a refused conversion changed: {'; '.join(changed[:3])}"
            return
        raise AssertionError("an offer of no units was not refused with a ConfigError")

    def test_a_copy_of_a_converted_model_is_a_plain_model_that_trains(self) -> None:
        """By deepcopy, pickle and torch.save; nothing steers it, it shares no weight, and the original goes on."""
        with self.pair() as pair:
            batch = self.batch(pair.plain)
            before = self._on_all_routes(pair)
            pair.conversion.route([False] * len(pair.conversion.units))
            pair.model.zero_grad()
            expected = self.gradients(pair.plain, batch)
            own = {id(p) for p in pair.model.parameters()}
            for how, other in _copies(pair.model).items():
                kinds, plain_kinds = ([type(m) for m in model.modules()] for model in (other, pair.plain))
                assert kinds == plain_kinds, f"a copy by {how} has modules of other classes than the plain model"
                assert not own & {id(p) for p in other.parameters()}, f"a copy by {how} shares parameters"
                assert_same(
                    expected, self.gradients(other, batch), f"a copy by {how} does not train as the plain model"
                )
            for where, got in self._on_all_routes(pair).items():
                assert_same(before[where], got, f"{where}, a converted model that was copied computes something else")

    def test_its_settings_are_json_and_build_the_recipe_again(self) -> None:
        """As they stand in a record."""
        recipe = self.recipe()
        settings = recipe.to_dict()
        read = json.loads(json.dumps(settings))
        assert read == settings, f"to_dict() does not come back from JSON as it was: {settings}"
        assert settings.get("name") == recipe.name, f"to_dict() has not the recipe's name, {recipe.name!r}"
        if not self.rebuilds_from_dict:
            return
        del read["name"]
        again: Any = type(recipe)
        assert again(**read).to_dict() == settings, "a recipe built from to_dict() is another one"

    def test_its_state_is_json(self) -> None:
        """As it stands in a checkpoint."""
        with self.converted(self.model()) as conversion:
            state = conversion.state_dict()
            assert json.loads(json.dumps(state)) == state, f"state_dict() does not come back from JSON: {state}"

    def _on_all_routes(self, pair: ConvertedPair) -> dict[str, dict[str, Tensor]]:
        found = {}
        for where, active in pair.routes().items():
            pair.conversion.begin_step(1)
            pair.conversion.route(active)
            found[where] = self.gradients(pair.model, self.batch(pair.model))
        return found


def _identities(model: nn.Module) -> list[tuple[str, int]]:
    return [(n, id(t)) for n, t in (*model.named_parameters(), *model.named_buffers())]


def _refusal(recipe: Recipe, model: nn.Module, hooks: RecipeHooks) -> ConfigError | None:
    """The error by which the recipe refuses the model; None when it takes it."""
    try:
        conversion = recipe.convert(model, hooks.find_units(model, recipe))
    except ConfigError as error:
        return error
    conversion.undo()
    return None


def _copies(model: nn.Module) -> dict[str, nn.Module]:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(buffer, weights_only=False),
    }
