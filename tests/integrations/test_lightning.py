"""The callback inside lightning's Trainer. This file is also the script of the test on two ranks."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trimtab
from trimtab.control import Policy, robust
from trimtab.errors import ConfigError, MissingExtraError, TrimtabWarning
from trimtab.faults import BitFlips, LargeLearningRate, SmallBatch
from trimtab.monitors import Above, AlarmRule, BaseMonitor, StopTraining
from trimtab.precision import SavedActivations
from trimtab.trace import open_run, replay

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from trimtab.integrations.lightning import TrimtabCallback  # noqa: E402

# Lightning speaks of settings that are not what is tested here, and calls what torch has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated"),
]

WATCH = Policy(max_active=0)
# Nervous enough to switch units in a few healthy steps.
NERVOUS = Policy(alpha=1.02, beta=1.02, window_steps=2, max_active=3, lock_steps=2)
BAD_UNIT = "blocks.1.up_proj"


class Block(nn.Module):
    """A residual block of two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(torch.relu(self.up_proj(x)))


class Module(pl.LightningModule):
    """A model of two blocks on random numbers."""

    def __init__(self, **optimizer: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.settings = {"lr": 3e-3} | optimizer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self(batch) - batch.roll(1, -1)).square().mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), **self.settings)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(size: int = 64) -> Any:
    rows = torch.randn(size, 5, 16, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(rows, batch_size=2)


def make_trainer(folder: Path, *callbacks: Any, **settings: Any) -> Any:
    settings = {
        "max_steps": 8,
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "log_every_n_steps": 1,
    } | settings
    return pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **settings,
    )


def fit(folder: Path, *callbacks: Any, module: Any = None, ckpt_path: Any = None, **settings: Any) -> dict[str, Any]:
    """Train, and give the weights."""
    module = Module() if module is None else module
    make_trainer(folder, *callbacks, **settings).fit(module, loader(), ckpt_path=ckpt_path)
    return weights(module)


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in module.state_dict().items()}


def assert_same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=0, equal_nan=True)


def steps_of(folder: Path) -> Any:
    with open_run(folder) as run:
        return run.steps()


class Keep(pl.Callback):
    """Notes each step's loss, learning rate and total norm before clipping."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.norms.append(torch.nn.utils.get_total_norm(grads).item())
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())


class Poison(pl.Callback):
    """Makes the gradient of one unit NaN at one step."""

    def __init__(self, at_step: int) -> None:
        self.at_step = at_step

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step + 1 == self.at_step:
            pl_module.get_submodule(BAD_UNIT).weight.grad.fill_(math.nan)


class StopAt(pl.Callback):
    """Ends training early, as a time limit does."""

    def __init__(self, step: int, error: BaseException | None = None) -> None:
        self.step, self.error = step, error

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= self.step:
            if self.error is not None:
                raise self.error
            trainer.should_stop = True


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.1, 1.0])
class TestWatching:
    def test_changes_no_weight_and_records_what_lightning_does(self, clip, accumulate, tmp_path):
        settings = {"gradient_clip_val": clip, "accumulate_grad_batches": accumulate}
        plain = fit(tmp_path, **settings)
        keep = Keep()
        watched = fit(tmp_path, keep, TrimtabCallback(policy=WATCH, record=tmp_path / "run"), **settings)
        assert_same_weights(watched, plain)
        with open_run(tmp_path / "run") as run:
            steps = run.steps()
            assert run.finished
            assert replay(run).num_different == 0
        assert steps.step.tolist() == list(range(1, 9))
        assert steps.grad_norm.tolist() == keep.norms
        assert steps.lr.tolist() == keep.rates
        # Lightning gives out each micro-batch's loss, divided by their number.
        of_steps = np.asarray(keep.losses, dtype=np.float32).reshape(8, accumulate).sum(axis=1)
        np.testing.assert_allclose(steps.loss, of_steps, rtol=1e-6)

    def test_a_nan_in_one_unit_fails_that_unit_alone_and_changes_nothing(self, clip, accumulate, tmp_path):
        settings = {"gradient_clip_val": clip, "accumulate_grad_batches": accumulate, "max_steps": 4}
        plain = fit(tmp_path, Poison(3), **settings)
        watched = fit(tmp_path, Poison(3), TrimtabCallback(policy=WATCH, record=tmp_path / "run"), **settings)
        assert_same_weights(watched, plain)
        steps = steps_of(tmp_path / "run")
        assert [u for u, n in zip(steps.units, steps.norms[2], strict=True) if not math.isfinite(n)] == [BAD_UNIT]

    def test_with_damping_the_run_survives_a_nan_in_one_unit(self, clip, accumulate, tmp_path):
        settings = {"gradient_clip_val": clip, "accumulate_grad_batches": accumulate, "max_steps": 5}
        policy = robust(burn_in_steps=1, act_from_step=1, damping=True)
        found = fit(tmp_path, Poison(3), TrimtabCallback(policy=policy, record=tmp_path / "run"), **settings)
        assert all(w.isfinite().all() for w in found.values())
        assert steps_of(tmp_path / "run").extra[2]["damped"][BAD_UNIT] == 0.0


class CountingModule(Module):
    """Counts passes of torch's own clip through a method of its own."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class GroupsModule(Module):
    """Biases first, and without decay: not in the model's order."""

    def configure_optimizers(self) -> Any:
        biases = [p for p in self.parameters() if p.ndim == 1]
        matrices = [p for p in self.parameters() if p.ndim > 1]
        return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": matrices}], lr=3e-3)


