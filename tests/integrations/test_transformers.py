"""The callback inside transformers.Trainer. This file is also the script of those tests that need their own process."""

from __future__ import annotations

import functools
import gc
import importlib
import json
import math
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trimtab
from trimtab.control import Policy, robust
from trimtab.errors import ConfigError, MissingExtraError, TrimtabWarning
from trimtab.faults import BiasedAttentionBackward, BitFlips, LargeLearningRate, SmallBatch
from trimtab.monitors import Above, AlarmRule, BaseMonitor, StopTraining
from trimtab.precision import SavedActivations
from trimtab.trace import open_run, replay

transformers = pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from trimtab.integrations.transformers import TrimtabCallback  # noqa: E402

METHODS = ("_clip_grad_norm", "_get_grad_norm", "training_step", "_save_checkpoint")
WATCH = Policy(max_active=0)
# Nervous enough to switch units in a few healthy steps.
NERVOUS = Policy(alpha=1.02, beta=1.02, window_steps=2, max_active=3, lock_steps=2)
BAD_UNIT = "model.layers.1.self_attn.k_proj"


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.1,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def dataset(size: int = 64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(32, (8,), generator=generator) for _ in range(size)]
    return [{"input_ids": row, "labels": row} for row in rows]


def make_trainer(folder: Path, *callbacks: TrainerCallback, model: Any = None, **settings: Any) -> Trainer:
    settings = {
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "learning_rate": 3e-3,
        "save_strategy": "no",
    } | settings
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1, **settings
    )
    model = build() if model is None else model
    return Trainer(model, arguments, train_dataset=dataset(), eval_dataset=dataset(4), callbacks=list(callbacks))


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in trainer.model.state_dict().items()}


def assert_same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=0, equal_nan=True)


def logged(trainer: Trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def is_as_found(trainer: Trainer) -> bool:
    return not (trainer.__dict__.keys() & set(METHODS)) and not any(m._forward_hooks for m in trainer.model.modules())


class Poison(TrainerCallback):
    """Makes the gradient of one unit NaN at one step."""

    def __init__(self, at_step: int) -> None:
        self.at_step, self.on = at_step, False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        weight = model.get_submodule(BAD_UNIT).weight
        self.handle = weight.register_hook(lambda grad: grad * math.nan if self.on else grad)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on = state.global_step + 1 == self.at_step

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.handle.remove()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3, 1.0])
class TestWatching:
    def test_changes_no_weight_no_log_and_no_saved_argument(self, max_grad_norm, accumulate, tmp_path):
        settings = {
            "max_grad_norm": max_grad_norm,
            "gradient_accumulation_steps": accumulate,
            "save_strategy": "steps",
            "save_steps": 4,
        }
        plain = make_trainer(tmp_path / "out", **settings)
        plain.train()
        saved = torch.load(tmp_path / "out" / "checkpoint-4" / "training_args.bin", weights_only=False).to_dict()
        watched = make_trainer(tmp_path / "out", TrimtabCallback(policy=WATCH, record=tmp_path / "run"), **settings)
        watched.train()
        assert_same_weights(weights(watched), weights(plain))
        for key in ("loss", "grad_norm", "learning_rate"):
            assert logged(watched, key) == logged(plain, key)
            assert len(logged(plain, key)) == 8
        again = torch.load(tmp_path / "out" / "checkpoint-4" / "training_args.bin", weights_only=False).to_dict()
        assert again == saved
        assert is_as_found(watched)

    def test_the_record_holds_what_the_trainer_logs(self, max_grad_norm, accumulate, tmp_path):
        settings = {"max_grad_norm": max_grad_norm, "gradient_accumulation_steps": accumulate, "warmup_steps": 3}
        trainer = make_trainer(tmp_path / "out", TrimtabCallback(policy=WATCH, record=tmp_path / "run"), **settings)
        trainer.train()
        with open_run(tmp_path / "run") as run:
            steps = run.steps()
            assert run.finished
        assert steps.step.tolist() == list(range(1, 9))
        assert steps.loss.tolist() == logged(trainer, "loss")
        assert steps.grad_norm.tolist() == logged(trainer, "grad_norm")
        assert steps.lr.tolist() == logged(trainer, "learning_rate")

    def test_a_nan_in_one_unit_fails_that_unit_alone_and_changes_nothing(self, max_grad_norm, accumulate, tmp_path):
        settings = {"max_grad_norm": max_grad_norm, "gradient_accumulation_steps": accumulate, "max_steps": 4}
        plain = make_trainer(tmp_path / "out", Poison(3), **settings)
        plain.train()
        watched = make_trainer(
            tmp_path / "out", Poison(3), TrimtabCallback(policy=WATCH, record=tmp_path / "run"), **settings
        )
        watched.train()
        assert_same_weights(weights(watched), weights(plain))
        assert repr(logged(watched, "grad_norm")) == repr(logged(plain, "grad_norm"))
        with open_run(tmp_path / "run") as run:
            steps = run.steps()
        failed = [u for u, n in zip(steps.units, steps.norms[2], strict=True) if not math.isfinite(n)]
        assert failed == [BAD_UNIT]
        assert np.isfinite(steps.norms[:2]).all()

    def test_with_damping_the_run_survives_a_nan_in_one_unit(self, max_grad_norm, accumulate, tmp_path):
        settings = {"max_grad_norm": max_grad_norm, "gradient_accumulation_steps": accumulate, "max_steps": 5}
        policy = robust(burn_in_steps=1, act_from_step=1, damping=True)
        trainer = make_trainer(
            tmp_path / "out", Poison(3), TrimtabCallback(policy=policy, record=tmp_path / "run"), **settings
        )
        trainer.train()
        assert all(w.isfinite().all() for w in weights(trainer).values())
        assert all(math.isfinite(n) for n in logged(trainer, "grad_norm"))
        with open_run(tmp_path / "run") as run:
            steps = run.steps()
        assert steps.extra[2]["damped"][BAD_UNIT] == 0.0
        assert np.isfinite(steps.norms[3:]).all()


