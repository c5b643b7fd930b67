"""A small transformer that trains on a GPU, for `benchmarks.cuda`: how much of its speed is left while it is saved?"""

from __future__ import annotations

import time
from concurrent.futures import Future

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional as F

import holdfast.torch as ht

WIDTH, HEADS, LAYERS, WORDS, LENGTH, BATCH = 1024, 16, 12, 16_384, 1024, 64
EVERY = 20
"""Steps between two saves."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def run_loop(how: str, path: str, steps: int) -> float:
    """Seconds for so many steps, saving as `how` says: never, with Holdfast, or with DCP. The last save is waited for outside."""
    torch.manual_seed(0)
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(WORDS, (BATCH, LENGTH + 1), device="cuda")
    pending: ht.SaveHandle | Future[object] | None = None

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            out = model(tokens[:, :-1])
            loss = F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}

    def save() -> None:
        nonlocal pending
        if how == "holdfast":
            pending = ht.async_save_sharded(path, state(), overwrite=True, durable=False)
        elif how == "dcp.async_save":
            if pending is not None:
                pending.result()
            pending = dcp.async_save(state(), checkpoint_id=path + ".peer")

    for _ in range(5):
        step()
    save()  # buffers of either side are made before the clock starts
    _finish(pending)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for number in range(1, steps + 1):
        step()
        if number % EVERY == 0:
            save()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    _finish(pending)
    return seconds


def _finish(pending: ht.SaveHandle | Future[object] | None) -> None:
    if isinstance(pending, Future):
        pending.result()
    elif pending is not None:
        pending.wait()
