"""One run in training: watched by every monitor or by nothing, and able to begin where another one was saved."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

import trimtab
from trimtab.errors import TrimtabWarning
from trimtab.experiments.faults.models import ModelKind, WatchedPlan, every_monitor, make_model
from trimtab.experiments.text import Corpus, TextBatches, validation_batches
from trimtab.faults import Fault, SmallBatch
from trimtab.guard import Guard

__all__ = ["WatchedRun"]


class WatchedRun:
    """A model, its optimizer, its data and its guard.

    What it draws is a function of the seed and the step alone, so runs of one seed see the same data.

    Args:
        kind: Which model.
        plan: Its sizes and its schedule.
        corpus: The text.
        seed: Of the weights and the data order.
        record: Where the run record goes; None keeps none.
        watched: Whether there are monitors, and a guard at all.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        guard: Its guard; None where nothing watches.
        step: Optimizer steps done.
        held_out: Steps and held-out losses, in nats a token.
    """

    def __init__(
        self,
        kind: ModelKind,
        plan: WatchedPlan,
        corpus: Corpus,
        seed: int,
        *,
        record: Path | None = None,
        watched: bool = True,
    ) -> None:
        self.plan = plan
        self.model = make_model(kind, plan, corpus.vocab_size, seed)
        self.optimizer = AdamW(
            self.model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=plan.weight_decay
        )
        self.guard: Guard | None = None
        if watched:
            self.guard = trimtab.attach(self.model, monitors=every_monitor(kind), record=record)
        self.step = 0
        self.held_out: list[tuple[int, float]] = []
        self._batches = TextBatches(corpus.train, plan.batch, plan.sequence, seed)
        self._validation = next(
            validation_batches(
                corpus.validation, batch=plan.num_validation, sequence=plan.sequence, num_sequences=plan.num_validation
            )
        )

    def train(self, last_step: int, faults: Sequence[Fault] = (), on_step: Callable[[int], None] | None = None) -> None:
        """Train up to and with ``last_step``.

        Args:
            last_step: The last optimizer step.
            faults: What is injected; needs a guard.
            on_step: Called after each step.
        """
        if faults and self.guard is None:
            raise AssertionError("faults are injected by a guard")
        cuts = [fault for fault in faults if isinstance(fault, SmallBatch)]
        with warnings.catch_warnings():
            # Alarms are what these runs are for: the summary has them all.
            warnings.simplefilter("ignore", TrimtabWarning)
            for fault in faults:
                assert self.guard is not None
                self.guard.inject(fault)
            while self.step < last_step:
                self._train_once(cuts)
                if on_step is not None:
                    on_step(self.step)
            if self.guard is not None:
                self.guard.resolve()

    def _train_once(self, cuts: Sequence[SmallBatch]) -> None:
        self.step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.learning_rate_at(self.step)
        batch = self._batches[self.step]
        for cut in cuts:
            batch = cut.cut(batch)
        self.model(input_ids=batch, labels=batch).loss.backward()
        if self.guard is not None:
            self.guard.step(max_norm=self.plan.max_norm)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.step % self.plan.eval_every == 0:
            self.held_out.append((self.step, self.held_out_loss()))

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Nats a token on the held-out sequences; a mixture's balancing loss is no part of it."""
        self.model.eval()
        logits: Tensor = self.model(input_ids=self._validation).logits
        self.model.train()
        return float(functional.cross_entropy(logits[:, :-1].flatten(0, 1), self._validation[:, 1:].flatten()))

    def nudge(self, amount: float, seed: int) -> None:
        """Multiply each weight by 1 plus ``amount`` times a normal number, as other rounding would."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 + amount * torch.randn(parameter.shape, generator=generator))

    def digest(self) -> str:
        """A hash of all weights, for comparing two runs bit by bit."""
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            found.update(parameter.detach().numpy().tobytes())
        return found.hexdigest()

    def save(self, path: Path) -> None:
        """Write everything that another run needs to go on from here, whole or not at all."""
        assert self.guard is not None
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "guard": json.dumps(self.guard.state_dict()),
            "tensors": self.guard.tensor_state_dict(),
            "held_out": self.held_out,
        }
        part = path.with_name(path.name + ".part")
        torch.save(state, part)
        part.replace(path)

    def load(self, path: Path) -> None:
        """Go on from where ``save`` was called."""
        state: dict[str, Any] = torch.load(path, weights_only=True)
        self.step = state["step"]
        self.held_out = [(int(step), float(loss)) for step, loss in state["held_out"]]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.guard is not None:
            self.guard.load_state_dict(json.loads(state["guard"]))
            self.guard.load_tensor_state_dict(state["tensors"])

    def close(self, finished: bool = True) -> None:
        """Take the guard away and close its record."""
        if self.guard is not None:
            self.guard.close(finished)