@pytest.mark.parametrize("max_grad_norm", [math.inf, 1e-8])
def test_extreme_bounds_clip_as_the_trainer_does_also_around_a_nan(max_grad_norm, tmp_path):
    settings = {"max_grad_norm": max_grad_norm, "max_steps": 4}
    plain = make_trainer(tmp_path, Poison(3), **settings)
    plain.train()
    watched = make_trainer(tmp_path, Poison(3), TrimtabCallback(policy=WATCH), **settings)
    watched.train()
    assert_same_weights(weights(watched), weights(plain))


SAVING = {"save_strategy": "steps", "save_steps": 4, "max_steps": 10}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    trainer = make_trainer(
        folder / "out", TrimtabCallback(SavedActivations(), policy=NERVOUS, record=folder / "run"), **SAVING
    )
    trainer.train()
    with open_run(folder / "run") as run:
        steps = run.steps()
    assert steps.active.any()
    assert not steps.active.all(axis=1).any()
    return {"weights": weights(trainer), "steps": steps, "out": folder / "out", "history": logged(trainer, "loss")}


def assert_same_run(run_folder: Path, trainer: Trainer, uninterrupted: dict[str, Any]) -> None:
    assert_same_weights(weights(trainer), uninterrupted["weights"])
    expected = uninterrupted["steps"]
    with open_run(run_folder) as run:
        steps = run.steps()
        assert steps.step.tolist() == expected.step.tolist()
        for name in ("norms", "gnmr", "delta", "risk", "active", "lock", "loss", "lr", "grad_norm"):
            np.testing.assert_array_equal(getattr(steps, name), getattr(expected, name), err_msg=name)
        assert replay(run).num_different == 0


