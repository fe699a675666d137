"""Grafts of trees onto layers with a delta rule (GDN of Qwen3-Next and Qwen3.5, KDA of Kimi Linear)
and onto layers of Mamba-2 (Nemotron-H, Falcon-H1, Granite 4.0-H)."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import (
    Decay,
    DeltaGates,
    KeyDecays,
    RecurrentRows,
    SelectiveGates,
)
from vllm_graft.spec_decode.targets.recurrent.recurrent_layer import (
    Batch,
    Parted,
    TreeRecurrence,
    keep_inputs,
    metadata_of,
    told,
)

Tensors = dict[str, torch.Tensor]
"""What a layer hands its pass, by the names of the pass's parameters."""

_OUT = "core_attn_out"

_OF_VERIFIED = (
    "spec_query_start_loc", "spec_state_indices_tensor", "spec_sequence_masks",
    "spec_sequence_masks_cpu", "spec_token_indx", "non_spec_token_indx", "num_accepted_tokens",
    "uniform_spec_sequence_length",
)  # fmt: skip
"""Fields of vLLM's metadata that are None where nothing is verified."""


@dataclass
class DeltaTrees(TreeRecurrence):
    """In place of the pass of a layer whose metadata are those of GDN."""

    BATCHED: ClassVar[frozenset[str]] = frozenset()
    """Parameters of the pass with an axis of length 1 before that of the rows."""

    ZEROED: ClassVar[bool] = True
    """Whether vLLM hands over zeros to be filled."""

    def compute(self, out: torch.Tensor, given: Tensors) -> None:
        """Compute a batch into `out`; `given` are the other arguments of the pass."""
        metadata = metadata_of(self.layer)
        if metadata is None or metadata.spec_sequence_masks is None:
            # A run without attention, or prompts alone.
            self.stock(**given, core_attn_out=out)
            return
        part = self.context.once(metadata, self._part)
        rows = {name: each[0] if name in self.BATCHED else each for name, each in given.items()}
        out = out[0] if _OUT in self.BATCHED else out
        if not self.ZEROED:
            # Rows of no request, such as a graph's padding, must not be NaN.
            out.zero_()
        if part.others is None:
            used = metadata.num_actual_tokens
            self._verify({name: each[:used] for name, each in rows.items()}, part, out[:used])
            found = self.finished(out, rows)
            if found is not out:
                out.copy_(found)
            return
        trees, others = metadata.spec_token_indx, metadata.non_spec_token_indx
        own = {name: each.index_select(0, trees) for name, each in rows.items()}
        found = out.new_zeros(len(trees), *out.shape[1:])
        self._verify(own, part, found)
        out.index_copy_(0, trees, self.finished(found, own))
        found = out.new_zeros(len(others), *out.shape[1:])
        rest = {name: each.index_select(0, others) for name, each in rows.items()} | {_OUT: found}
        rest |= {name: rest[name][None] for name in self.BATCHED}
        with told(self.layer, part.others):
            self.stock(**rest)
        out.index_copy_(0, others, found)

    def finished(self, found: torch.Tensor, given: Tensors) -> torch.Tensor:
        """What the pass makes of the recurrence's result; `found` itself if nothing."""
        return found

    def _verify(self, given: Tensors, part: Parted, out: torch.Tensor) -> None:
        raise NotImplementedError

    def _part(self, metadata: Any) -> Parted:
        part = parted(metadata, self.context.rows.row_parents)
        leads = part.others is None
        batch = Batch(
            rows=metadata.num_spec_decode_tokens,
            requests=metadata.num_spec_decodes,
            most=metadata.uniform_spec_sequence_length or part.rows.columns.shape[1],
            padded=metadata.num_actual_tokens if leads else 0,
        )
        places = None if leads else metadata.spec_token_indx
        return part._replace(max_rows=keep_inputs(batch, part.rows, places, self.context))


