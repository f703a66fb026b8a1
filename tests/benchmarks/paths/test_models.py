"""The layers add up to the parameters that the networks are known to have."""

from __future__ import annotations

from benchmarks.paths.models import MODELS


def test_totals() -> None:
    assert {name: sum(layers) for name, layers in MODELS.items()} == {
        "Inception": 23_817_352, "AlexNet": 60_965_224, "VGG16": 138_357_544
    }  # fmt: skip


def test_the_number_of_arrays() -> None:
    """Weights and shifts of 94 convolutions, and a last layer; of 8 layers; and of 16."""
    assert {name: len(layers) for name, layers in MODELS.items()} == {"Inception": 190, "AlexNet": 16, "VGG16": 32}
