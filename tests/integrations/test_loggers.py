"""Metrics read back from where they were logged. This file is also the script of what needs a process of its own."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trimtab
from trimtab.control import Policy
from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.integrations.loggers import MetricsLogger, log_to_csv, log_to_run, log_to_tensorboard
from trimtab.precision import SavedActivations
from trimtab.trace import open_run

transformers = pytest.importorskip("transformers")

# Nervous enough to switch units in a few healthy steps.
NERVOUS = Policy(alpha=1.02, beta=1.02, window_steps=2, max_active=3, lock_steps=2)
EVERY = 2
RISK, ACTIVE = "trimtab/risk/max", "trimtab/control/num_active"


def build() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    return transformers.LlamaForCausalLM(config).train()


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(32, (8,), generator=generator) for _ in range(16)]


def plain_loop(record: Path, logger: Callable[[dict[str, float], int], None]) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with trimtab.attach(model, SavedActivations(), policy=NERVOUS, record=record) as guard:
        for step, row in enumerate(rows()[:8], start=1):
            model(input_ids=row[None], labels=row[None]).loss.backward()
            guard.step(max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % EVERY == 0:
                logger(guard.metrics(), step)


def trainer_loop(folder: Path, *reporters: str, log_metrics: bool = True, **settings: Any) -> Any:
    from trimtab.integrations.transformers import TrimtabCallback

    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=8,
        per_device_train_batch_size=2,
        learning_rate=3e-3,
        logging_steps=EVERY,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        report_to=list(reporters) or "none",
        **settings,
    )
    callback = TrimtabCallback(SavedActivations(), policy=NERVOUS, record=folder / "trainer", log_metrics=log_metrics)
    data = [{"input_ids": row, "labels": row} for row in rows()]
    trainer = transformers.Trainer(build(), arguments, train_dataset=data, eval_dataset=data, callbacks=[callback])
    trainer.train()
    return trainer


def assert_as_recorded(record: Path, logged: dict[int, dict[str, float]]) -> None:
    """``logged`` by step has the record's values at every second step, to single precision."""
    with open_run(record) as run:
        steps = run.steps()
    assert sorted(logged) == [2, 4, 6, 8]
    for step, values in logged.items():
        assert np.float32(values[RISK]) == np.float32(np.nanmax(steps.risk[step - 1]))
        assert values[ACTIVE] == steps.active[step - 1].sum()
    assert any(values[ACTIVE] > 0 for values in logged.values())


class TestTheTrainersLogs:
    def test_have_the_metrics_at_the_steps_at_which_it_logs_and_nowhere_else(self, tmp_path):
        trainer = trainer_loop(tmp_path, eval_strategy="steps", eval_steps=4)
        history = trainer.state.log_history
        assert_as_recorded(tmp_path / "trainer", {row["step"]: row for row in history if "loss" in row})
        assert not [row for row in history if "loss" not in row and any(key.startswith("trimtab") for key in row)]
        assert "log" not in trainer.__dict__

    def test_without_the_option_are_as_they_were(self, tmp_path):
        trainer = trainer_loop(tmp_path, log_metrics=False)
        assert not [key for row in trainer.state.log_history for key in row if key.startswith("trimtab")]