class TestClipping:
    def test_each_step_is_clipped_once(self, tmp_path, monkeypatch):
        calls = []
        for name in ("clip_grad_norm_", "clip_grads_with_norm_"):
            original = getattr(torch.nn.utils, name)
            monkeypatch.setattr(
                torch.nn.utils, name, lambda *a, _n=name, _f=original, **k: calls.append(_n) or _f(*a, **k)
            )
        fit(tmp_path, TrimtabCallback(policy=WATCH), gradient_clip_val=0.1)
        assert calls == ["clip_grads_with_norm_"] * 8

    @pytest.mark.parametrize("kind", [CountingModule, GroupsModule])
    def test_a_module_that_clips_in_its_own_way_or_order_still_does(self, kind, tmp_path):
        settings = {} if kind is CountingModule else {"gradient_clip_val": 0.1}
        plain = fit(tmp_path, module=kind(), **settings)
        module, keep = kind(), Keep()
        callback = TrimtabCallback(policy=WATCH, record=tmp_path / "run")
        assert_same_weights(fit(tmp_path, keep, callback, module=module, **settings), plain)
        np.testing.assert_allclose(steps_of(tmp_path / "run").grad_norm, keep.norms, rtol=1e-6)
        assert getattr(module, "calls", 8) == 8

    def test_clipping_by_value_comes_after_the_norms(self, tmp_path):
        settings = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
        plain = fit(tmp_path, **settings)
        keep = Keep()
        callback = TrimtabCallback(policy=WATCH, record=tmp_path / "run")
        assert_same_weights(fit(tmp_path, keep, callback, **settings), plain)
        assert steps_of(tmp_path / "run").grad_norm.tolist() == keep.norms

    def test_fused_optimizers_are_watched_without_a_change(self, tmp_path):
        plain = fit(tmp_path, module=Module(fused=True), gradient_clip_val=0.1)
        callback = TrimtabCallback(policy=WATCH, record=tmp_path / "run")
        assert_same_weights(fit(tmp_path, callback, module=Module(fused=True), gradient_clip_val=0.1), plain)
        np.testing.assert_allclose(steps_of(tmp_path / "run").lr, [3e-3 / (1 + t) for t in range(8)], rtol=1e-12)


def scaling(**settings: Any) -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], **settings}


