"""The ``nixl`` store: segments whose bytes NIXL moves, by its plugin POSIX.

Source: NVIDIA Inference Xfer Library (NIXL), https://github.com/ai-dynamo/nixl, its Python API and
its plugin POSIX. Files are opened, synced and deleted as by ``segments``, whose format they have.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.config.connector_options import option_flag, parse_options
from vllm_graft.hicache.storage.files import Buffer, Files
from vllm_graft.hicache.storage.segments.segment_options import SegmentsOptions
from vllm_graft.hicache.storage.segments.store import SegmentsBackend

_PLUGIN = "POSIX"
_POLL_SECONDS = 20e-6
_PARAMETERS = {"aio": "use_aio", "posix_aio": "use_posix_aio", "uring": "use_uring"}


class NixlOptions(SegmentsOptions):
    """Keys beside ``"backend": "nixl"``: those of ``segments``, and how NIXL moves bytes."""

    io: Literal["aio", "posix_aio", "uring"] = "aio"
    """The interface to the kernel: Linux AIO, POSIX AIO, or io_uring."""


class NixlFiles(Files):
    """System calls of which NIXL makes those that move bytes.

    Each thread has an agent of its own, as an agent may be used by one thread at a time. A call
    moves one buffer; :meth:`read` and :meth:`write` call again for the next.

    Args:
        io: see :class:`NixlOptions`.
    """

    def __init__(self, io: str) -> None:
        self._io = io
        self._local = threading.local()

    def open_agent(self) -> Any:
        """This thread's agent, with the plugin.

        Raises:
            ImportError: if NIXL is not installed, or not for this machine.
            RuntimeError: if the plugin cannot be used, as where the kernel forbids io_uring.
        """
        found = getattr(self._local, "agent", None)
        if found is None:
            from nixl._api import nixl_agent, nixl_agent_config

            settings = nixl_agent_config(enable_prog_thread=False, backends=[])
            name = f"vllm-graft-{os.getpid()}-{threading.get_ident()}"
            found = nixl_agent(name, settings)
            if _PLUGIN not in found.get_plugin_list():
                raise RuntimeError(f"this NIXL has no plugin {_PLUGIN}")
            found.create_backend(_PLUGIN, {_PARAMETERS[self._io]: "true"})
            self._local.agent = found
        return found

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Fill the first buffer, as far as the file goes: beyond its end NIXL would fail."""
        left = max(0, os.fstat(fd).st_size - offset)
        return self._move("READ", fd, memoryview(buffers[0])[:left], offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write the first buffer."""
        return self._move("WRITE", fd, buffers[0], offset)

    def _move(self, way: str, fd: int, buffer: memoryview, offset: int) -> int:
        """Move one buffer. So when NIXL reports an error, no other is on its way to the memory."""
        if buffer.nbytes:
            try:
                self._transfer(way, fd, buffer, offset)
            except Exception as error:
                # What the plugin has still queued ends with the agent.
                self._local.agent = None
                # NIXL does not tell the kernel's errno.
                raise OSError(errno.EIO, f"NIXL: {type(error).__name__}: {error}") from error
        return buffer.nbytes

    def _transfer(self, way: str, fd: int, buffer: memoryview, offset: int) -> None:
        agent = self.open_agent()
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        local = agent.get_reg_descs([(address, buffer.nbytes, 0, "")], "DRAM")
        remote = agent.get_reg_descs([(offset, buffer.nbytes, fd, "")], "FILE")
        agent.register_memory(local, backends=[_PLUGIN])
        try:
            agent.register_memory(remote, backends=[_PLUGIN])
            try:
                self._finish(way, agent, local.trim(), remote.trim())
            finally:
                agent.deregister_memory(remote, backends=[_PLUGIN])
        finally:
            agent.deregister_memory(local, backends=[_PLUGIN])

    @staticmethod
    def _finish(way: str, agent: Any, local: Any, remote: Any) -> None:
        transfer = agent.initialize_xfer(way, local, remote, agent.name, b"", [_PLUGIN])
        try:
            state = agent.transfer(transfer)
            while state == "PROC":
                # The buffer must stay until NIXL has finished, so there is no deadline.
                time.sleep(_POLL_SECONDS)
                state = agent.check_xfer_state(transfer)
        finally:
            transfer.release()
        if state != "DONE":
            raise RuntimeError(f"the transfer ended in the state {state}")


class NixlBackend(SegmentsBackend):
    """Keeps pages like :class:`SegmentsBackend`; NIXL reads and writes their bytes.

    Args:
        namespace: 16 bytes. They name the directory and are part of every record.
        options: see :class:`NixlOptions`.
        files: the system calls, by default :class:`NixlFiles`.

    Raises:
        ConfigError: if an option is wrong, NIXL is not installed, or its plugin cannot be used.
    """

    OPTIONS: ClassVar[type[SegmentsOptions]] = NixlOptions

    def __init__(
        self, namespace: bytes, options: Mapping[str, Any], files: Files | None = None
    ) -> None:
        if files is None:
            files = _usable_files(parse_options(NixlOptions, options, "storage"))
        super().__init__(namespace, options, files)

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Refuse wrong options, a directory that can't be written to, and a missing NIXL."""
        super().check(options)
        _usable_files(parse_options(NixlOptions, options, "storage"))


def _usable_files(options: NixlOptions) -> NixlFiles:
    """The system calls, once this thread has opened an agent.

    Raises:
        ConfigError: says why NIXL cannot be used, and what to do.
    """
    if importlib.util.find_spec("nixl") is None:
        raise ConfigError(
            f"{option_flag('storage', 'backend')}: 'nixl' needs the package nixl, which is not "
            "installed. Run pip install 'vllm-graft[nixl]', or give 'segments'."
        )
    files = NixlFiles(options.io)
    try:
        files.open_agent()
    except Exception as error:
        raise ConfigError(
            f"{option_flag('storage', 'io')}: NIXL cannot move bytes by {options.io!r} on this "
            f"machine: {type(error).__name__}: {error}. Give another one of "
            f"{', '.join(_PARAMETERS)}, or the backend 'segments'."
        ) from error
    return files
