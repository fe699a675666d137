"""Features of target models that a family has to serve for a tree to be verified.

The frontend looks for each in the model's configuration, the worker in the loaded layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from vllm_graft.hooks.feature import Feature, if_model_has
from vllm_graft.spec_decode.targets.dense.dense_features import DENSE
from vllm_graft.spec_decode.targets.latent.latent_features import LATENT
from vllm_graft.spec_decode.targets.recurrent.recurrent_features import RECURRENT

FEATURES: tuple[Feature, ...] = (
    *RECURRENT,
    *LATENT,
    Feature(
        "an encoder and a decoder",
        "Nobody has tried cross attention with trees.",
        in_model=if_model_has("is_encoder_decoder", "is an encoder-decoder"),
        chain=False,
    ),
    *DENSE,
)


def unserved_in_model(model: Any, served: Collection[str]) -> Iterator[tuple[Feature, str]]:
    """The features of a model that are not served, each with the words of ``Feature.in_model``."""
    for feature in FEATURES:
        if feature.name not in served and (says := feature.in_model(model)):
            yield feature, says


def in_layer(layer: Any) -> list[str]:
    """Names of the features that a loaded layer has."""
    if not hasattr(layer, "impl"):
        return []  # A recurrent layer, whose kind its family knows.
    return [feature.name for feature in FEATURES if feature.in_layer(layer)]
