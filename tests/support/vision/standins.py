"""Stand-ins by which towers and their graphs run on a CPU: recordings, capturable attention."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from tests.support.vision.fake_backend import FakeBackend


@contextlib.contextmanager
def cpu() -> Iterator[None]:
    """Replace CUDA graphs by recorded graphs, and the towers' attention by masked attention."""
    import torch
    from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention

    from tests.support.cuda_graphs import recording

    with contextlib.ExitStack() as patches:
        for name in ("forward_cpu", "forward_native"):
            patches.enter_context(mock.patch.object(MMEncoderAttention, name, attend))
        patches.enter_context(recording())
        # The stock manager names the stream it captures on.
        patches.enter_context(mock.patch.object(torch.cuda, "current_stream", return_value=None))
        from vllm.v1.worker import encoder_cudagraph

        from vllm_graft.graph_runners.vision import runner

        patches.enter_context(
            mock.patch.object(encoder_cudagraph, "current_stream", return_value=None)
        )
        patches.enter_context(mock.patch.object(runner, "make_backend", FakeBackend))
        yield


def attend(
    self: Any,
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens: Any = None,
    max_seqlen: Any = None,
    sequence_lengths: Any = None,
) -> Any:
    """Attend within segments, without reading the segments' lengths on the host."""
    import torch

    shape = query.shape
    query, key, value = (
        t.reshape(shape[0], shape[1], -1, self.head_size).flatten(0, 1).transpose(0, 1)
        for t in (query, key, value)
    )
    if self.num_queries_per_kv > 1:
        key, value = (t.repeat_interleave(self.num_queries_per_kv, dim=0) for t in (key, value))
    rows = torch.arange(shape[0] * shape[1])
    if cu_seqlens is None:
        segment = rows // shape[1]
    else:
        segment = (rows[:, None] >= cu_seqlens[None, :]).sum(dim=1)
    mask = segment[:, None] == segment[None, :]
    scores = (query @ key.transpose(1, 2)) * self.scale
    weights = scores.masked_fill(~mask, -1e30).softmax(dim=-1)
    return (weights @ value).transpose(0, 1).reshape(shape)