class TestPrecision:
    @pytest.mark.parametrize("clip", [None, 0.1])
    def test_a_step_that_the_loss_scaler_skips_is_noted_and_nothing_changes(self, clip, tmp_path):
        plain = fit(tmp_path, Poison(3), gradient_clip_val=clip, **scaling())
        keep = Keep()
        callback = TrimtabCallback(policy=WATCH, record=tmp_path / "run")
        watched = fit(tmp_path, Poison(3), keep, callback, gradient_clip_val=clip, **scaling())
        assert_same_weights(watched, plain)
        assert all(w.isfinite().all() for w in watched.values())
        assert callback.guard.num_steps == 7
        with open_run(tmp_path / "run") as run:
            assert [e.step for e in run.events("skip")] == [2]
            assert run.steps().grad_norm.tolist() == [n for n in keep.norms if math.isfinite(n)]
            np.testing.assert_allclose(run.steps().loss, [x for i, x in enumerate(keep.losses) if i != 2], rtol=1e-3)

    def test_a_fused_optimizer_which_unscales_by_itself_is_unscaled_before_the_norms(self, tmp_path):
        # Without the callback Lightning refuses to clip these.
        plain = TrimtabCallback(policy=WATCH, record=tmp_path / "a")
        unscaled = fit(tmp_path, plain, gradient_clip_val=0.1, **scaling())
        fused = TrimtabCallback(policy=WATCH, record=tmp_path / "b")
        found = fit(tmp_path, fused, module=Module(fused=True), gradient_clip_val=0.1, **scaling())
        np.testing.assert_allclose(steps_of(tmp_path / "b").norms, steps_of(tmp_path / "a").norms, rtol=1e-2)
        for key in found:
            torch.testing.assert_close(found[key], unscaled[key], rtol=0, atol=1e-3)

    def test_bf16_is_watched_without_a_change(self, tmp_path):
        plain = fit(tmp_path, precision="bf16-mixed", gradient_clip_val=0.1)
        callback = TrimtabCallback(policy=WATCH)
        assert_same_weights(fit(tmp_path, callback, precision="bf16-mixed", gradient_clip_val=0.1), plain)


class Window(BaseMonitor):
    """Counts its steps in a tensor, which is too large for JSON; gives alarm from its fifth on."""

    name = "window"
    alarm_rules: Mapping[str, AlarmRule] = {"count": AlarmRule(Above(4.5, warmup=0), "It counted to {value:.0f}.")}

    def __init__(self) -> None:
        self.count = torch.zeros(1)

    def start(self, model: Any) -> None:
        """Nothing to place."""

    def observe(self, step: int) -> dict[str, torch.Tensor]:
        self.count = self.count + 1
        return {"count": self.count}

    def tensor_state(self) -> dict[str, torch.Tensor]:
        return {"count": self.count}

    def load_tensor_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self.count = state["count"]


class Fails(BaseMonitor):
    """Fails at its second step."""

    name = "fails"

    def start(self, model: Any) -> None:
        """Nothing to place."""

    def observe(self, step: int) -> dict[str, float]:
        if step == 2:
            raise RuntimeError("out of order")
        return {"step": step}


