"""The guard in a loop of accelerate's, in place of ``accelerator.clip_grad_norm_``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trimtab
from trimtab.control import Policy
from trimtab.trace import open_run

accelerate = pytest.importorskip("accelerate")

WATCH = Policy(max_active=0)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def train(
    accumulate: int = 1,
    watch: bool = False,
    record: Path | None = None,
    scaler: Any = None,
    nan_at: int | None = None,
    attach_first: bool = False,
) -> tuple[dict[str, torch.Tensor], list[float], Any]:
    """Six optimizer steps: the weights, the total norms before clipping, and the guard."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = build()
    rows = torch.randn(12 * accumulate, 8, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = trimtab.attach(model, policy=WATCH, record=record) if watch and attach_first else None
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if scaler is not None:
        # What accelerate makes for fp16 on an accelerator, with nothing else of fp16.
        optimizer.__init__(optimizer.optimizer, device_placement=False, scaler=scaler)
        accelerator.scaler, accelerator.native_amp = scaler, True
        accelerator.state._mixed_precision = "fp16"
    if watch and guard is None:
        guard = trimtab.attach(model, policy=WATCH, record=record)
    norms, num_steps = [], 0
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            if accelerator.sync_gradients:
                num_steps += 1
                if num_steps == nan_at:
                    model[0].weight.grad.fill_(math.nan)
                if guard is None:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.05)))
                else:
                    norms.append(float(guard.step(max_norm=0.05, scaler=accelerator.scaler).grad_norm))
            optimizer.step()
            optimizer.zero_grad()
    if guard is not None:
        guard.detach()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}, norms, guard


@pytest.fixture(autouse=True)
def _a_state_of_its_own():
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("attach_first", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_guards_step_is_accelerates_clip_to_the_last_bit_and_counts_optimizer_steps(
    accumulate, attach_first, tmp_path
):
    plain, norms, _ = train(accumulate)
    watched, seen, guard = train(accumulate, watch=True, record=tmp_path, attach_first=attach_first)
    for key in plain:
        torch.testing.assert_close(watched[key], plain[key], rtol=0, atol=0)
    assert seen == norms
    assert guard.num_steps == 6
    with open_run(tmp_path) as run:
        assert run.steps().grad_norm.tolist() == norms
        assert run.steps().lr.tolist() == [1e-2] * 6


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_accelerates_scaler_skips_is_noted_and_nothing_changes(accumulate, tmp_path):
    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=2.0**10)

    plain, norms, _ = train(accumulate, scaler=scaler(), nan_at=3)
    watched, seen, guard = train(accumulate, watch=True, record=tmp_path, scaler=scaler(), nan_at=3)
    for key in plain:
        torch.testing.assert_close(watched[key], plain[key], rtol=0, atol=0)
        assert watched[key].isfinite().all()
    np.testing.assert_array_equal(seen, norms)
    assert guard.num_steps == 5
    with open_run(tmp_path) as run:
        assert [event.step for event in run.events("skip")] == [2]
        assert np.isfinite(run.steps().norms).all()
