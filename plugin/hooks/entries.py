"""What a hook returns: entries with a name, and where the object itself is found. An entry is a
light description. Nothing is imported before the configuration has chosen it by name."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_graft.base.errors import EntryError, HookError
from vllm_graft.base.values import reason_of, shown


def _is_address(load: Any) -> bool:
    return isinstance(load, str) and all(load.partition(":"))


@dataclass(frozen=True)
class Entry:
    """One thing that a configuration may choose. `name`: what the configuration says. `load`:
    ``"package.module:attribute"``, or a callable without arguments that returns the object (called
    once per :meth:`resolve`). `summary`: one line for ``vllm-graft hooks``."""

    name: str
    load: str | Callable[[], Any]
    summary: str

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuse an entry that no configuration could name, or that could never be loaded. Raises
        `HookError`, which says what is wrong with it."""
        kind = type(self).__name__
        if not isinstance(self.name, str) or not self.name or not self.name.isprintable():
            raise HookError(f"{kind}: name={shown(self.name)} must be a text that can be printed")
        if not isinstance(self.summary, str):
            raise HookError(f"{kind} {self.name!r}: summary={shown(self.summary)} must be a text")
        if not _is_address(self.load) and not callable(self.load):
            raise HookError(
                f"{kind} {self.name!r}: load={shown(self.load)} must read "
                "'package.module:attribute', or be a callable without arguments"
            )

    def resolve(self) -> Any:
        """Import and return the object. Raises `EntryError` if it cannot be had, for whatever
        reason, an exit of the interpreter included."""
        return self._loaded(self.load)

    def _loaded(self, load: str | Callable[[], Any]) -> Any:
        try:
            if callable(load):
                return load()
            module, _, attribute = load.partition(":")
            return getattr(importlib.import_module(module), attribute)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise EntryError(
                f"{type(self).__name__} {self.name!r} cannot be loaded from {shown(load)}: "
                f"{reason_of(error)}"
            ) from error


@dataclass(frozen=True)
class Drafter(Entry):
    """Resolves to a class that drafts trees, built with the arguments of ``speculator``.

    It is a subclass of ``TreeDrafting`` and of the speculator of vLLM's that it stands over.

    Attributes:
        methods: methods of the speculative config that it drafts with.
        speculator: the class of vLLM's that would draft with them, as ``"module:Class"``.
        architectures: the drafts' architectures that it is for; none means all those that no other
            drafter for the method names.
        block: whether the draft drafts all depths in one pass, as ``parallel_drafting`` says.
        has_model: whether there is a draft model. N-grams have none.
        unmeasured: whether nobody has timed its trees on a GPU; presets then leave them off.
    """

    methods: tuple[str, ...] = ()
    speculator: str = "vllm.v1.worker.gpu.spec_decode.eagle.speculator:EagleSpeculator"
    architectures: tuple[str, ...] = ()
    block: bool = False
    has_model: bool = True
    unmeasured: bool = False


@dataclass(frozen=True)
class TargetFamily(Entry):
    """Resolves to a class, without arguments, like `TargetFamily` of ``vllm_graft.api``.

    Attributes:
        serves: names of the features of targets (`Feature`) that it serves beside plain attention.
        refusals: where its rows of what trees on it cannot be combined with are, some of
            `vllm_graft.base.refusal.Refusal`, as ``"package.module:attribute"``; empty for none.
        seams: where its rows of the ledger are, a tuple of `vllm_graft.seams.ledger.entry.Seam`,
            likewise. They are compared with the installed vLLM before it serves a layer. Families
            of ours have theirs in the ledger.
    """

    serves: tuple[str, ...] = ()
    refusals: str = ""
    seams: str = ""

    def check(self) -> None:
        super().check()
        for name in ("refusals", "seams"):
            if (load := getattr(self, name)) and not _is_address(load):
                raise HookError(
                    f"TargetFamily {self.name!r}: {name}={shown(load)} must read "
                    "'package.module:attribute'"
                )

    def own_refusals(self) -> tuple[Any, ...]:
        """Import and return the rows of `refusals`; an EntryError if they cannot be had."""
        return tuple(self._loaded(self.refusals)) if self.refusals else ()

    def own_seams(self) -> tuple[Any, ...]:
        """Import and return the rows of `seams`, likewise."""
        return tuple(self._loaded(self.seams)) if self.seams else ()


class TreePolicy(Entry):
    """Resolves to a callable ``(TreeConfig, num_nodes) -> TreeShape``, asked once an engine."""


class DraftGraphRunner(Entry):
    """Resolves to a subclass of ``vllm_graft.graph_runners.language.draft.DraftGraphRunner``. Built
    as ``(vllm_config, device, cudagraph_mode, topk)``; for a chain topk is 1."""


class VitGraphRunner(Entry):
    """Resolves to the class that captures and replays a vision encoder."""


class VisionAdapter(Entry):
    """Resolves to the class that splits one vision model for capture; named by architecture."""


class KVConnector(Entry):
    """Resolves to a subclass of vLLM's ``KVConnectorBase_V1``, which may stand beside trees."""


class StorageBackend(Entry):
    """Resolves to the class that stores pages below host memory."""


class EvictionPolicy(Entry):
    """Resolves to the class that picks the host page to evict."""


@dataclass(frozen=True)
class Health:
    """What a health check found: ``detail`` says what to do where ``ok`` is False."""

    ok: bool
    detail: str


class HealthCheck(Entry):
    """Resolves to a callable without arguments that returns a :class:`Health`."""