class DataByStep(Module):
    """Takes its batch by the step's number, since Lightning begins a plain loader anew in the middle of an epoch."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.trainer.global_step)
        return self.loss(torch.randn(batch.shape, generator=generator))


def fit_and_save(folder: Path, *callbacks: Any, **settings: Any) -> dict[str, Any]:
    """With a checkpoint every four steps."""
    keeper = pl.callbacks.ModelCheckpoint(folder / "out", filename="{step}", every_n_train_steps=4, save_top_k=-1)
    settings = {"max_steps": 10, "gradient_clip_val": 0.5, "enable_checkpointing": True} | settings
    return fit(folder, *callbacks, keeper, module=DataByStep(), **settings)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
class TestFaults:
    WEIGHT = "blocks.0.up_proj.weight"
    # The checkpoint is of step 4: within them, and right before one that changes weights.
    MADE = (
        lambda module, optimizer: LargeLearningRate(optimizer, factor=3.0, start_step=3, num_steps=4),
        lambda module, optimizer: BitFlips(module, TestFaults.WEIGHT, bit=9, num_flips=3, start_step=5, num_steps=2),
        SmallBatch(num_samples=1, start_step=4, num_steps=4),
    )

    def test_a_run_that_resumes_within_them_ends_as_the_uninterrupted_one(self, tmp_path):
        settings = {"policy": WATCH, "faults": self.MADE}
        expected = fit_and_save(tmp_path / "a", TrimtabCallback(record=tmp_path / "whole", **settings))
        fit_and_save(tmp_path / "b", TrimtabCallback(record=tmp_path / "run", **settings), StopAt(6))
        callback = TrimtabCallback(record=tmp_path / "run", **settings)
        path = tmp_path / "b" / "out" / "step=4.ckpt"
        found = fit_and_save(tmp_path / "b", callback, ckpt_path=path)
        assert_same_weights(found, expected)
        without = fit_and_save(tmp_path / "c", TrimtabCallback(policy=WATCH))
        assert not torch.equal(found[self.WEIGHT], without[self.WEIGHT])
        events = []
        for name in ("whole", "run"):
            with open_run(tmp_path / name) as run:
                events.append(sorted((e.step, e.data["fault"]) for e in run.events("fault")))
        assert events == [[(3, "learning rate"), (4, "small batch"), (5, "bit flips")]] * 2

    @pytest.mark.parametrize("automatic", [True, False])
    def test_the_learning_rate_is_large_in_its_own_steps(self, automatic, tmp_path):
        class Still(Module):
            """Each step moves a weight by the rate, whatever the loss."""

            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = automatic
                self.moved: list[float] = []
                self.before = 0.0

            def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
                weight = self.blocks[0].up_proj.bias
                self.moved.append(round(self.before - weight[0].item(), 4))
                self.before = weight[0].item()
                loss = weight.sum() + 0 * self.loss(batch)
                if automatic:
                    return loss
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                return None

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.5)

        faults = [lambda module, optimizer: LargeLearningRate(optimizer, factor=4.0, start_step=2, num_steps=2)]
        module = Still()
        fit(tmp_path, TrimtabCallback(policy=WATCH, faults=faults), module=module, max_steps=6)
        assert module.moved[1:] == [0.5, 2.0, 2.0, 0.5, 0.5]

    def test_a_small_batch_is_cut_in_its_steps_and_not_in_validation(self, tmp_path):
        class Noting(Module):
            sizes: list[int]

            def loss(self, batch: torch.Tensor) -> torch.Tensor:
                self.sizes.append(len(batch) if self.training else -len(batch))
                return super().loss(batch)

        module = Noting()
        module.sizes = []
        callback = TrimtabCallback(policy=WATCH, faults=[SmallBatch(num_samples=1, start_step=2, num_steps=2)])
        settings = {"max_steps": 4, "accumulate_grad_batches": 2, "val_check_interval": 4, "limit_val_batches": 1}
        trainer = make_trainer(tmp_path, callback, num_sanity_val_steps=0, **settings)
        trainer.fit(module, loader(), loader(4))
        assert module.sizes == [2, 2, 1, 1, -2, 1, 1, 2, 2, -2]
        assert not set(trainer.precision_plugin.__dict__) & {"convert_input", "clip_gradients"}

    @pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
    def test_a_module_that_fetches_its_batches_itself_is_refused(self, tmp_path):
        class Fetching(Module):
            def training_step(self, dataloader_iter: Any) -> torch.Tensor:
                return self.loss(next(dataloader_iter)[0])

        module = Fetching()
        with pytest.raises(ConfigError, match="SmallBatch: training_step takes a dataloader_iter"):
            fit(tmp_path, TrimtabCallback(policy=WATCH, faults=[SmallBatch()]), module=module)
        assert not trimtab.detach(module)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
class TestResuming:
    def test_decides_trains_and_records_as_the_uninterrupted_run(self, tmp_path):
        whole = TrimtabCallback(SavedActivations(), policy=NERVOUS, record=tmp_path / "whole")
        expected_weights = fit_and_save(tmp_path / "a", whole)
        expected = steps_of(tmp_path / "whole")
        assert expected.active.any()
        first = TrimtabCallback(SavedActivations(), policy=NERVOUS, record=tmp_path / "run")
        fit_and_save(tmp_path / "b", first, StopAt(6))
        second = TrimtabCallback(SavedActivations(), policy=NERVOUS, record=tmp_path / "run")
        found = fit_and_save(tmp_path / "b", second, ckpt_path=tmp_path / "b" / "out" / "step=4.ckpt")
        assert_same_weights(found, expected_weights)
        with open_run(tmp_path / "run") as run:
            steps = run.steps()
            assert run.finished
            assert replay(run).num_different == 0
        for name in ("step", "norms", "gnmr", "delta", "risk", "active", "lock", "loss", "lr", "grad_norm"):
            np.testing.assert_array_equal(getattr(steps, name), getattr(expected, name), err_msg=name)

    def test_a_monitors_tensors_are_in_the_checkpoint_which_holds_nothing_but_plain_types(self, tmp_path):
        monitors = {"policy": WATCH, "monitors": [Window()]}
        fit_and_save(tmp_path, TrimtabCallback(**monitors), StopAt(4))
        path = tmp_path / "out" / "step=4.ckpt"
        assert "TrimtabCallback" in torch.load(path, weights_only=True)["callbacks"]
        window = Window()
        with pytest.warns(TrimtabWarning, match="It counted to 5"):
            fit_and_save(tmp_path, TrimtabCallback(policy=WATCH, monitors=[window]), StopAt(6), ckpt_path=path)
        assert window.count.item() == 6.0

    @pytest.mark.parametrize("left", ["nothing", "damage"])
    def test_a_checkpoint_without_a_usable_state_is_named_once_and_the_run_goes_on(self, left, tmp_path):
        fit_and_save(tmp_path, TrimtabCallback(policy=NERVOUS, record=tmp_path / "run"), StopAt(5))
        path = tmp_path / "out" / "step=4.ckpt"
        checkpoint = torch.load(path, weights_only=True)
        if left == "nothing":
            del checkpoint["callbacks"]["TrimtabCallback"]
        else:
            checkpoint["callbacks"]["TrimtabCallback"] = {"guard": "{"}
        torch.save(checkpoint, path)
        callback = TrimtabCallback(policy=NERVOUS, record=tmp_path / "run")
        with pytest.warns(TrimtabWarning, match="holds no (usable )?state of trimtab") as said:
            fit_and_save(tmp_path, callback, ckpt_path=path)
        assert len([w for w in said if w.category is TrimtabWarning]) == 1
        assert callback.guard.num_steps == 10
        assert steps_of(tmp_path / "run").step.tolist() == list(range(1, 11))

    def test_a_checkpoint_made_after_training_holds_the_state_and_a_second_fit_goes_on_from_it(self, tmp_path):
        callback = TrimtabCallback(policy=WATCH)
        trainer, module = make_trainer(tmp_path, callback), Module()
        trainer.fit(module, loader())
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        assert torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]["TrimtabCallback"]["guard"]
        trainer.fit_loop.epoch_loop.max_steps = 12
        trainer.fit(module, loader())
        assert callback.guard.num_steps == 12


class TestLeavingNothingBehind:
    @pytest.mark.parametrize("ending", ["end", "stop", "error"])
    def test_the_module_and_the_trainer_are_as_they_were_and_the_record_says_how_it_ended(self, ending, tmp_path):
        callback = TrimtabCallback(SavedActivations(), policy=NERVOUS, record=tmp_path / "run")
        error = RuntimeError("lost node") if ending == "error" else None
        callbacks = [callback] if ending == "end" else [callback, StopAt(3, error)]
        trainer, module = make_trainer(tmp_path, *callbacks), Module()
        before, plugin = [type(m) for m in module.modules()], trainer.precision_plugin
        if error is None:
            trainer.fit(module, loader())
        else:
            with pytest.raises(RuntimeError, match="lost node"):
                trainer.fit(module, loader())
        assert [type(m) for m in module.modules()] == before
        assert not any(m._forward_hooks for m in module.modules())
        assert not plugin.__dict__.keys() & {"_clip_gradients", "clip_gradients"}
        with open_run(tmp_path / "run") as run:
            assert run.finished == (ending == "end")
        trimtab.attach(module).detach()

    def test_validation_is_no_step(self, tmp_path):
        callback = TrimtabCallback(policy=WATCH)
        trainer = make_trainer(tmp_path, callback, val_check_interval=2)
        trainer.fit(Module(), loader(), loader(8))
        assert callback.guard.num_steps == 8

    def test_a_monitor_that_fails_is_off_and_the_run_goes_on(self, tmp_path):
        callback = TrimtabCallback(policy=WATCH, monitors=[Fails()])
        with pytest.warns(TrimtabWarning, match="fails"):
            fit(tmp_path, callback)
        assert callback.guard.num_steps == 8


class Manual(Module):
    """Manual optimization, with one optimizer, two that share a backward, or two that take turns."""

    def __init__(self, kind: str, clip: float | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.kind, self.clip = kind, clip
        self.norms: list[float] = []

    def configure_optimizers(self) -> Any:
        if self.kind == "one":
            return torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [torch.optim.SGD(block.parameters(), lr=1e-2) for block in self.blocks]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        for group in [[o] for o in optimizers] if self.kind == "turns" else [optimizers]:
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            self.norms.append(torch.nn.utils.get_total_norm(grads).item())
            for optimizer in group if self.clip else ():
                self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
            for optimizer in group:
                optimizer.step()


class TestManualOptimization:
    @pytest.mark.parametrize("clip", [None, 0.05])
    @pytest.mark.parametrize("kind", ["one", "shared"])
    def test_a_step_is_observed_once_before_it_is_clipped(self, kind, clip, tmp_path):
        max_steps = 8 if kind == "one" else 16
        plain = fit(tmp_path, module=Manual(kind, clip), max_steps=max_steps)
        module = Manual(kind, clip)
        callback = TrimtabCallback(policy=WATCH, record=tmp_path / "run")
        assert_same_weights(fit(tmp_path, callback, module=module, max_steps=max_steps), plain)
        steps = steps_of(tmp_path / "run")
        assert steps.grad_norm.tolist() == module.norms
        assert len(steps.step) == 8
        assert np.isfinite(steps.loss).all()

    def test_of_optimizers_that_take_turns_the_first_ones_are_watched_and_one_warning_says_so(self, tmp_path):
        plain = fit(tmp_path, module=Manual("turns", 0.05))
        module = Manual("turns", 0.05)
        callback = TrimtabCallback(policy=WATCH, record=tmp_path / "run")
        with pytest.warns(TrimtabWarning, match="take turns") as said:
            assert_same_weights(fit(tmp_path, callback, module=module), plain)
        assert len([w for w in said if w.category is TrimtabWarning]) == 1
        assert steps_of(tmp_path / "run").grad_norm.tolist() == module.norms[::2]

    def test_with_a_loss_scaler_a_clip_of_the_users_own_is_said_to_come_first(self, tmp_path):
        plain = fit(tmp_path, module=Manual("one", 0.05), **scaling())
        with pytest.warns(TrimtabWarning, match="still scaled"):
            watched = fit(tmp_path, TrimtabCallback(policy=WATCH), module=Manual("one", 0.05), **scaling())
        assert_same_weights(watched, plain)


class Collect(pl.loggers.logger.Logger):
    """Keeps what is logged."""

    name, version = "collect", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}
        self.texts: list[tuple[str, str, int]] = []
        self.broken = False

    @property
    def experiment(self) -> Any:
        return self

    def add_text(self, tag: str, text: str, step: int) -> None:
        if self.broken:
            raise OSError("disk full")
        self.texts.append((tag, text, step))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.setdefault(step, {}).update(metrics)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Nothing to keep."""


