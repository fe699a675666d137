"""A feature of target models that a family of targets has to serve for a tree to be verified."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Feature:
    """One feature of target models.

    Attributes:
        name: the name in tables and messages, and in a family's ``serves``.
        why: why a tree needs more than a chain does for this feature.
        in_model: takes vLLM's ``ModelConfig`` and returns what the target has, as the words after
            "The target"; empty if it lacks the feature or the configuration doesn't tell.
        in_layer: whether a loaded layer has it.
        or_else: another remedy.
        chain: whether a chain (``topk: 1``) may be drafted, which the target's own layers verify.
        asked: the key of ``graft.tree`` that decides whether there are trees on it, though a family
            serves it; else the target gets a chain. Empty if there is none.
        unasked: whether there are trees on it where that key is not given.
    """

    name: str
    why: str
    in_model: Callable[[Any], str] = lambda _: ""
    in_layer: Callable[[Any], bool] = lambda _: False
    or_else: str = ""
    chain: bool = True
    asked: str = ""
    unasked: bool = False

    def is_asked(self, tree: Any) -> bool:
        """Whether trees on it need not be asked for, or are, by the section ``graft.tree``."""
        given = getattr(tree, self.asked) if self.asked else True
        return self.unasked if given is None else bool(given)


def if_model_has(attribute: str, says: str) -> Callable[[Any], str]:
    """Finds what an attribute of a model's configuration says, as of ``Feature.in_model``."""
    return lambda model: says if getattr(model, attribute) else ""


def not_asked_for(
    features: Iterable[Feature], model: Any, tree: Any
) -> Iterator[tuple[Feature, str]]:
    """The features of a model that need to be asked for and are not, each with its words."""
    for feature in features:
        if not feature.is_asked(tree) and (says := feature.in_model(model)):
            yield feature, says
