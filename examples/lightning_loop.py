"""One callback in lightning's Trainer, which keeps its own clipping. Runs in a few seconds on a CPU."""

from pathlib import Path

import lightning.pytorch as pl
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trimtab.integrations.lightning import TrimtabCallback
from trimtab.precision import SavedActivations


class LanguageModel(pl.LightningModule):
    """A LLaMA of two layers."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Predict the next byte."""
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, in the model's order of parameters, so that one pass serves norms and clipping."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


torch.manual_seed(0)
text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
loader = torch.utils.data.DataLoader(text.unfold(0, 32, 3), batch_size=8, shuffle=True)
trainer = pl.Trainer(
    accelerator="cpu",
    devices=1,
    max_steps=200,
    gradient_clip_val=1.0,
    log_every_n_steps=50,
    logger=pl.loggers.CSVLogger("runs", name="lightning-loop", version="logs"),
    callbacks=[TrimtabCallback(SavedActivations(4, 8), record="runs/lightning-loop", log_metrics=True)],
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(LanguageModel(), loader)
print("Look at it with: trimtab runs runs/lightning-loop")
