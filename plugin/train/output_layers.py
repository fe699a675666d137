"""Both ends of a target: its embedding, and what makes logits of its last states."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from vllm_graft.base.errors import ConfigError
from vllm_graft.train import states
from vllm_graft.train.states import Entry
from vllm_graft.train.target import Target, checkpoint_file

LOGITS = 2**27
"""Most logits over the target's whole vocabulary that exist at a time."""

FORMS = ("rms", "rms of one more", "layer")
"""What the last norm may be: RMSNorm by its weight, by one more than that, or LayerNorm."""

AGREE, NEAR = 0.8, 0.05
"""Share of its own greedy tokens that a target's logits have to give; the rest are near ties. Forms
whose shares are so near agree."""


class OutputLayers:
    """The embedding and the output ``[tokens, hidden]`` of a target, which do not change, and the
    `form` of the last norm."""

    def __init__(self, target: Target, model: str, device: torch.device) -> None:
        self.target, self.form = target, FORMS[0]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        found = {}
        for name, file in target.files.items():
            path = checkpoint_file(model, target.revision, file)
            with safe_open(str(path), "pt") as tensors:
                found[name] = tensors.get_tensor(name).to(device, dtype)
        self.embedding, self.output = found[target.embedding], found[target.output]
        self.norm = found[target.norm].float()
        self.bias = found.get(target.norm.removesuffix("weight") + "bias")
        for name in (target.embedding, target.output):
            if (shape := tuple(found[name].shape))[1:] != (target.hidden,):
                raise ConfigError(
                    f"MODEL {model}: {name} is {list(shape)}, and not a row of {target.hidden} "
                    "numbers for each token: give a checkpoint whose embedding and output layer "
                    "are not quantized."
                )

    @property
    def gain(self) -> Tensor:
        """What the last norm multiplies by, ``[hidden]``."""
        return self.norm + 1 if self.form == FORMS[1] else self.norm

    def logits(self, last: Tensor) -> Tensor:
        """Float32 logits ``[rows, vocab]`` of states behind the last layer ``[rows, hidden]``."""
        target, size = self.target, (self.target.hidden,)
        eps = target.layer["rms_norm_eps"]
        if self.form == FORMS[2]:
            bias = None if self.bias is None else self.bias.float()
            normed = F.layer_norm(last.float(), size, self.norm, bias, eps)
        else:
            normed = F.rms_norm(last.float(), size, self.gain, eps)
        # Checkpoints may pad their tables.
        output = self.output[: target.vocab]
        logits = F.linear(normed.to(output.dtype), output).float() * target.scale
        return target.softcap * (logits / target.softcap).tanh() if target.softcap else logits

    def find_form(self, folder: Path, entries: Sequence[Entry]) -> None:
        """Choose the form by which the target's states give its own answers: greedy ones are its
        likeliest tokens, and of forms that agree, drawn ones are likeliest by the right one. Raises
        `ConfigError` if none gives them."""
        found = {}
        for self.form in FORMS:
            right, count, surprise = 0, 0, 0.0
            for each in entries:
                logits, tokens = self._at_answers(folder, each)
                if each.temperature > 0:
                    loss = F.cross_entropy(logits / each.temperature, tokens, reduction="sum")
                    surprise += loss.item()
                else:
                    right += int((logits.argmax(-1) == tokens).sum().item())
                    count += len(tokens)
            found[self.form] = right / max(1, count), surprise
        most = max(right for right, _ in found.values())
        near = [form for form in FORMS if found[form][0] >= most - NEAR]
        self.form = min(near, key=lambda form: found[form][1])
        if most < AGREE:
            raise ConfigError(
                f"MODEL: its output layer {self.target.output} behind {self.target.norm} gives "
                f"{most:.0%} of its own greedy tokens, so that its logits are made in a way that "
                "training does not know. No head can be trained for it."
            )

    def _at_answers(self, folder: Path, entry: Entry) -> tuple[Tensor, Tensor]:
        """Logits ``[rows, vocab]`` and the tokens of an answer ``[rows]`` that were drawn there."""
        taken, tokens = states.load(folder, entry)
        first = max(1, entry.prompt)
        last = taken[first - 1 : -1, self.target.taken.index(self.target.layers)]
        return self.logits(last.to(self.norm.device)), tokens[first:].to(self.norm.device)