class Batches(TrainerCallback):
    """Notes how many sequences each micro-batch of a step has, and the tokens that the Trainer counts for it."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[int, int]]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, forward = kwargs["model"], type(kwargs["model"]).forward

        def noting(*a: Any, **k: Any) -> Any:
            if model.training:
                self.seen.setdefault(state.global_step + 1, []).append(
                    (len(k["input_ids"]), int(k["num_items_in_batch"]))
                )
            return forward(model, *a, **k)

        # As the model's own, or the Trainer would not see that it takes the number of tokens.
        model.forward = functools.wraps(forward)(noting)


class TestFaults:
    UNIT = "model.layers.0.self_attn.q_proj"
    WEIGHT = f"{UNIT}.weight"
    # The checkpoint is of step 4: within them, right before one that changes weights, and right after another one.
    MADE = (
        lambda model, optimizer: LargeLearningRate(optimizer, factor=3.0, start_step=3, num_steps=4),
        lambda model, optimizer: BitFlips(model, TestFaults.WEIGHT, bit=9, num_flips=3, start_step=5, num_steps=2),
        lambda model, optimizer: BitFlips(model, TestFaults.WEIGHT, bit=0, num_flips=3, start_step=3, num_steps=2),
        lambda model, optimizer: BiasedAttentionBackward(model, bias=0.5, start_step=4, num_steps=3),
    )

    def test_a_run_that_resumes_within_them_ends_as_the_uninterrupted_one(self, tmp_path):
        results = {}
        for name in ("whole", "parts", "without"):
            faults = () if name == "without" else (*self.MADE, SmallBatch(num_samples=1, start_step=4, num_steps=4))
            settings = {"policy": WATCH, "record": tmp_path / name, "faults": faults}
            last = [StopAt(6)] if name == "parts" else []
            trainer = make_trainer(tmp_path / f"{name}-out", TrimtabCallback(**settings), *last, **SAVING)
            trainer.train()
            if name == "parts":
                trainer = make_trainer(tmp_path / f"{name}-out", TrimtabCallback(**settings), **SAVING)
                trainer.train(resume_from_checkpoint=str(tmp_path / f"{name}-out" / "checkpoint-4"))
            assert not trainer.optimizer.optimizer._optimizer_step_pre_hooks
            assert not set(trainer.__dict__) & {*METHODS, "log", "get_batch_samples"}
            results[name] = weights(trainer)
        assert_same_weights(results["whole"], results["parts"])
        assert not torch.equal(results["whole"][self.WEIGHT], results["without"][self.WEIGHT])
        events = []
        for name in ("whole", "parts"):
            with open_run(tmp_path / name) as run:
                events.append([(e.step, e.data["fault"], e.data["start_step"]) for e in run.events("fault")])
                assert run.finished
        assert sorted(events[0]) == sorted(events[1])
        assert sorted(step for step, _, _ in events[0]) == [3, 3, 4, 4, 5]
        assert all(step == start for step, _, start in events[0])

    def test_a_small_batch_is_cut_before_its_tokens_are_counted(self, tmp_path):
        seen = Batches()
        callback = TrimtabCallback(policy=WATCH, faults=[SmallBatch(num_samples=1, start_step=2, num_steps=2)])
        trainer = make_trainer(tmp_path, seen, callback, max_steps=4, gradient_accumulation_steps=2)
        trainer.train()
        # Seven of eight tokens are predicted in each sequence; the number is that of the whole step.
        whole, small = [(2, 28), (2, 28)], [(1, 14), (1, 14)]
        assert seen.seen == {1: whole, 2: small, 3: small, 4: whole}

    @pytest.mark.parametrize("wrong", [SmallBatch, SmallBatch(), ["small batch"], [SmallBatch]])
    def test_what_is_no_list_of_faults_is_refused(self, wrong):
        with pytest.raises(ConfigError, match=r"it is a list of faults, or of functions f\(model, optimizer\)"):
            TrimtabCallback(faults=wrong)

    def test_a_factory_that_cannot_make_one_leaves_trainer_and_model_as_they_were(self, tmp_path):
        for factory, said in (
            (lambda model, optimizer: BitFlips(model, "nowhere", bit=0), "no such parameter"),
            (lambda model, optimizer: 3, "a factory returns a fault"),
        ):
            trainer = make_trainer(tmp_path, TrimtabCallback(policy=WATCH, faults=[factory]))
            with pytest.raises(ConfigError, match=said):
                trainer.train()
            assert not set(trainer.__dict__) & {*METHODS, "log"}
            assert not trimtab.detach(trainer.model)


class TestResuming:
    @pytest.mark.parametrize("restore", [False, True])
    def test_decides_trains_and_records_as_the_uninterrupted_run(self, restore, uninterrupted, tmp_path):
        first = make_trainer(
            tmp_path / "out",
            TrimtabCallback(SavedActivations(), policy=NERVOUS, record=tmp_path / "run"),
            StopAt(6),
            **SAVING,
        )
        first.train()
        second = make_trainer(
            tmp_path / "out",
            callback := TrimtabCallback(SavedActivations(), policy=NERVOUS, record=tmp_path / "run"),
            restore_callback_states_from_checkpoint=restore,
            **SAVING,
        )
        second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
        assert_same_run(tmp_path / "run", second, uninterrupted)
        assert callback.guard.num_steps == 10
        # The checkpoint after the resume holds our state too.
        state = json.loads((tmp_path / "out" / "checkpoint-8" / "trainer_state.json").read_text())
        assert set(state["stateful_callbacks"]["trimtab"]) == {"format", "data"}

    def test_a_save_that_dies_before_the_trainers_state_leaves_the_checkpoint_before_usable(
        self, uninterrupted, tmp_path, monkeypatch
    ):
        class PowerCut(BaseException):
            pass

        def dies(state: Any, path: str) -> None:
            if "checkpoint-8" in path:
                raise PowerCut
            save(state, path)

        save = transformers.TrainerState.save_to_json
        monkeypatch.setattr(transformers.TrainerState, "save_to_json", dies)
        settings = {"policy": NERVOUS, "record": tmp_path / "run"}
        callback = TrimtabCallback(SavedActivations(), **settings)
        first = make_trainer(tmp_path / "out", callback, **SAVING)
        with pytest.raises(PowerCut):
            first.train()
        assert (tmp_path / "out" / "checkpoint-8" / "model.safetensors").exists()
        assert not (tmp_path / "out" / "checkpoint-8" / "trainer_state.json").exists()
        callback.guard.close(finished=False)
        monkeypatch.undo()
        second = make_trainer(tmp_path / "out", TrimtabCallback(SavedActivations(), **settings), **SAVING)
        second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
        assert_same_run(tmp_path / "run", second, uninterrupted)

    @pytest.mark.slow
    def test_a_process_killed_between_the_two_writes_resumes_from_the_checkpoint_before(self, uninterrupted, tmp_path):
        killed = subprocess.run(
            [sys.executable, __file__, "killed", str(tmp_path)], capture_output=True, text=True, timeout=120
        )
        assert killed.returncode == 9, killed.stderr
        assert not (tmp_path / "out" / "checkpoint-8" / "trainer_state.json").exists()
        trainer = make_trainer(
            tmp_path / "out", TrimtabCallback(SavedActivations(), policy=NERVOUS, record=tmp_path / "run"), **SAVING
        )
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
        assert_same_run(tmp_path / "run", trainer, uninterrupted)

    @pytest.mark.parametrize("left", ["nothing", "damage", "a newer version"])
    def test_a_checkpoint_without_a_usable_state_is_named_once_and_the_run_goes_on(self, left, tmp_path):
        make_trainer(
            tmp_path / "out", TrimtabCallback(policy=NERVOUS, record=tmp_path / "run"), StopAt(5), **SAVING
        ).train()
        path = tmp_path / "out" / "checkpoint-4" / "trainer_state.json"
        state = json.loads(path.read_text())
        if left == "nothing":
            del state["stateful_callbacks"]["trimtab"]
        elif left == "damage":
            state["stateful_callbacks"]["trimtab"]["data"] = "bm8="
        else:
            from trimtab.integrations.transformers import _encode

            state["stateful_callbacks"]["trimtab"] = _encode({"version": 2})
        path.write_text(json.dumps(state))
        trainer = make_trainer(
            tmp_path / "out", callback := TrimtabCallback(policy=NERVOUS, record=tmp_path / "run"), **SAVING
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train(resume_from_checkpoint=str(path.parent))
        ours = [w for w in caught if issubclass(w.category, TrimtabWarning)]
        assert len(ours) == 1
        assert "checkpoint-4 holds no" in str(ours[0].message)
        assert "without history" in str(ours[0].message)
        assert callback.guard.num_steps == 10
        saved = json.loads((tmp_path / "out" / "checkpoint-8" / "trainer_state.json").read_text())
        assert "trimtab" in saved["stateful_callbacks"]
        with open_run(tmp_path / "run") as run:
            assert run.steps().step.tolist() == list(range(1, 11))
            assert replay(run).num_different == 0

    def test_a_checkpoint_of_a_run_without_the_callback_can_be_gone_on_from_and_saved(self, tmp_path):
        make_trainer(tmp_path / "out", StopAt(5), **SAVING).train()
        trainer = make_trainer(
            tmp_path / "out",
            TrimtabCallback(policy=WATCH),
            restore_callback_states_from_checkpoint=True,
            **SAVING,
        )
        with pytest.warns(TrimtabWarning, match="checkpoint-4 holds no state"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
        assert (tmp_path / "out" / "checkpoint-8" / "trainer_state.json").exists()

    def test_a_checkpoint_of_ours_can_be_gone_on_from_without_the_callback(self, uninterrupted, tmp_path):
        trainer = make_trainer(tmp_path, **SAVING)
        trainer.train(resume_from_checkpoint=str(uninterrupted["out"] / "checkpoint-4"))
        assert trainer.state.global_step == 10


class ScalesLosses(TrainerCallback):
    """Gives accelerate the loss scaler that it makes for fp16 on an accelerator, with nothing else of fp16."""

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        accelerator = sys._getframe(3).f_locals["self"].accelerator
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        # As when prepared with one.
        optimizer.__init__(optimizer.optimizer, device_placement=False, scaler=scaler)
        accelerator.scaler = scaler
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"


class StopAt(TrainerCallback):
    """Ends training early, as a time limit does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