class TestLogging:
    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_metrics_are_logged_at_the_trainers_steps_with_the_records_values(self, accumulate, tmp_path):
        logger = Collect()
        callback = TrimtabCallback(
            SavedActivations(), policy=NERVOUS, record=tmp_path / "run", log_metrics=True, monitors=[Window()]
        )
        with pytest.warns(TrimtabWarning, match="counted"):
            fit(tmp_path, callback, logger=logger, log_every_n_steps=2, accumulate_grad_batches=accumulate)
        steps = steps_of(tmp_path / "run")
        rows = {step: row for step, row in logger.rows.items() if "trimtab/risk/max" in row}
        # Lightning counts from zero.
        assert sorted(rows) == [1, 3, 5, 7]
        for step, row in rows.items():
            assert row["trimtab/risk/max"] == np.float32(np.nanmax(steps.risk[step]))
            assert row["trimtab/control/num_active"] == steps.active[step].sum()
            assert row["trimtab/window/count"] == step + 1
        assert logger.texts == [("trimtab/alarm/window", "It counted to 5.", 5)]

    def test_without_the_option_nothing_is_logged(self, tmp_path):
        logger = Collect()
        fit(tmp_path, TrimtabCallback(policy=WATCH), logger=logger)
        assert logger.rows
        assert not [key for row in logger.rows.values() for key in row if "trimtab" in key]

    def test_a_logger_that_fails_costs_the_metrics_and_not_the_run(self, tmp_path):
        logger = Collect()
        logger.broken = True
        callback = TrimtabCallback(policy=WATCH, log_metrics=True, monitors=[Window()])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fit(tmp_path, callback, logger=logger)
        assert len([w for w in said if "could not be logged" in str(w.message)]) == 1
        assert callback.guard.num_steps == 8


