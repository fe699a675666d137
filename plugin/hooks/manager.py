"""The plugin manager: who implements which hook, and choosing an entry by name. Each process builds
its own on first use, and discovers the installed plugins again."""

import contextlib
import functools
import importlib.metadata
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

import pluggy

from vllm_graft.base.errors import EntryError, HookError
from vllm_graft.base.log import info_once, logger
from vllm_graft.base.options import Section, did_you_mean, flag
from vllm_graft.base.values import reason_of, shown
from vllm_graft.base.version import __version__
from vllm_graft.hooks import builtin, entries, hookspecs

GROUP = "vllm_graft"

COLLECTED: dict[str, type[entries.Entry]] = {
    name: get_args(get_type_hints(spec)["return"])[0]
    for name, spec in vars(hookspecs).items()
    if name.startswith("graft_") and name != "graft_configure"
}
"""Hooks that collect entries, and the type each must return."""


@dataclass(frozen=True)
class Provider:
    """A distribution's plugin; the entry point's name is unique within the distribution."""

    dist: str
    version: str
    plugin: str

    def __str__(self) -> str:
        return f"{self.dist} {self.version}"


read_configuration: Callable[[Any], Section | None] | None = None
"""Reads all of our configuration out of vLLM's; the front door, which knows it, sets this."""

OURS = Provider("vllm-graft", __version__, "builtin")


@dataclass(frozen=True)
class Offer:
    """An entry, and who provides it."""

    entry: entries.Entry
    provider: Provider


class Manager:
    """Loads the plugins of the entry-point group ``vllm_graft`` and collects their entries. A third
    party that fails in any way (import, registration, a hook; an exit of the interpreter too) is
    set aside, named in one warning and kept in :attr:`broken`; everyone else goes on."""

    def __init__(self, entry_points: Iterable[importlib.metadata.EntryPoint] = ()) -> None:
        self.providers: list[Provider] = []
        self.broken: dict[Provider, str] = {}
        self._plugins: dict[Provider, object] = {}
        self._hooks: dict[Provider, pluggy.HookRelay] = {}
        self._configured: set[Section] = set()
        self._register(OURS, builtin)
        for entry_point in entry_points:
            self._load(entry_point)

    @property
    def third_parties(self) -> list[Provider]:
        """Providers other than ourselves that work."""
        return [provider for provider in self.providers if provider != OURS]

    def configure(self, config: Section) -> None:
        """Tell every plugin the configuration; again with an equal one does nothing."""
        if config in self._configured:
            return
        self._configured.add(config)
        for provider in list(self.providers):
            with self._guard(provider):
                self._hooks[provider].graft_configure(config=config)

    def tell(self, vllm_config: Any) -> None:
        """Tell every plugin the configuration of an engine, in a process that only has that."""
        if read_configuration is not None and (config := read_configuration(vllm_config)):
            self.configure(config)

    def offers(self, hook: str) -> list[Offer]:
        """Every entry of ``hook``: third parties in order of discovery, then ours."""
        found: list[Offer] = []
        for provider in [*self.third_parties, OURS]:
            with self._guard(provider):
                found += [Offer(entry, provider) for entry in self._entries(hook, provider)]
        return found

    def choose(self, hook: str, name: str, path: str) -> Offer:
        """The entry called ``name``; a third party's wins over ours. ``path`` is its full flag.
        Raises `EntryError` if nobody, or more than one third party, offers ``name``."""
        offers = self.offers(hook)
        matching = [offer for offer in offers if offer.entry.name == name]
        if not matching:
            raise EntryError(
                f"{path}: no {hook} entry is called {shown(name)}."
                f"{did_you_mean(name, {offer.entry.name for offer in offers})}{self._excuse()}"
            )
        theirs = [offer for offer in matching if offer.provider != OURS]
        if len(theirs) > 1:
            names = " and ".join(str(offer.provider) for offer in theirs)
            raise EntryError(
                f"{path}: {names} both provide {name!r} for {hook}; uninstall one of them."
            )
        if theirs and len(matching) > 1:
            info_once(f"{path}={name}: {theirs[0].provider} replaces vllm-graft's own entry")
        return matching[0]

    def _excuse(self) -> str:
        if not self.broken:
            return ""
        return " Not loaded: " + "; ".join(f"{who} ({why})" for who, why in self.broken.items())

    def _entries(self, hook: str, provider: Provider) -> list[entries.Entry]:
        results = getattr(self._hooks[provider], hook)()
        found = [entry for result in results for entry in result]
        for entry in found:
            if not isinstance(entry, COLLECTED[hook]):
                wanted = COLLECTED[hook].__name__
                raise HookError(f"{hook} must return {wanted}, got {shown(entry)}")
            entry.check()
        names = [entry.name for entry in found]
        if len(set(names)) < len(names):
            raise HookError(f"{hook} returned a name twice: {', '.join(names)}")
        return found

    @contextlib.contextmanager
    def _guard(self, provider: Provider) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            raise
        # SystemExit as well: a broken plugin must not end a process that may not even need it.
        except BaseException as error:
            if provider == OURS:
                raise
            self._set_aside(provider, error)

    def _load(self, entry_point: importlib.metadata.EntryPoint) -> None:
        provider = self._provider(entry_point)
        with self._guard(provider):
            self._register(provider, entry_point.load())

    def _provider(self, entry_point: importlib.metadata.EntryPoint) -> Provider:
        dist = entry_point.dist
        name, version = (dist.name, dist.version) if dist else (None, None)
        provider = Provider(name or "unknown distribution", version or "?", entry_point.name)
        known = {*self.providers, *self.broken}
        numbers = itertools.count(2)
        while provider in known:
            provider = replace(provider, plugin=f"{entry_point.name} #{next(numbers)}")
        return provider

    def _register(self, provider: Provider, plugin: object) -> None:
        if any(plugin is other for other in self._plugins.values()):
            raise HookError("it is an object that another entry point has registered")
        # Its own manager, so that no plugin meets another one.
        own = pluggy.PluginManager(GROUP)
        own.add_hookspecs(hookspecs)
        own.register(plugin, name=f"{provider.dist}:{provider.plugin}")
        # An implementation of a hook that does not exist is otherwise silent.
        own.check_pending()
        self._plugins[provider], self._hooks[provider] = plugin, own.hook
        self.providers.append(provider)

    def _set_aside(self, provider: Provider, error: BaseException) -> None:
        self.broken[provider] = reason_of(error)
        if provider in self.providers:
            self.providers.remove(provider)
        self._plugins.pop(provider, None)
        self._hooks.pop(provider, None)
        told = "third-party plugin %s (%s) is set aside: %s"
        logger.warning(told, provider, provider.plugin, self.broken[provider])


@functools.cache
def manager() -> Manager:
    """This process's manager, with every installed plugin."""
    return Manager(importlib.metadata.entry_points(group=GROUP))


def resolve(hook: str, name: str, *path: str) -> Any:
    """The object of the entry that the configuration names at a path, as ``"tree", "policy"``; see
    :meth:`Manager.choose` for its errors."""
    return manager().choose(hook, name, flag(*path)).entry.resolve()