class Breaks(TrainerCallback):
    """Raises at one step, the first times."""

    def __init__(self, at_step: int, error: Exception, times: int = 1) -> None:
        self.at_step, self.error, self.times = at_step, error, times

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.at_step and self.times:
            self.times -= 1
            raise self.error


class TestLeavingNothingBehind:
    def test_after_training_the_model_and_the_trainer_are_as_they_were(self, tmp_path):
        trainer = make_trainer(tmp_path, TrimtabCallback(SavedActivations(), policy=NERVOUS))
        before = [type(m) for m in trainer.model.modules()]
        trainer.train()
        assert is_as_found(trainer)
        assert [type(m) for m in trainer.model.modules()] == before
        trimtab.attach(trainer.model).detach()

    def test_a_run_that_was_stopped_early_is_not_recorded_as_finished(self, tmp_path):
        make_trainer(tmp_path, TrimtabCallback(policy=WATCH, record=tmp_path / "run"), StopAt(3)).train()
        with open_run(tmp_path / "run") as run:
            assert not run.finished
            assert run.last_step == 3

    def test_the_second_training_wraps_once_and_counts_anew(self, tmp_path):
        trainer = make_trainer(tmp_path, callback := TrimtabCallback(policy=WATCH, record=tmp_path / "run"))
        trainer.train()
        trainer.train()
        assert is_as_found(trainer)
        assert callback.guard.num_steps == 8
        with open_run(tmp_path / "run") as run:
            assert run.steps().step.tolist() == list(range(1, 9))
            assert len(run.segments) == 2

    def test_after_an_exception_the_next_training_works(self, tmp_path):
        breaks = Breaks(3, RuntimeError("lost node"))
        trainer = make_trainer(
            tmp_path, callback := TrimtabCallback(SavedActivations(), policy=NERVOUS, record=tmp_path / "run"), breaks
        )
        with pytest.raises(RuntimeError, match="lost node"):
            trainer.train()
        with open_run(tmp_path / "run") as run:
            assert not run.finished
        trainer.train()
        assert callback.guard.num_steps == 8
        assert is_as_found(trainer)
        with open_run(tmp_path / "run") as run:
            assert run.finished
            assert run.steps().step.tolist() == list(range(1, 9))

    def test_the_losses_of_a_step_that_was_broken_off_are_not_those_of_the_next_training(self, tmp_path):
        class BreaksMidStep(TrainerCallback):
            done = False

            def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == 2 and not self.done:
                    self.done = True
                    raise RuntimeError("lost node")

        trainer = make_trainer(
            tmp_path,
            TrimtabCallback(policy=WATCH, record=tmp_path / "run"),
            BreaksMidStep(),
            gradient_accumulation_steps=2,
        )
        with pytest.raises(RuntimeError, match="lost node"):
            trainer.train()
        trainer.train()
        with open_run(tmp_path / "run") as run:
            assert run.steps().loss.tolist() == logged(trainer, "loss")

    def test_a_retry_with_a_smaller_batch_does_not_wrap_twice(self, tmp_path):
        breaks = Breaks(3, RuntimeError("CUDA out of memory."))
        trainer = make_trainer(
            tmp_path,
            callback := TrimtabCallback(policy=WATCH, record=tmp_path / "run"),
            breaks,
            auto_find_batch_size=True,
            per_device_train_batch_size=4,
        )
        trainer.train()
        assert breaks.times == 0
        assert trainer._train_batch_size < 4
        assert callback.guard.num_steps == 8
        assert is_as_found(trainer)
        assert len(logged(trainer, "loss")) == 8
        with open_run(tmp_path / "run") as run:
            steps = run.steps()
        assert steps.step.tolist() == list(range(1, 9))
        assert steps.loss.tolist() == logged(trainer, "loss")

    def test_what_the_user_put_on_the_instance_is_used_and_goes_back_there(self, tmp_path):
        trainer = make_trainer(tmp_path, TrimtabCallback(policy=WATCH))
        original, calls = trainer.training_step, []

        def mine(*args: Any, **kwargs: Any) -> torch.Tensor:
            calls.append(1)
            return original(*args, **kwargs)

        trainer.training_step = mine
        trainer.train()
        assert len(calls) == 8
        assert trainer.__dict__["training_step"] is mine

    def test_a_trainer_that_clips_in_its_own_way_still_does(self, tmp_path):
        class ByValue(Trainer):
            def _clip_grad_norm(self, model: Any) -> torch.Tensor:
                torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
                return torch.tensor(7.0)

        results = []
        for callbacks in ([], [TrimtabCallback(policy=WATCH)]):
            trainer = make_trainer(tmp_path, *callbacks)
            trainer.__class__ = ByValue
            trainer.train()
            results.append(weights(trainer))
            assert logged(trainer, "grad_norm") == [7.0] * 8
        assert_same_weights(*results)

    def test_a_trainer_that_is_not_used_any_more_is_freed(self, tmp_path):
        trainer = make_trainer(tmp_path, TrimtabCallback(policy=WATCH), max_steps=2)
        trainer.train()
        gone = weakref.ref(trainer.model)
        del trainer
        gc.collect()
        assert gone() is None


