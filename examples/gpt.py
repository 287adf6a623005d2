"""A small decoder-only transformer over bytes, and the text it learns: the Python standard library's own sources.

The text is on every machine that can run this, so nothing is downloaded. Everything here is a pure function of its
arguments and a seed: two runs with one seed see the same batches, whatever backend moves their gradients.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # byte level: every file is a sequence of tokens as it is


@dataclass(frozen=True)
class ModelSize:
    """Shape of the network; the default has about 0.8 million parameters (3.3 MB of float32 gradients)."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a layer norm and a residual connection. `[b, t, width]`."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width, bias=False)
        self.project = nn.Linear(size.width, size.width, bias=False)
        self.norm_mlp = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.query_key_value(self.norm_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm_mlp(x))


class Gpt(nn.Module):
    """Bytes in `[b, t] int64`, logits of the next byte out `[b, t, 256] float32`."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.norm(self.blocks(self.token(tokens) + self.position(positions)))
        return hidden @ self.token.weight.T  # the output layer shares the embedding's weights


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)  # GPT-2's choice
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


@dataclass(frozen=True)
class Corpus:
    """Bytes of the training and of the validation files, each `[n] uint8`."""

    train: Tensor
    validation: Tensor

    @staticmethod
    def of_standard_library() -> Corpus:
        """Reads the interpreter's library (not its tests) in the order of the files' names; a tenth is for validation.

        Raises:
            FileNotFoundError: this Python has no library sources on disk (a frozen or zipped installation).
        """
        root = Path(sysconfig.get_path("stdlib"))
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        for name in _sources(root):
            parts[_is_validation(name)].append((root / name).read_bytes())
        if not parts[0] or not parts[1]:
            raise FileNotFoundError(f"no Python sources to learn from under {root}")
        train, validation = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
        return Corpus(train, validation)


# Installed packages and tests differ from machine to machine, as some distributions leave tests out.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def _sources(root: Path) -> list[str]:
    """Names of the files, in order. What is skipped is not walked through either: there may be ten times as many files."""
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        names += [(Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return sorted(names)


def _is_validation(name: str) -> bool:
    """A file's side depends on its name alone, so adding a file never moves another one across."""
    return hashlib.sha256(name.encode()).digest()[0] < 26  # 26 of 256: a tenth


def batch_at(text: Tensor, size: ModelSize, batch: int, *key: int) -> tuple[Tensor, Tensor]:
    """Draws `batch` windows of the text; the same key (seed, step, rank) always gives the same windows.

    Nothing is remembered from one batch to the next, so a resumed run needs no data loader state.

    Returns:
        Inputs and targets (inputs moved by one byte), both `[batch, context] int64`.
    """
    mixed = hashlib.sha256(repr(key).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(mixed[:8], "little") >> 1)
    starts = torch.randint(len(text) - size.context - 1, (batch,), generator=generator)
    windows = torch.stack([text[s : s + size.context + 1] for s in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next byte, in nats; scalar float32."""
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
