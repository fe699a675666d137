"""Processes of an engine on a CPU in less time; with `-m`, this module is the program `vllm`."""

import os


def save_time() -> None:
    """Let processes have quick kernels, begin with what this one has imported, and wait in peace.

    vLLM's platform of a CPU spawns them, with eight seconds of imports each; that of a GPU forks.
    While one of them computes, the others would spin on its core.
    """
    from vllm.distributed.device_communicators import cpu_communicator, shm_broadcast
    from vllm.utils import system_utils

    from tests.support.engines.quick_kernels import quicken

    quicken()
    fork = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    system_utils._maybe_force_spawn = lambda: os.environ.update(fork)
    shm_broadcast.SpinCondition.__init__.__defaults__ = (0.02,)
    communicator = cpu_communicator.CpuCommunicator
    communicator._all_group_ranks_share_shm_group_name = lambda self: False


if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    save_time()
    main()