def parted(metadata: Any, parents: torch.Tensor) -> Parted:
    """Where trees are in a batch with verified requests, by host values alone. `metadata` is vLLM's
    ``GDNAttentionMetadata``, `parents` i32 ``[max_tokens]``, the row that each row continues."""
    count = metadata.num_spec_decodes
    columns, starts = metadata.spec_state_indices_tensor, metadata.spec_query_start_loc
    accepted = metadata.num_accepted_tokens
    if not metadata.num_prefills and not metadata.num_decodes:
        # A graph holds this form: rows are in the batch's order, padding is behind them.
        return Parted(RecurrentRows(parents, starts, columns, accepted, count), None)
    own = parents.index_select(0, metadata.spec_token_indx)
    others = dataclasses.replace(
        metadata,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=metadata.num_prefill_tokens + metadata.num_decode_tokens,
        **dict.fromkeys(_OF_VERIFIED),
    )
    return Parted(RecurrentRows(own, starts, columns, accepted, count), others)


@dataclass
class TreeDeltaRule(DeltaTrees):
    """In place of ``_forward_core`` of a layer with the gated delta rule (GDN)."""

    PASS = "_forward_core"
    DECAY = Decay.SCALAR

    def __call__(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """Compute a batch into `core_attn_out` ``[num_tokens, value_heads, V]``, which holds zeros.
        `mixed_qkv`: ``[num_tokens, dim]``, queries, keys and values before the convolution. `b`:
        ``[num_tokens, value_heads]``, betas before the sigmoid. `a`: ``[num_tokens, value_heads]``,
        decays before the softplus."""
        self.compute(core_attn_out, {"mixed_qkv": mixed_qkv, "b": b, "a": a})

    def _verify(self, given: Tensors, part: Parted, out: torch.Tensor) -> None:
        gates = DeltaGates(given["a"], given["b"], self.layer.A_log, self.layer.dt_bias)
        self.recur(given["mixed_qkv"], gates, part, out)

    @property
    def groups(self) -> int:
        return int(self.layer.num_k_heads // self.layer.tp_size)

    @classmethod
    def prepare(cls, name: str, layer: Any) -> None:
        """Refuse other kernels than CUDA's."""
        method = layer._forward_method.__name__
        if method != "forward_cuda":
            raise ConfigError(
                f"--additional-config.graft.tree needs vLLM's kernels for NVIDIA GPUs for the "
                f"recurrent layer {name}, but this platform computes it by {method}: set "
                f"--additional-config.graft.tree.topk to 1 for a chain"
            )
        # One kernel of vLLM's computes convolved rows of chains together with the norm behind them.
        layer.gdn_decode_kernel = "triton"


@dataclass
class TreeKeyDecays(DeltaTrees):
    """In place of ``_forward`` of a layer with Kimi Delta Attention (KDA), a norm included."""

    PASS = "_forward"
    DECAY = Decay.BY_KEY
    SEAMS = ("recurrent", "kimi")
    BATCHED = frozenset({"g1", "beta", _OUT})
    ZEROED = False

    def __call__(
        self,
        mixed_qkv: torch.Tensor,
        g1: torch.Tensor,
        g2: torch.Tensor,
        beta: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """Compute a batch into `core_attn_out` ``[1, num_tokens, heads, V]``.

        Args:
            mixed_qkv: ``[num_tokens, dim]``, queries, keys and values before the convolution.
            g1: ``[1, num_tokens, heads, K]``, decays before the activation.
            g2: ``[num_tokens, heads, V]``, the norm's gate.
            beta: ``[1, num_tokens, heads]``, betas before the sigmoid.
        """
        given = {"mixed_qkv": mixed_qkv, "g1": g1, "g2": g2, "beta": beta}
        self.compute(core_attn_out, given)

    def finished(self, found: torch.Tensor, given: Tensors) -> torch.Tensor:
        normed: torch.Tensor = self.layer.o_norm(found, given["g2"])
        return normed

    def _verify(self, given: Tensors, part: Parted, out: torch.Tensor) -> None:
        layer = self.layer
        gates = KeyDecays(
            given["g1"], given["beta"], layer.A_log, layer.dt_bias, layer.gate_lower_bound
        )
        self.recur(given["mixed_qkv"], gates, part, out)

    def installed(self) -> Callable[..., Any]:
        """Interrupt PIECEWISE graphs, as the layer's own pass does."""
        made: Callable[..., Any] = eager_break_during_capture(self)
        return made

    @property
    def groups(self) -> int:
        return self.heads

    @property
    def key_size(self) -> int:
        return int(self.layer.conv1d.weight.shape[0]) // (3 * self.heads)

    @property
    def dtype(self) -> torch.dtype | None:
        # The convolution's own weights are float32 in a model of 16 bits, too.
        return self.layer.model_config.dtype

    @property
    def silu(self) -> bool:
        return True

    def fold_gates(self) -> tuple[None, None]:
        return None, None


@dataclass
class TreeSelectiveState(TreeRecurrence):
    """In place of a layer's ``conv_ssm_forward``."""

    PASS = "conv_ssm_forward"
    DECAY = Decay.SELECTIVE

    def __call__(self, projected_states: torch.Tensor, output: torch.Tensor) -> Any:
        """Compute a batch into `output` ``[num_tokens, heads * P]``. `projected_states` is
        ``[num_tokens, gate + inputs, B and C + heads]``."""
        metadata = metadata_of(self.layer)
        if metadata is None or not metadata.num_decodes or metadata.num_accepted_tokens is None:
            return self.stock(projected_states, output)
        count = metadata.num_decode_tokens
        part = self.context.once(metadata, self._part)
        self._verify(projected_states[:count], part, output[:count])
        if part.others is not None:
            with told(self.layer, part.others):
                self.stock(projected_states[count:], output[count:])
        return None

    def _verify(self, projected: torch.Tensor, part: Parted, output: torch.Tensor) -> None:
        layer = self.layer
        inputs, steps = projected[:, layer.tped_intermediate_size :].split(
            [layer.tped_conv_size, layer.tped_dt_size], dim=-1
        )
        # Rows of no request, such as a graph's padding, must not be NaN.
        output.zero_()
        gates = SelectiveGates(steps, layer.A, layer.dt_bias, layer.D)
        self.recur(inputs, gates, part, output.unflatten(1, (layer.tped_dt_size, layer.head_dim)))

    def _part(self, metadata: Any) -> Parted:
        columns, starts = metadata.state_indices_tensor_d, metadata.query_start_loc_d
        accepted = metadata.num_accepted_tokens
        # They lead the batch, so that its rows are theirs.
        parents = self.context.rows.row_parents
        rows = RecurrentRows(parents, starts, columns, accepted, metadata.num_decodes)
        count, others = metadata.num_decode_tokens, None
        if metadata.num_prefills:
            others = dataclasses.replace(metadata, num_decodes=0, num_decode_tokens=0)
        batch = Batch(count, metadata.num_decodes, columns.shape[1], padded=count)
        return Parted(rows, others, keep_inputs(batch, rows, None, self.context))

    @classmethod
    def prepare(cls, name: str, layer: Any) -> None:
        """Refuse states that are kept as inputs of a chain."""
        if layer.use_replayssm:
            raise ConfigError(
                f"--use-replayssm keeps no state per row in layer {name}, which "
                f"--additional-config.graft.tree needs: drop it, or set "
                f"--additional-config.graft.tree.topk to 1 for a chain"
            )

    @property
    def heads(self) -> int:
        return len(self.layer.A)

    @property
    def groups(self) -> int:
        return int(self.layer.n_groups // self.layer.tp_size)

    def fold_gates(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer.A, self.layer.dt_bias
