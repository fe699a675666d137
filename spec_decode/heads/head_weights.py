"""Other weights for a draft that serves: they are read beside the steps, and swapped in between.

A swap copies numbers to where the old ones are, so that captured graphs stay right, and allocates
nothing on a device but what copies in FP8 take while they are made. Each rank reads its own part
of a file. K/V that the draft has written stays: running requests accept less for a while.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from vllm_graft.base.values import reason_of, shown

Tensors = list[tuple[nn.Module, str, torch.Tensor]]
"""Parameters by their module and name, with other numbers on the host."""

_PLACE = "_graft_head_weights"
"""Attribute of a model runner that holds its `HeadWeights`."""


class HeadWeights:
    """Weights of one rank's draft by the name of a head, on the host. A pipeline's rank without a
    draft has none, and is always ready.

    Args:
        draft: vLLM's model, which isn't quantized; None without one.
        target: of which the draft may share modules; they are left alone.
        head: has copies of the draft's weights, which follow; None without any.
        base: file of the weights that the draft was loaded from.
    """

    def __init__(self, draft: Any, target: nn.Module, head: Any, base: str) -> None:
        self._draft, self._base = draft, base
        self._renew = getattr(head, "renew", lambda: None)
        self._shared = {id(each) for each in target.parameters()}
        self._device = torch.device("cpu")
        self._read: dict[str, Future[Tensors]] = {}
        self._thread = ThreadPoolExecutor(1, "graft-heads")
        if draft is not None:
            self._device = next(draft.parameters()).device

    def read(self, head: str, file: str) -> None:
        """Begin to read a file, in a thread, under a head's name."""
        if self._draft is not None and head not in self._read:
            self._read[head] = self._thread.submit(self._tensors, file)

    def problem(self, head: str) -> str | None:
        """Why a file can't be swapped in; empty if it can, None while it is read."""
        if self._draft is None:
            return ""
        found = self._read[head]
        if not found.done():
            return None
        error = found.exception()
        return "" if error is None else reason_of(error)

    @torch.inference_mode()
    def swap(self, head: str) -> None:
        """Copy weights that were read into the draft; on all ranks between the same two steps."""
        if self._draft is None:
            return
        for module, name, tensor in self._read[head].result():
            found = getattr(module, name)
            if found.shape == tensor.shape:
                found.data.copy_(tensor, non_blocking=True)
            else:
                setattr(module, name, nn.Parameter(tensor.clone(), requires_grad=False))
            if hasattr(module, "cpu_linear"):
                # On a CPU vLLM multiplies by a packed copy, which it may keep alone.
                module.quant_method.process_weights_after_loading(module)
        self._renew()

    def keep(self, *heads: str) -> None:
        """Forget all others."""
        self._read = {each: found for each, found in self._read.items() if each in heads}

    @torch.no_grad()
    def _tensors(self, file: str) -> Tensors:
        """Read a file as vLLM's loader would, into memory of the host. Raises `ValueError` if it
        does not fit, or has numbers that are NaN or infinite."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        found: Tensors = []
        shadow = self._shadow(self._draft, found)
        shadow.load_weights(self._checked(file))
        on_cuda, taken = self._device.type == "cuda", []
        for module, name, each in found:
            if not _is_filled(name, each):
                continue
            if on_cuda and getattr(module, name).shape != each.shape:
                raise ValueError(f"vLLM keeps {name} in another form")
            taken.append((module, name, each.data.pin_memory() if on_cuda else each.data))
        return taken

    def _checked(self, file: str) -> list[tuple[str, torch.Tensor]]:
        """The tensors of a file, which are some of the base's."""
        tensors = []
        with safe_open(self._base, "pt") as base, safe_open(file, "pt") as new:
            for name in new.keys():  # noqa: SIM118
                if name not in base.keys():  # noqa: SIM118
                    raise ValueError(f"it has {shown(name)}, and the head of the start has not")
                old, each = base.get_slice(name), new.get_tensor(name)
                if [*each.shape] != (shape := old.get_shape()):
                    raise ValueError(f"{name} is {[*each.shape]}, and that of the start is {shape}")
                if not each.is_floating_point() and not torch.equal(each, base.get_tensor(name)):
                    raise ValueError(f"{name} is not that of the head of the start")
                if not each.isfinite().all():
                    raise ValueError(f"{name} has numbers that are NaN or infinite")
                tensors.append((name, each))
        return tensors

    def _shadow(self, module: nn.Module, found: Tensors) -> Any:
        """A module with parameters on the host, empty ones, in the place of its own; they are added
        to `found`. Those of the target have no numbers at all."""
        # Not as `copy` does: classes of vLLM's may have a say in that.
        shadow = object.__new__(type(module))
        shadow.__dict__.update(module.__dict__)
        as_loaded = get_layerwise_info(module).restore_metadata[0]
        shadow._parameters = {}
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in self._shared:
                shadow._parameters[name] = None if parameter is None else to_meta_tensor(parameter)
                continue
            # vLLM may have packed it since it was loaded.
            host = materialize_meta_tensor(as_loaded.get(name, to_meta_tensor(parameter)))
            host = restore_layer_refs(host, module)
            host.fill_(float("nan") if host.is_floating_point() else -1)
            shadow._parameters[name] = host
            found.append((module, name, host))
        shadow._modules = {
            name: None if each is None else self._shadow(each, found)
            for name, each in module._modules.items()
        }
        return shadow


def _is_filled(name: str, tensor: torch.Tensor) -> bool:
    """Whether a parameter was loaded. Raises `ValueError` if a part of it was."""
    if not tensor.is_floating_point():
        return False  # It is as it was.
    missing = tensor.isnan()
    if missing.all():
        return False
    if missing.any():
        raise ValueError(f"{name} is not whole")
    return True


def attach(worker: Any, head: str, base: str) -> None:
    """Let the draft of a worker, which has loaded its models, have other weights than those of the
    file `base`, which are those of `head`."""
    runner = worker.model_runner
    drafts = getattr(runner.speculator, "head", None)
    made = HeadWeights(runner.get_draft_model(), runner.get_model(), drafts, base)
    made.read(head, base)
    setattr(runner, _PLACE, made)


def order(worker: Any, method: str, *args: Any) -> tuple[Any, str]:
    """Call a method of a worker's `HeadWeights`; returns what it says, and why it failed. An error
    that one rank raises would leave the answers of later ones in vLLM's executor, where the next
    step takes them for its own."""
    try:
        return getattr(getattr(worker.model_runner, _PLACE), method)(*args), ""
    except Exception as error:
        return None, reason_of(error)
