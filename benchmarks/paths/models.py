"""The sizes of the layers of three networks, which a worker and a parameter server exchange in each step.

From Krizhevsky and others, "ImageNet Classification with Deep Convolutional Neural Networks" (2012); Simonyan and
Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition" (2014), configuration D; Szegedy and
others, "Rethinking the Inception Architecture for Computer Vision" (2015), with batch normalization that shifts and
does not scale, without the auxiliary classifier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["MODELS"]


def _with_biases(weights: Sequence[tuple[int, int]]) -> list[int]:
    """Elements of the weights and biases of layers, each given by its outputs and the inputs of one output."""
    return [count for outputs, inputs in weights for count in (outputs * inputs, outputs)]


def _alexnet() -> list[int]:
    return _with_biases(
        ((96, 363), (256, 1200), (384, 2304), (384, 1728), (256, 1728), (4096, 9216), (4096, 4096), (1000, 4096))
    )


def _vgg16() -> list[int]:
    outputs = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    convolutions = [(out, 9 * come) for come, out in zip((3, *outputs), outputs, strict=False)]
    return _with_biases((*convolutions, (4096, 25088), (4096, 4096), (1000, 4096)))


_Branch = tuple[tuple[int, int], ...]
"""Convolutions in turn: outputs, and elements of the kernel."""


def _blocks() -> Iterator[tuple[tuple[_Branch, ...], bool]]:
    """The blocks of Inception but for the last two, each with its branches, and whether a pooled copy of its input is
    one more."""
    for pooled in (32, 64, 64):
        yield (((64, 1),), ((48, 1), (64, 25)), ((64, 1), (96, 9), (96, 9)), ((pooled, 1),)), False
    yield (((384, 9),), ((64, 1), (96, 9), (96, 9))), True
    for n in (128, 160, 160, 192):
        yield (
            ((192, 1),), ((n, 1), (n, 7), (192, 7)), ((n, 1), (n, 7), (n, 7), (n, 7), (192, 7)), ((192, 1),)
        ), False  # fmt: skip
    yield (((192, 1), (320, 9)), ((192, 1), (192, 7), (192, 7), (192, 9))), True


def _inception() -> list[int]:
    found: list[int] = []

    def add(come: int, branch: _Branch) -> int:
        for out, kernel in branch:
            found.extend((come * kernel * out, out))
            come = out
        return come

    come = add(3, ((32, 9), (32, 9), (64, 9), (80, 1), (192, 9)))
    for branches, pooled in _blocks():
        come = sum(add(come, branch) for branch in branches) + (come if pooled else 0)
    for _ in range(2):
        add(come, ((320, 1),))
        for first in (((384, 1),), ((448, 1), (384, 9))):
            middle = add(come, first)
            for _pair in range(2):
                add(middle, ((384, 3),))
        add(come, ((192, 1),))
        come = 320 + 4 * 384 + 192
    return [*found, *_with_biases(((1000, come),))]


MODELS: Final[Mapping[str, Sequence[int]]] = {"Inception": _inception(), "AlexNet": _alexnet(), "VGG16": _vgg16()}
"""Elements of each array of the parameters, by network."""
