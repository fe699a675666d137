"""CPU engines that record FULL graphs and replay them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.support import cuda_graphs
from vllm_graft.testing import cpu_engine, model_runner
from vllm_graft.testing.engine import set_environment

if TYPE_CHECKING:
    from vllm import LLM


@contextlib.contextmanager
def recorded_engine(model: Any, *, graphs: list[int], **options: Any) -> Iterator[LLM]:
    """A `cpu_engine` on the Triton back end that captures graphs of decodes at these sizes.

    Sizes are numbers of tokens. The graphs are recordings of `tests.support.cuda_graphs`.
    """
    set_environment()
    # It replaces parts of torch when it is imported, and for good: so before any patch of ours.
    import vllm.v1.worker.cpu.shm  # noqa: F401
    from vllm.plugins import load_general_plugins

    # Plugins hook the platform too, once per process: before our patches, which go again.
    load_general_plugins()
    compilation = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": graphs,
        **options.pop("compilation_config", {}),
    }
    options = {"attention": "triton", "enforce_eager": False, **options}
    with contextlib.ExitStack() as patches:
        _patch_platform(patches, graphs)
        patches.enter_context(cuda_graphs.recording())
        with cpu_engine(model, compilation_config=compilation, **options) as llm:
            # CPUWorker warms nothing up; on a GPU the worker makes this call.
            model_runner(llm).capture_model()
            yield llm


def _patch_platform(patches: contextlib.ExitStack, graphs: list[int]) -> None:
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

    stock = CpuPlatform.check_and_update_config

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        stock(vllm_config)
        compilation = vllm_config.compilation_config
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        compilation.cudagraph_capture_sizes = sorted(graphs)
        compilation.max_cudagraph_capture_size = max(graphs)

    pool = cuda_graphs.graph_pool_handle()
    for name, value in {
        "check_and_update_config": classmethod(check_and_update_config),
        "support_static_graph_mode": classmethod(lambda cls: True),
        "graph_pool_handle": lambda self: cuda_graphs.graph_pool_handle(),
        "get_global_graph_pool": lambda self: pool,
    }.items():
        patches.enter_context(mock.patch.object(CpuPlatform, name, value, create=True))
    # Capture locks the workspace, which the worker of a GPU makes and CPUWorker does not.
    init_workspace_manager(torch.device("cpu"))
    patches.callback(reset_workspace_manager)
