"""A byte-level GPT on the source text of Python's standard library: real text that is on every machine.

    rankwise run examples/04_gpt.py

Stop it with Ctrl-C, or kill it: the same command resumes.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import rankwise
from rankwise.actions import Log

CONTEXT = 128  # bytes that the model sees


class Text:
    """Windows of CONTEXT + 1 bytes, one after the other: inputs are all bytes but the last, targets all but the first."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.window = torch.arange(CONTEXT + 1)

    def __len__(self) -> int:
        return (len(self.data) - 1) // CONTEXT

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        windows = self.data[torch.tensor(indices)[:, None] * CONTEXT + self.window].long()
        return windows[:, :-1], windows[:, 1:]


def standard_library() -> tuple[Text, Text]:
    """All modules, in the order of their names; the last 64 KiB are for validation."""
    folder = Path(sysconfig.get_path("stdlib"))
    modules = [p for p in sorted(folder.rglob("*.py")) if not {"site-packages", "dist-packages", "test"} & set(p.parts)]
    data = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in modules)), dtype=torch.uint8)
    split = len(data) - 64 * 1024
    return Text(data[:split]), Text(data[split:])


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Takes bytes, and returns scores for the next byte."""

    def __init__(self, width: int = 128, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.token.weight
        for table in (self.token, self.place):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def step(model, batch):
    """The loss summed over all bytes, and the number of bytes."""
    inputs, targets = batch
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    return loss, targets.numel()


@torch.no_grad()
def sample(model: nn.Module, prompt: str, length: int) -> str:
    tokens = torch.tensor([list(prompt.encode())], device=next(model.parameters()).device)
    model.eval()
    for _ in range(length):
        scores = model(tokens[:, -CONTEXT:])[0, -1]
        tokens = torch.cat([tokens, torch.multinomial(scores.softmax(0), 1)[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--steps", type=int, default=800, help="optimizer steps in all")
    options.add_argument("--batch", type=int, default=32, help="windows in a global batch")
    options.add_argument(
        "--local-rank", "--local_rank", help=argparse.SUPPRESS
    )  # torch.distributed.launch passes it; not needed
    args = options.parse_args()

    torch.manual_seed(0)
    train_data, eval_data = standard_library()
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    warm_up = 40
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: (s + 1) / warm_up if s < warm_up else 0.1 + 0.45 * (1 + math.cos(math.pi * min(s / args.steps, 1))),
    )
    trainer = rankwise.Trainer(
        model,
        optimizer,
        step,
        train_data,
        evaluate=rankwise.Evaluate(eval_data, every_steps=150),
        scheduler=schedule,
        global_batch_size=args.batch,
        max_steps=args.steps,
        clip_norm=1.0,
        actions=[Log(every_steps=10)],
        checkpoints=rankwise.Checkpoints(every_s=20),
    )
    trainer.fit()
    if trainer.world.is_main:
        print("--- a sample ---")
        print(sample(model, "class Parser:\n    def __init__(self, ", 300))


if __name__ == "__main__":
    main()