class TestAlarms:
    @pytest.mark.parametrize("save", [False, True])
    def test_an_alarm_stops_training_after_the_step_that_follows_it_and_saves_if_asked(self, save, tmp_path):
        callback = TrimtabCallback(policy=WATCH, monitors=[Window()], on_alarm=[StopTraining(save=save)])
        trainer = make_trainer(tmp_path, callback, max_steps=10)
        with pytest.warns(TrimtabWarning, match="It counted to 5"):
            trainer.fit(Module(), loader())
        assert trainer.global_step == 6
        assert (tmp_path / "trimtab-stop-step=6.ckpt").exists() == save


class TestRefusals:
    def test_two_callbacks_cannot_watch_one_model(self, tmp_path):
        class Another(TrimtabCallback):
            """Has a state key of its own."""

        with pytest.raises(ConfigError, match="one guard watches a model"):
            fit(tmp_path, TrimtabCallback(policy=WATCH), Another(policy=WATCH))

    def test_strategies_that_step_out_of_reach_are_refused_with_the_reason(self, tmp_path):
        class FSDPStrategy(pl.strategies.SingleDeviceStrategy):
            """Named as the one of Lightning."""

        trainer = make_trainer(tmp_path, TrimtabCallback(policy=WATCH), strategy=FSDPStrategy("cpu"))
        with pytest.raises(ConfigError, match="flattens parameters"):
            trainer.fit(Module(), loader())

    def test_an_optimizer_with_several_gradients_a_step_is_refused(self, tmp_path):
        class Newton(Module):
            def configure_optimizers(self) -> Any:
                return torch.optim.LBFGS(self.parameters())

        with pytest.raises(ConfigError, match="several gradients a step"):
            fit(tmp_path, TrimtabCallback(policy=WATCH), module=Newton())

    def test_a_release_without_the_methods_is_refused_and_the_module_is_let_go(self, tmp_path, monkeypatch):
        from lightning.pytorch.plugins.precision.precision import Precision

        monkeypatch.delattr(Precision, "_clip_gradients")
        module = Module()
        with pytest.raises(ConfigError, match="its _clip_gradients is gone"):
            fit(tmp_path, TrimtabCallback(policy=WATCH), module=module)
        trimtab.attach(module).detach()

    def test_without_lightning_it_names_the_extra(self, monkeypatch):
        for name in [n for n in sys.modules if n.split(".")[0] in ("lightning", "pytorch_lightning")]:
            monkeypatch.delitem(sys.modules, name)
        for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, "trimtab.integrations.lightning")
        with pytest.raises(MissingExtraError, match=r"'lightning'.*trimtab\[lightning\]"):
            importlib.import_module("trimtab.integrations.lightning")


