"""Tensor sizes of the two networks whose traffic the papers simulate, computed from their architectures.

    architecture (a table of the paper) -> convolutions with batch normalisation, one fully connected layer -> tensors in order

Each convolution has a weight and no bias, its normalisation a scale and an offset, as both networks are trained today. The
multiplications of a layer say what share of the backward pass it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Layer(NamedTuple):
    """One tensor: its name, its elements, and multiplications of a forward pass with it for one picture of 224 by 224."""

    name: str
    elems: int
    multiplications: int


def _conv(name: str, inputs: int, outputs: int, kernel: int, side: int) -> Iterator[Layer]:
    """A convolution whose result is `side` by `side`, and its normalisation."""
    weight = outputs * inputs * kernel**2
    yield Layer(f"{name}.weight", weight, weight * side**2)
    yield Layer(f"{name}.norm.weight", outputs, 0)
    yield Layer(f"{name}.norm.bias", outputs, 0)


def _linear(inputs: int, outputs: int) -> Iterator[Layer]:
    yield Layer("fc.weight", inputs * outputs, inputs * outputs)
    yield Layer("fc.bias", outputs, 0)


def resnet50() -> list[Layer]:
    """He et al. (arXiv 1512.03385), table 1, column "50-layer"; the second convolution of a stage's first block halves the side."""
    layers = list(_conv("stem", 3, 64, 7, 112))
    inputs = 64
    for stage, (blocks, width, side) in enumerate([(3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)]):
        for block in range(blocks):
            name = f"stage{stage + 1}.{block}"
            before = side * 2 if block == 0 and stage > 0 else side
            layers += _conv(f"{name}.reduce", inputs, width, 1, before)
            layers += _conv(f"{name}.spatial", width, width, 3, side)
            layers += _conv(f"{name}.expand", width, 4 * width, 1, side)
            if block == 0:
                layers += _conv(f"{name}.shortcut", inputs, 4 * width, 1, side)
            inputs = 4 * width
    return [*layers, *_linear(inputs, 1000)]


# Szegedy et al. (arXiv 1409.4842), table 1: side, then filters of 1x1, 3x3 after so many 1x1, 5x5 after so many 1x1, behind the pool.
_INCEPTION = {
    "3a": (28, 64, (96, 128), (16, 32), 32),
    "3b": (28, 128, (128, 192), (32, 96), 64),
    "4a": (14, 192, (96, 208), (16, 48), 64),
    "4b": (14, 160, (112, 224), (24, 64), 64),
    "4c": (14, 128, (128, 256), (24, 64), 64),
    "4d": (14, 112, (144, 288), (32, 64), 64),
    "4e": (14, 256, (160, 320), (32, 128), 128),
    "5a": (7, 256, (160, 320), (32, 128), 128),
    "5b": (7, 384, (192, 384), (48, 128), 128),
}


def googlenet() -> list[Layer]:
    """Table 1 of the paper, without the two auxiliary classifiers."""
    layers = [*_conv("1", 3, 64, 7, 112), *_conv("2.reduce", 64, 64, 1, 56), *_conv("2", 64, 192, 3, 56)]
    inputs = 192
    for name, (side, single, (reduce3, triple), (reduce5, quintuple), pooled) in _INCEPTION.items():
        layers += _conv(f"{name}.1x1", inputs, single, 1, side)
        layers += _conv(f"{name}.3x3.reduce", inputs, reduce3, 1, side)
        layers += _conv(f"{name}.3x3", reduce3, triple, 3, side)
        layers += _conv(f"{name}.5x5.reduce", inputs, reduce5, 1, side)
        layers += _conv(f"{name}.5x5", reduce5, quintuple, 5, side)
        layers += _conv(f"{name}.pool", inputs, pooled, 1, side)
        inputs = single + triple + quintuple + pooled
    return [*layers, *_linear(inputs, 1000)]


MODELS = {"resnet50": resnet50, "googlenet": googlenet}
