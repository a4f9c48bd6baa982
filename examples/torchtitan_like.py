"""A loop in the style of torchtitan: build, parallelize, train. Runs in seconds on a CPU.

    python examples/torchtitan_like.py [--compile]
    torchrun --standalone --nproc-per-node 2 examples/torchtitan_like.py

Under torchrun each block is sharded by FSDP2 (gloo on CPUs, nccl on GPUs), and every rank draws text of its own.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812

import trimtab


class Block(nn.Module):
    """Attention and an MLP, each behind a normalisation."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, tokens, dim) in and out."""
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, dim: int = 64, num_layers: int = 2, num_heads: int = 4, vocabulary: int = 256) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleDict({str(i): Block(dim, num_heads) for i in range(num_layers)})
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits; shape (batch, tokens, vocabulary)."""
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


def build_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return Transformer().to(device)


def parallelize(model: nn.Module, mesh: DeviceMesh | None, compile_blocks: bool) -> nn.Module:
    """Compile and shard in place, block by block; the blocks share one graph."""
    for block in model.layers.values():
        if compile_blocks:
            block.compile(fullgraph=True)
        if mesh is not None:
            fully_shard(block, mesh=mesh)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model


def build_optimizers(
    model: nn.Module, num_steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (0.1 * num_steps)))
    return optimizer, warmup


def build_guard(model: nn.Module, num_steps: int) -> trimtab.Guard:
    """After sharding, so that norms are those of whole tensors; before the first forward, which compiles."""
    return trimtab.attach(
        model,
        trimtab.precision.SavedActivations(low_bits=4, high_bits=8),
        policy=trimtab.control.robust(warmup_steps=num_steps // 10, max_active=4),
        record="runs/torchtitan-like",
    )


def train_step(
    model: nn.Module, micro_batches: list[Tensor], guard: trimtab.Guard, optimizer: torch.optim.Optimizer
) -> Tensor:
    """One optimizer step; the mean loss of its micro-batches, which is not waited for."""
    losses = []
    for batch in micro_batches:
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / len(micro_batches)
        loss.backward()
        losses.append(loss.detach())
    total = torch.stack(losses).sum()
    guard.observe(loss=total)  # the model returns logits, so the record is told the loss
    guard.step(max_norm=1.0)  # in place of clip_grad_norm_: norms, decision for the next step, clipping
    optimizer.step()
    optimizer.zero_grad()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--compile", action="store_true", help="torch.compile for each block")
    options = parser.parse_args()

    mesh, rank = None, 0
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if "RANK" in os.environ:  # started by torchrun
        mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))
        rank = mesh.get_rank()
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)

    model = parallelize(build_model(device), mesh, options.compile)
    optimizer, scheduler = build_optimizers(model, options.steps)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long().to(device)
    generator = torch.Generator().manual_seed(rank)
    with build_guard(model, options.steps) as guard:
        for step in range(1, options.steps + 1):
            starts = torch.randint(len(text) - 33, (2, 4), generator=generator).tolist()
            micro_batches = [torch.stack([text[s : s + 33] for s in some]) for some in starts]
            loss = train_step(model, micro_batches, guard, optimizer)
            scheduler.step()
            if step % 20 == 0 and rank == 0:
                print(
                    f"step {step}: loss {loss.item():.3f}, on the recovery path: {', '.join(guard.active) or 'nothing'}"
                )
    if rank == 0:
        print("Look at it with: trimtab runs runs/torchtitan-like")
    if mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