def test_the_default_policy_knows_how_long_the_run_is(tmp_path):
    callback = TrimtabCallback()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, callback)
    assert len([w for w in caught if "total_steps=8" in str(w.message)]) == 1


def test_the_other_package_of_the_same_trainer_is_served_too(tmp_path):
    other = pytest.importorskip("pytorch_lightning")

    class Same(other.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.inner(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    callback = TrimtabCallback(policy=WATCH)
    other.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.1,
        callbacks=[callback],
    ).fit(Same(), loader())
    assert callback.guard.num_steps == 4


@pytest.mark.slow
def test_two_ranks_decide_equally_and_only_the_first_writes(tmp_path):
    words = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(
        words, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [r.pop("writes") for r in results] == [True, False]
    assert results[0] == results[1]
    assert results[0]["weights"] == results[0]["plain_weights"]
    with open_run(tmp_path / "run") as run:
        assert run.steps().active.any()
        assert run.steps().step.tolist() == list(range(1, 9))
        assert replay(run).num_different == 0


def run_as_a_rank(folder: Path) -> None:
    found: dict[str, Any] = {}

    def train(*callbacks: Any) -> Any:
        module = Module()
        settings = {"strategy": "ddp", "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
        trainer = make_trainer(folder, *callbacks, devices=2, **settings)
        trainer.fit(module, loader())
        found["rank"] = trainer.global_rank
        return {k: v.tolist() for k, v in weights(module).items()}

    found["plain_weights"] = train()
    found["weights"] = train(TrimtabCallback(policy=WATCH))
    callback = TrimtabCallback(SavedActivations(), policy=NERVOUS, record=folder / "run")
    train(callback)
    found |= {"state": callback.guard.state_dict(), "writes": callback.guard._journal.writer is not None}
    (folder / f"{found.pop('rank')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run_as_a_rank(Path(sys.argv[1]))