def scalars(folder: Path, prefix: str = "") -> dict[int, dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    found: dict[int, dict[str, float]] = {}
    for name in (RISK, ACTIVE):
        for event in events.Scalars(prefix + name):
            found.setdefault(event.step, {})[name] = event.value
    return found


class TestTensorBoard:
    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("tensorboard")

    def test_has_what_a_plain_loop_logs(self, tmp_path):
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(tmp_path / "events")) as writer:
            plain_loop(tmp_path / "run", log_to_tensorboard(writer))
        assert_as_recorded(tmp_path / "run", scalars(tmp_path / "events"))

    def test_has_what_the_trainer_reports(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
        trainer_loop(tmp_path, "tensorboard")
        assert_as_recorded(tmp_path / "trainer", scalars(tmp_path / "events", "train/"))


class TestCsv:
    def test_has_what_a_plain_loop_logs(self, tmp_path):
        plain_loop(tmp_path / "run", log_to_csv(tmp_path / "new" / "metrics.csv"))
        with (tmp_path / "new" / "metrics.csv").open(newline="") as file:
            found = list(csv.DictReader(file))
        logged = {int(row["step"]): {name: float(row[name]) for name in (RISK, ACTIVE)} for row in found}
        assert_as_recorded(tmp_path / "run", logged)

    def test_a_resumed_run_does_its_steps_over_and_new_metrics_are_new_columns(self, tmp_path):
        path = tmp_path / "metrics.csv"
        first = log_to_csv(path)
        for step in (1, 2, 3):
            first({"a": step}, step)
        second = log_to_csv(path)
        second({"a": 20}, 2)
        second({"b": 30.5}, 3)
        second({"a": 40}, 4)
        assert path.read_text().split() == ["step,a,b", "1,1,", "2,20,", "3,,30.5", "4,40,"]
        assert not path.with_name("metrics.csv.new").exists()

    def test_a_file_that_cannot_be_written_is_one_warning_and_the_run_goes_on(self, tmp_path):
        (tmp_path / "file").write_text("in the way")
        logger = log_to_csv(tmp_path / "file" / "metrics.csv")
        with pytest.warns(TrimtabWarning, match="failed and is off") as said:
            plain_loop(tmp_path / "run", logger)
        assert len(said) == 1


def test_whatever_can_be_called_is_a_logger():
    seen = []
    MetricsLogger(lambda metrics, step: seen.append((step, dict(metrics))), "a list")({"a": 1.0}, 3)
    assert seen == [(3, {"a": 1.0})]


@pytest.mark.parametrize(("make", "needed"), [(log_to_tensorboard, "add_scalar"), (log_to_run, "log")])
def test_what_cannot_log_is_refused_with_what_it_lacks(make, needed):
    with pytest.raises(ConfigError, match=f"it has no method {needed}"):
        make(object())


def log_to_trackio(folder: Path) -> dict[str, Any]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    run = trackio.init(project="plain", name="run")
    plain_loop(folder / "plain", log_to_run(run))
    trackio.finish()
    trainer_loop(folder, "trackio", project="of-trainer", run_name="run", trackio_static_space_id=False)
    plain = {row["step"]: row for row in SQLiteStorage.get_logs("plain", "run")}
    reported = SQLiteStorage.get_logs("of-trainer", "run")
    reported = {row["train/global_step"]: row for row in reported if f"train/{RISK}" in row}
    return {"plain": plain, "trainer": reported}


def log_to_wandb(folder: Path) -> dict[str, Any]:
    import wandb

    with wandb.init(project="plain", dir=folder, mode="offline") as plain:
        plain_loop(folder / "plain", log_to_run(plain))
    trainer_loop(folder, "wandb")
    reported = wandb.run
    reported.finish()
    # Only with its service gone is all of it on the disk.
    wandb.teardown()
    return {
        "plain": history(Path(plain.settings.sync_file), "_step"),
        "trainer": history(Path(reported.settings.sync_file), "train/global_step"),
    }


def history(path: Path, step: str) -> dict[int, dict[str, float]]:
    """What an offline run's file has logged, by step, of rows that have our metrics."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    store.open_for_scan(str(path))
    found: dict[int, dict[str, float]] = {}
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = record.history.item
        row = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in items}
        if any(RISK in key for key in row):
            found[int(row[step])] = row
    return found


@pytest.mark.slow
@pytest.mark.parametrize("package", ["trackio", "wandb"])
def test_a_reporter_has_what_a_plain_loop_and_the_trainer_log(package, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    offline = {"TRACKIO_DIR": str(tmp_path / "trackio"), "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    offline |= {"HF_HUB_OFFLINE": "1", "WANDB_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, __file__, package, str(tmp_path)]
    done = subprocess.run(words, env=os.environ | offline, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    for loop, prefix in (("plain", ""), ("trainer", "train/")):
        logged = {int(step): {name: row[prefix + name] for name in (RISK, ACTIVE)} for step, row in found[loop].items()}
        assert_as_recorded(tmp_path / loop, logged)


if __name__ == "__main__":
    found = {"trackio": log_to_trackio, "wandb": log_to_wandb}[sys.argv[1]](Path(sys.argv[2]))
    (Path(sys.argv[2]) / "found.json").write_text(json.dumps(found, default=str))
