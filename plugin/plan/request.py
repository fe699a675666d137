"""Flags of ``vllm serve``, read by vLLM's own parser."""

import json
import operator
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self
from unittest import mock

from vllm_graft.base.options import FLAG, KEY

PRESET = "auto"
"""What is planned where the flags ask for none of our parts."""

_OPTION = FLAG.removesuffix(f".{KEY}")


@dataclass(frozen=True)
class Request:
    """What ``vllm serve`` would be given. `engine`: vLLM's ``AsyncEngineArgs``. `arguments`: what
    follows ``vllm serve``, with the preset that was added, if any. `chat_template`: a file or a
    text, if one is given."""

    engine: Any
    arguments: tuple[str, ...]
    chat_template: str | None = None

    @classmethod
    def parse(cls, arguments: Sequence[str], *, preset: bool = True) -> Self:
        """Read the flags as ``vllm serve`` does; with `preset`, ask for it without a part of ours.
        Raises `SystemExit`, status 2, for flags that vLLM's parser doesn't know; it says why."""
        from vllm.engine.arg_utils import AsyncEngineArgs

        read = _parsed(arguments)
        if read.model_tag is not None:
            read.model = read.model_tag
        engine = AsyncEngineArgs.from_cli_args(read)
        added = _added(engine, arguments) if preset else ()
        if added:
            engine.additional_config = {**(engine.additional_config or {}), KEY: PRESET}
        return cls(engine, (*arguments, *added), read.chat_template)

    @property
    def command(self) -> str:
        """The command that serves it, for a shell."""
        return shlex.join(["vllm", "serve", *self.arguments])

    def has(self, flag: str) -> bool:
        return any(each.replace("_", "-").partition("=")[0] == flag for each in self.arguments)

    def adding(self, *flags: str) -> Self:
        return self.parse([*self.arguments, *flags])

    def create(self) -> Any:
        """Build vLLM's whole configuration, as the server's frontend does, from files alone. Raises
        `GraftError` if a part of ours refuses it, and whatever vLLM refuses it with."""
        from vllm.usage.usage_lib import UsageContext

        return self.engine.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def _parsed(arguments: Sequence[str]) -> Any:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    serve = ServeSubcommand()
    parser = FlexibleArgumentParser(prog="vllm")
    serve.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    read = parser.parse_args([serve.name, *arguments])
    serve.validate(read)
    return read


def _added(engine: Any, arguments: Sequence[str]) -> tuple[str, ...]:
    """Flags that ask for the preset; none where `graft` is asked for already. The host cache is
    asked for elsewhere, and says nothing about the other parts."""
    additional = engine.additional_config
    if isinstance(additional, Mapping) and KEY in additional:
        return ()
    # vLLM puts dotted flags together and lets them win over a flag with the whole mapping.
    dotted = any(each.replace("_", "-").startswith(f"{_OPTION}.") for each in arguments)
    if dotted or not additional:
        return FLAG, PRESET
    return _OPTION, json.dumps({**additional, KEY: PRESET})


def inspecting() -> AbstractContextManager[Any]:
    """Let this process inspect classes, which then may no longer fork. A child process per class
    takes many seconds, and would not know of a GPU that is pretended."""
    from vllm.model_executor.models import registry

    return mock.patch.object(registry, "_run_in_subprocess", operator.call)