class TestSettings:
    def test_activation_checkpointing_keeps_decisions_and_weights(self, uninterrupted, tmp_path):
        trainer = make_trainer(
            tmp_path / "out",
            TrimtabCallback(SavedActivations(), policy=NERVOUS, record=tmp_path / "run"),
            activation_checkpointing=True,
            activation_checkpointing_kwargs={"use_reentrant": False},
            **SAVING,
        )
        trainer.train()
        assert_same_run(tmp_path / "run", trainer, uninterrupted)

    def test_bf16_autocast_is_watched_without_a_change(self, tmp_path):
        plain = make_trainer(tmp_path / "out", bf16=True)
        plain.train()
        watched = make_trainer(tmp_path / "out", TrimtabCallback(policy=WATCH, record=tmp_path / "run"), bf16=True)
        watched.train()
        assert_same_weights(weights(watched), weights(plain))
        assert logged(watched, "grad_norm") == logged(plain, "grad_norm")
        with open_run(tmp_path / "run") as run:
            assert np.isfinite(run.steps().norms).all()

    @pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
    def test_loss_scaling_is_watched_without_a_change_and_a_skipped_step_is_noted(self, max_grad_norm, tmp_path):
        settings = {"max_grad_norm": max_grad_norm, "gradient_accumulation_steps": 2}
        plain = make_trainer(tmp_path / "out", ScalesLosses(), Poison(3), **settings)
        plain.train()
        watched = make_trainer(
            tmp_path / "out",
            ScalesLosses(),
            Poison(3),
            callback := TrimtabCallback(policy=WATCH, record=tmp_path / "run"),
            **settings,
        )
        watched.train()
        assert plain.accelerator.scaler.get_scale() == watched.accelerator.scaler.get_scale() == 2.0**9
        assert all(w.isfinite().all() for w in weights(watched).values())
        assert_same_weights(weights(watched), weights(plain))
        assert repr(logged(watched, "grad_norm")) == repr(logged(plain, "grad_norm"))
        assert callback.guard.num_steps == 7
        with open_run(tmp_path / "run") as run:
            assert [e.step for e in run.events("skip")] == [2]
            assert run.steps().step.tolist() == list(range(1, 8))
            assert np.isfinite(run.steps().norms).all()
            # The Trainer counts the skipped step, and logs it.
            assert run.steps().loss.tolist() == [x for i, x in enumerate(logged(watched, "loss")) if i != 2]

    def test_bf16_autocast_with_saved_activations_keeps_the_forward(self, tmp_path):
        plain = make_trainer(tmp_path / "out", bf16=True, max_steps=3)
        plain.train()
        stored = make_trainer(
            tmp_path / "out", TrimtabCallback(SavedActivations(), policy=WATCH), bf16=True, max_steps=3
        )
        stored.train()
        assert logged(stored, "loss")[0] == logged(plain, "loss")[0]
        assert logged(stored, "grad_norm")[0] != logged(plain, "grad_norm")[0]
        assert all(math.isfinite(x) for x in logged(stored, "loss"))

    def test_evaluation_during_training_is_no_step(self, tmp_path):
        trainer = make_trainer(
            tmp_path / "out",
            callback := TrimtabCallback(SavedActivations(), policy=NERVOUS, record=tmp_path / "run"),
            eval_strategy="steps",
            eval_steps=2,
        )
        trainer.train()
        assert callback.guard.num_steps == 8
        with open_run(tmp_path / "run") as run:
            assert run.steps().loss.tolist() == logged(trainer, "loss")

    def test_the_default_policy_knows_the_warm_up_and_says_once_that_the_run_is_short(self, tmp_path):
        trainer = make_trainer(tmp_path, callback := TrimtabCallback(), max_steps=30, warmup_steps=25)
        with pytest.warns(TrimtabWarning, match="total_steps=30") as caught:
            trainer.train()
        assert len([w for w in caught if w.category is TrimtabWarning]) == 1
        assert callback.guard.policy.burn_in_steps == 25

    def test_outside_a_trainer_it_says_where_it_belongs(self):
        with pytest.raises(ConfigError, match=r"works inside transformers\.Trainer"):
            TrimtabCallback().on_train_begin(None, None, None)

    def test_a_trainer_without_the_callback_in_its_list_is_not_taken_for_its_own(self, tmp_path):
        stray = TrimtabCallback()

        class Calls(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                stray.on_train_begin(args, state, control)

        with pytest.raises(ConfigError, match="no Trainer that has it"):
            make_trainer(tmp_path, Calls()).train()

    def test_a_new_trainer_takes_the_model_over_from_one_that_was_interrupted(self, tmp_path):
        class Interrupt(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                raise KeyboardInterrupt

        model, first = build(), TrimtabCallback(policy=WATCH)
        with pytest.raises(KeyboardInterrupt):
            make_trainer(tmp_path / "a", first, Interrupt(), model=model).train()
        second = TrimtabCallback(policy=WATCH)
        make_trainer(tmp_path / "b", second, model=model).train()
        assert second.guard is not None
        assert second.guard.num_steps == 8
        assert first.guard.num_steps == 1

    def test_two_callbacks_cannot_watch_one_model(self, tmp_path):
        trainer = make_trainer(tmp_path, TrimtabCallback(policy=WATCH), TrimtabCallback(policy=WATCH))
        with pytest.raises(ConfigError, match="one guard watches a model"):
            trainer.train()


def test_without_transformers_it_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "trimtab.integrations.transformers")
    with pytest.raises(MissingExtraError, match=r"'transformers'.*trimtab\[hf\]"):
        importlib.import_module("trimtab.integrations.transformers")


class Window(BaseMonitor):
    """Counts its steps in a tensor, which is too large for JSON; gives alarm from its fifth on."""

    name = "window"
    alarm_rules: Mapping[str, AlarmRule] = {"count": AlarmRule(Above(4.5, warmup=0), "It counted to {value:.0f}.")}

    def __init__(self, start: float = 0.0) -> None:
        self.count = torch.full((1,), start)

    def start(self, model: Any) -> None:
        """Nothing to place."""

    def observe(self, step: int) -> dict[str, torch.Tensor]:
        self.count = self.count + 1
        return {"count": self.count}

    def tensor_state(self) -> dict[str, torch.Tensor]:
        return {"count": self.count}

    def load_tensor_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self.count = state["count"]


class TestMonitors:
    @pytest.mark.parametrize("save", [False, True])
    def test_an_alarm_stops_training_at_the_end_of_the_step_after_it_and_saves_if_asked(self, save, tmp_path):
        callback = TrimtabCallback(policy=WATCH, monitors=[Window()], on_alarm=[StopTraining(save=save)])
        trainer = make_trainer(tmp_path, callback, max_steps=10, save_strategy="steps", save_steps=100)
        with pytest.warns(TrimtabWarning, match="It counted to 5"):
            trainer.train()
        assert trainer.state.global_step == 6
        assert (tmp_path / "checkpoint-6" / "trainer_state.json").exists() == save

    def test_without_an_action_an_alarm_is_said_and_training_goes_on(self, tmp_path):
        trainer = make_trainer(tmp_path, callback := TrimtabCallback(policy=WATCH, monitors=[Window()]))
        with pytest.warns(TrimtabWarning, match="It counted to 5"):
            trainer.train()
        assert trainer.state.global_step == 8
        assert [alarm.step for alarm in callback.guard.alarms] == [5]

    @pytest.mark.parametrize("left", ["whole", "torn", "nothing", "another step's"])
    def test_a_monitors_tensors_are_beside_the_state_or_its_window_starts_afresh_with_one_warning(self, left, tmp_path):
        make_trainer(tmp_path / "out", TrimtabCallback(policy=WATCH, monitors=[Window()]), StopAt(4), **SAVING).train()
        path = tmp_path / "out" / "checkpoint-4" / "trimtab_monitors.pt"
        assert [p.name for p in path.parent.iterdir() if "trimtab" in p.name] == [path.name]
        if left == "torn":
            path.write_bytes(path.read_bytes()[:100])
        elif left == "nothing":
            path.unlink()
        elif left == "another step's":
            torch.save(torch.load(path) | {"step": 3}, path)
        callback = TrimtabCallback(policy=WATCH, monitors=[window := Window()], record=tmp_path / "run")
        trainer = make_trainer(tmp_path / "out", callback, StopAt(6), **SAVING)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train(resume_from_checkpoint=str(path.parent))
        said = [str(w.message) for w in caught if "windows start afresh" in str(w.message)]
        with open_run(tmp_path / "run") as run:
            notes = [event.data for event in run.events("note") if "fresh_window" in event.data]
        if left == "whole":
            assert (window.count.item(), said, notes) == (6.0, [], [])
        else:
            assert window.count.item() == 2.0
            assert len(said) == len(notes) == 1
            assert "trimtab_monitors.pt" in said[0]

    def test_without_tensors_no_file_is_written(self, tmp_path):
        make_trainer(tmp_path, TrimtabCallback(policy=WATCH), StopAt(4), **SAVING).train()
        assert not (tmp_path / "checkpoint-4" / "trimtab_monitors.pt").exists()

    def test_a_file_that_cannot_be_written_is_one_warning_and_the_checkpoint_is_saved(self, tmp_path, monkeypatch):
        save = torch.save

        def full_disk(content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
            if "trimtab_monitors" in str(path):
                raise RuntimeError("PytorchStreamWriter failed writing file")
            save(content, path, *args, **kwargs)

        monkeypatch.setattr(torch, "save", full_disk)
        trainer = make_trainer(tmp_path, TrimtabCallback(policy=WATCH, monitors=[Window()]), StopAt(4), **SAVING)
        with pytest.warns(TrimtabWarning, match=r"trimtab_monitors\.pt could not be written"):
            trainer.train()
        assert (tmp_path / "checkpoint-4" / "trainer_state.json").exists()


@pytest.mark.slow
def test_two_ranks_decide_equally_and_only_the_first_writes(tmp_path):
    # accelerate asks for an address and a port, which it has no use for: the ranks meet in a file.
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "ranks", str(tmp_path)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()  # closes its pipe, or a later test is told of it
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [r.pop("writes") for r in results] == [True, False]
    assert [r["stopped_at"] for r in results] == [4, 4]
    assert results[0]["state"] == results[1]["state"]
    assert results[0]["grad_norm"] == results[0]["plain_grad_norm"]
    assert results[0]["weights"] == results[0]["plain_weights"]
    assert results[0]["resumed_state"] == results[1]["resumed_state"] == results[0]["state"]
    with open_run(tmp_path / "run") as run:
        assert run.steps().step.tolist() == list(range(1, 9))
        assert run.steps().grad_norm.tolist() == results[0]["grad_norm"]


def run_as_a_rank(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    # They meet in a file: a port that is free now may be another process's by the time that they ask for it.
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    settings = {"ddp_backend": "gloo", "save_strategy": "steps", "save_steps": 4}
    plain = make_trainer(folder / "plain", **settings)
    plain.train()
    callback = TrimtabCallback(policy=NERVOUS, record=folder / "run")
    trainer = make_trainer(folder / "out", callback, **settings)
    writes = []
    trainer.add_callback(Look(lambda: writes.append(callback.guard._journal.writer is not None)))
    trainer.train()
    resumed = TrimtabCallback(policy=NERVOUS)
    make_trainer(folder / "out", resumed, **settings).train(resume_from_checkpoint=str(folder / "out" / "checkpoint-4"))
    # By itself rank 0 would stop two steps later, and rank 1 two steps earlier. Rank 0 looks at once each time.
    stopping = TrimtabCallback(policy=WATCH, monitors=[Window(4.0 * rank)], on_alarm=[StopTraining()])
    stopped = make_trainer(folder / "stopped", stopping, max_steps=10, ddp_backend="gloo")
    if rank == 0:
        stopped.add_callback(Look(lambda: stopping.guard.metrics()))
    stopped.train()
    result = {
        "stopped_at": stopped.state.global_step,
        "writes": writes[0],
        "state": callback.guard.state_dict(),
        "resumed_state": resumed.guard.state_dict(),
        "grad_norm": logged(trainer, "grad_norm"),
        "plain_grad_norm": logged(plain, "grad_norm"),
        "weights": {k: v.tolist() for k, v in weights(trainer).items()},
        "plain_weights": {k: v.tolist() for k, v in weights(plain).items()},
    }
    (folder / f"{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


class Look(TrainerCallback):
    """Calls a function after each step."""

    def __init__(self, look: Any) -> None:
        self.look = look

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.look()


def die_between_the_two_writes(folder: Path) -> None:
    save = transformers.TrainerState.save_to_json
    transformers.TrainerState.save_to_json = lambda state, path: (
        os._exit(9) if "checkpoint-8" in path else save(state, path)
    )
    callback = TrimtabCallback(SavedActivations(), policy=NERVOUS, record=folder / "run")
    make_trainer(folder / "out", callback, **SAVING).train()


if __name__ == "__main__":
    {"ranks": run_as_a_rank, "killed": die_between_the_two_writes}[sys.argv[1]](Path(sys.argv[2]))
