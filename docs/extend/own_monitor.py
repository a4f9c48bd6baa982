"""A monitor of your own: how much of each normalisation layer's weight has come close to zero."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.monitors import Above, AlarmRule, BaseMonitor
from trimtab.testing import MonitorContract


class DeadScales(BaseMonitor):
    """Watches the share of a normalisation layer's scales that are under a thousandth of the largest one."""

    # The metric is called trimtab/dead_scales/share, and its alarms are a sign of "dead channels".
    name = "dead_scales"
    mechanism = "dead channels"
    alarm_rules: Mapping[str, AlarmRule] = {
        "share": AlarmRule(Above(0.5), "{value:.0%} of the scales of {places} are next to zero: its channels are dead.")
    }

    def __init__(self) -> None:
        self._weights: dict[str, Tensor] = {}

    def start(self, model: nn.Module) -> None:
        """Look at the model once, before the first step."""
        self._weights = {
            name: module.weight
            for name, module in model.named_modules()
            if "norm" in type(module).__name__.lower() and isinstance(getattr(module, "weight", None), nn.Parameter)
        }
        if not self._weights:
            raise ConfigError("model", type(model).__name__, "it has no normalisation layers.", "Watch one that does.")

    @torch.no_grad()
    def observe(self, step: int) -> dict[str, Tensor]:
        """One value a layer. Device work only: nothing here waits for a number."""
        sizes = [weight.detach().abs().float() for weight in self._weights.values()]
        return {"share": torch.stack([(size < 1e-3 * size.max()).float().mean() for size in sizes])}

    def places(self, metric: str) -> Sequence[str]:
        """A name for each value."""
        return list(self._weights)


class TestDeadScales(MonitorContract):
    """The contract: watching changes no bit, nothing is waited for, a resumed run goes on with the same values."""

    def monitor(self) -> DeadScales:
        """Called often, so that each claim has its own."""
        return DeadScales()

    def model(self) -> nn.Module:
        """A model that it can watch."""
        return NormedModel()


class NormedModel(nn.Module):
    """Two blocks with a normalisation before each; ``run_block`` lets the contract put checkpointing in between."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2))
        for parameter in self.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        """One block."""
        return block(x)

    def forward(self, ids: Tensor) -> Tensor:
        """Embeddings, and each block added to what comes in."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + self.run_block(block, x)
        return x
