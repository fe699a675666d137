"""What a part is to everyone else: a name, a section of the configuration, and what it hooks. The
front door goes through all parts and knows none."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_graft.base.decision import Preset
from vllm_graft.base.metric import PartMetrics
from vllm_graft.base.options import Section
from vllm_graft.base.refusal import Refusal, sentences


@dataclass(frozen=True)
class Offer:
    """What a part would run for a preset. `section`: what a user would have written to have it.
    `says`: the values that were filled in, for the log. `speculative`: vLLM's speculative config
    that it needs where the user gave none."""

    section: Section
    says: str
    speculative: Any = None


class Part(Protocol):
    """One part of vllm-graft, with what most parts do.

    ``asked`` below is what :meth:`section` has returned, the part's own configuration. `name`: of
    the part in ``graft_info`` and in the ledger. `asks_for`: what its section asks for, to follow
    "asks for" in a message. `flag`: the full flag of the section."""

    name: str
    asks_for: str
    flag: str
    metrics: PartMetrics

    @property
    def refusals(self) -> Sequence[Refusal]:
        """What the part can't be combined with."""

    def install(self) -> None:
        """Prepare to look at configurations; called in every process, any number of times.

        It imports no module that it hooks, and changes nothing for a configuration without its
        section."""

    def section(self, config: Any, vllm_config: Any) -> Any:
        """The part's section of a configuration; None where the part is not asked for.

        ``config`` is a `vllm_graft.config.GraftConfig`, parsed once for all parts. Raises
        `ConfigError` for a wrong key or value that stands elsewhere."""
        return getattr(config, self.name)

    def automatic(self, preset: Preset, vllm_config: Any) -> Offer | str:
        """What the part would run for a preset, or a sentence that says why it can't.

        The sentence is empty where the part has nothing to do with the model or its draft.
        It is called before vLLM plans its CUDA graphs. What :meth:`refuses` says of the offer need
        not be looked at here."""

    def seams(self, asked: Any, vllm_config: Any) -> Sequence[str]:
        """Rooms of the ledger that it needs, as far as the configuration tells."""
        return "core", self.name

    def fill_in(self, asked: Any, vllm_config: Any) -> None:
        """Set what follows from the section, before vLLM plans its CUDA graphs."""
        return None

    def refuses(self, asked: Any, vllm_config: Any) -> Iterator[str]:
        """A sentence for each thing that rules the part out, with what to do about it.

        ``vllm_config`` is complete, or one that vLLM has derived from it for the draft model."""
        yield from sentences(self.refusals, asked, vllm_config)

    def foresees(self, asked: Any, vllm_config: Any) -> Iterator[str]:
        """A sentence for each thing that a worker would refuse once it has loaded the model.

        Only ``vllm-graft plan`` asks, after :meth:`refuses`. What can't be known so early is left
        out."""
        yield from ()

    def describe(self, asked: Any, vllm_config: Any) -> str:
        """What will run, in one line for the log. Raises `ConfigError` for the name of an entry
        that nobody provides."""

    def verify(self, asked: Any, worker: Any, vllm_config: Any) -> None:
        """Check a worker of vLLM's that has loaded its model. Raises `NotActiveError`, which names
        the part, and what runs in its place."""
        return None
