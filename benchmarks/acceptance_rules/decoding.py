"""Speculative steps of many texts at a time, with real models and any rule, without an engine."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.acceptance_rules.growth import Chance, Grown, grow
from benchmarks.acceptance_rules.verification import RULES, Rule, Tree, Verdict
from benchmarks.pair_models import Attend, Llama, Weights
from vllm_graft.spec_decode.trees.shape import TreeShape


class Setting(NamedTuple):
    """How texts are written.

    Attributes:
        rule: a name of `RULES`, or ``coupling``.
        shape: of the trees.
        temperature: of target and draft.
        sharpness: factor of the draft's logits.
        chance: guesses what is accepted, which shapes trees.
    """

    rule: str
    shape: TreeShape
    temperature: float
    sharpness: float
    chance: Chance


class Context(NamedTuple):
    """A node that a step reached, of which it wanted a child.

    Attributes:
        depth: of the node, 0 for the root.
        target: ``[vocab]``, the target's probabilities of the next token.
        draft: likewise, the draft's, in its own vocabulary.
    """

    depth: int
    target: Tensor
    draft: Tensor


class _Nodes(NamedTuple):
    """What the target computed of trees: states for the draft, and K and V of each layer."""

    tokens: Tensor
    aux: Tensor
    keys: list[tuple[Tensor, Tensor]]


class Keys:
    """K and V ``[texts, places, head]`` of one layer, for texts of different lengths."""

    def __init__(self, texts: int, places: int, head: int) -> None:
        self.k, self.v = torch.zeros(2, texts, places, head)

    def put(self, k: Tensor, v: Tensor, places: Tensor) -> None:
        """Store rows ``[texts, rows, head]`` at `places` ``[texts, rows]``."""
        rows = torch.arange(len(k))[:, None]
        self.k[rows, places], self.v[rows, places] = k, v


def _hidden(length: Tensor, places: int, own: Tensor) -> Tensor:
    """Which keys rows don't see: the cache from `length` on, own rows where `own` is false."""
    past = torch.arange(places) >= length[:, None]
    past = past[:, None].expand(-1, own.shape[1], -1)
    return torch.cat((past, ~own), 2)[:, None]


class Texts:
    """Texts that grow by speculative steps.

    Args:
        target: the target.
        draft: weights of its EAGLE-3 head.
        prompts: int64 ``[texts, prompt]``.
        room: tokens that may follow.
        setting: how they are written.
        seed: of all draws.
        roots: the first token of each text, int64 ``[texts]``; None draws it.

    Attributes:
        lengths: int64 ``[texts]``, tokens whose K/V the target has: all but the last.
        roots: int64 ``[texts]``, the last token of each text.
        ids: int64 ``[draft_vocab]``, the target's id of each draft token.
        contexts: the nodes that the last step reached.
    """

    def __init__(
        self,
        target: Llama,
        draft: Weights,
        prompts: Tensor,
        room: int,
        setting: Setting,
        seed: int = 0,
        roots: Tensor | None = None,
    ) -> None:
        self.target, self.draft, self.setting = target, draft, setting
        self.ids = torch.arange(len(draft["d2t"])) + draft["d2t"]
        self.contexts: list[Context] = []
        self._root_states: Tensor
        self._root_logits: Tensor
        self.random = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        texts, prompt = prompts.shape
        places = prompt + room + setting.shape.steps + 2
        self._keys = [Keys(texts, places, target.sizes.head) for _ in range(target.layers)]
        self._draft_keys = Keys(texts, places, target.sizes.head)
        seen: list[tuple[Tensor, Tensor]] = []
        logits, aux = target.run(prompts, seen)
        whole = torch.arange(prompt).expand(texts, -1)
        for keys, (k, v) in zip(self._keys, seen, strict=True):
            keys.put(k, v, whole)
        if roots is None:
            chances = (logits[:, -1] / setting.temperature).softmax(-1)
            roots = torch.multinomial(chances, 1, generator=self.generator)[:, 0]
        self.roots = roots
        self.lengths = torch.zeros(texts, dtype=torch.int64)
        tokens = torch.cat((prompts[:, 1:], self.roots[:, None]), 1)
        self._extend(tokens, aux, torch.full_like(self.lengths, prompt))

    def _noise(self) -> Tensor:
        """The noise of the draws of one step, ``[texts, steps + 1, vocab]``."""
        size = (len(self.roots), self.setting.shape.steps + 1, len(self.target.embed))
        drawn = torch.empty(size).exponential_(generator=self.generator)
        return -drawn.clamp_(min=1e-30).log()

    def step(self) -> list[list[int]]:
        """Emit tokens, at least one of each text."""
        [verdicts], nodes, chances, draft = self._tried([self.setting.rule])
        self.contexts = [
            Context(depth, chances[text, node], draft[text, node])
            for text, verdict in enumerate(verdicts)
            for depth, node in enumerate((0, *verdict.path))
            if depth < self.setting.shape.steps
        ]
        return self._commit(nodes, verdicts)

    def tried(self, setting: Setting, rules: list[str]) -> list[list[int]]:
        """How many tokens each text would emit by each of `rules`, all on one and the same tree.

        Nothing is emitted. What `coupling` says is of a tree with noise, so it is asked alone.
        """
        self.setting = setting
        verdicts, *_ = self._tried(rules)
        return [[len(verdict.path) + 1 for verdict in each] for each in verdicts]

    def _tried(self, rules: list[str]) -> tuple[list[list[Verdict]], _Nodes, Tensor, Tensor]:
        """Grow trees and judge them: verdicts by rule, nodes, and both models' probabilities."""
        noise = self._noise() if rules == ["coupling"] else None
        coupled = None if noise is None else noise[..., self.ids]
        torch.manual_seed(int(self.random.integers(2**31)))
        grown = grow(self, self.setting.shape, self.setting.chance, coupled)
        tokens = self.ids[grown.tokens]
        tokens[:, 0] = self.roots
        logits, nodes = self._verify(tokens, grown.parents, grown.depths)
        chances = (logits / self.setting.temperature).softmax(-1)
        if noise is None:
            verdicts = [self._judged(RULES[rule], grown, tokens, chances) for rule in rules]
        else:
            # The draws after a node at a depth have the noise of that depth.
            drawn = noise[torch.arange(len(noise))[:, None], grown.depths]
            verdicts = [self._walked(grown, tokens, (chances.log() + drawn).argmax(-1))]
        return verdicts, nodes, chances, grown.draft

    def advance(self, tokens: Tensor) -> None:
        """Append `tokens` int64 ``[texts, count]``, whatever the models say of them."""
        count = tokens.shape[1]
        depths = torch.arange(count).expand(tokens.shape)
        rows = torch.cat((self.roots[:, None], tokens[:, :-1]), 1)
        _, nodes = self._verify(rows, (depths - 1).clamp(min=0), depths)
        path = list(range(1, count))
        self._commit(nodes, [Verdict(path, bonus) for bonus in tokens[:, -1].tolist()])

    def keep(self, texts: list[int]) -> None:
        """Forget all texts but these."""
        self.lengths, self.roots = self.lengths[texts], self.roots[texts]
        self._root_states, self._root_logits = self._root_states[texts], self._root_logits[texts]
        for keys in (*self._keys, self._draft_keys):
            keys.k, keys.v = keys.k[texts], keys.v[texts]

    # A draft, as growth.py wants it.

    def first(self) -> Tensor:
        self._states = self._root_states[:, None]
        texts, _, head = self._draft_keys.k.shape
        self._own_k = self._own_v = torch.zeros(texts, 0, head)
        # Which nodes a node sees: its ancestors and itself.
        self._seen = torch.zeros(texts, 1, 0, dtype=torch.bool)
        return self._law(self._root_logits)

    def after(self, node: int, parents: Tensor, tokens: Tensor, depths: Tensor) -> Tensor:
        rows = torch.arange(len(parents))
        seen = F.pad(self._seen[rows, parents], (0, 1), value=True)[:, None]
        self._seen = torch.cat((F.pad(self._seen, (0, 1)), seen), 1)
        hidden = _hidden(self.lengths, self._reach, seen)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._own_k = torch.cat((self._own_k, k), 1)
            self._own_v = torch.cat((self._own_v, v), 1)
            return self._over(q, self._draft_keys, self._own_k, self._own_v, hidden)

        states, logits = self._head(
            self.ids[tokens][:, None],
            self._states[rows, parents][:, None],
            (self.lengths - 1 + depths)[:, None],
            attend,
        )
        self._states = torch.cat((self._states, states), 1)
        return self._law(logits[:, 0])

    def _law(self, logits: Tensor) -> Tensor:
        return (logits * (self.setting.sharpness / self.setting.temperature)).softmax(-1)

    # Passes of the models.

    @property
    def _reach(self) -> int:
        """Places of the caches that any text uses."""
        return int(self.lengths.max())

    def _over(self, q: Tensor, keys: Keys, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        reach = hidden.shape[-1] - k.shape[1]
        k, v = torch.cat((keys.k[:, :reach], k), 1), torch.cat((keys.v[:, :reach], v), 1)
        return self.target.sizes.seen(q, k, v, hidden)

    def _head(
        self, tokens: Tensor, states: Tensor, places: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Run the draft; return the states to go on from and its logits."""
        sizes, weights, layer = self.target.sizes, self.draft, "midlayer."
        both = (
            sizes.norm(self.target.embed[tokens], weights[f"{layer}input_layernorm.weight"]),
            sizes.norm(states, weights[f"{layer}hidden_norm.weight"]),
        )
        states = sizes.layer(states, torch.cat(both, -1), weights, layer, places, attend)
        normed = sizes.norm(states, weights["norm.weight"])
        return states, F.linear(normed, weights["lm_head.weight"])

    def _extend(self, tokens: Tensor, aux: Tensor, counts: Tensor) -> None:
        """Run the draft over `counts` rows of each text, whose next tokens are `tokens`."""
        rows = tokens.shape[1]
        places = self.lengths[:, None] + torch.arange(rows)
        own = torch.ones(rows, rows, dtype=torch.bool).tril().expand(len(tokens), -1, -1)
        hidden = _hidden(self.lengths, self._reach, own)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._draft_keys.put(k, v, places)
            return self._over(q, self._draft_keys, k, v, hidden)

        states = F.linear(aux, self.draft["fc.weight"])
        states, logits = self._head(tokens, states, places, attend)
        texts = torch.arange(len(tokens))
        self._root_states = states[texts, counts - 1]
        self._root_logits = logits[texts, counts - 1]
        self.lengths = self.lengths + counts

    def _verify(self, tokens: Tensor, parents: Tensor, depths: Tensor) -> tuple[Tensor, _Nodes]:
        """Run the target over trees, ``[texts, nodes]`` each; return its logits too."""
        target, count = self.target, tokens.shape[1]
        own = torch.eye(count, dtype=torch.bool).expand(len(tokens), -1, -1).clone()
        rows = torch.arange(len(tokens))
        for node in range(1, count):
            own[:, node] |= own[rows, parents[:, node]]
        hidden = _hidden(self.lengths, self._reach, own)
        states, places = target.embed[tokens], self.lengths[:, None] + depths
        aux: list[Tensor] = []
        fresh: list[tuple[Tensor, Tensor]] = []
        for number in range(target.layers):
            if number in target.aux:
                aux.append(states)

            def attend(q: Tensor, k: Tensor, v: Tensor, number: int = number) -> Tensor:
                fresh.append((k, v))
                return self._over(q, self._keys[number], k, v, hidden)

            layer = f"model.layers.{number}."
            normed = target.sizes.norm(states, target.weights[f"{layer}input_layernorm.weight"])
            states = target.sizes.layer(states, normed, target.weights, layer, places, attend)
        normed = target.sizes.norm(states, target.weights["model.norm.weight"])
        logits = F.linear(normed, target.weights["lm_head.weight"])
        return logits, _Nodes(tokens, torch.cat(aux, -1), fresh)

    # What is decided, and what follows from it.

    def _judged(self, rule: Rule, grown: Grown, tokens: Tensor, chances: Tensor) -> list[Verdict]:
        verdicts = []
        for text, parents in enumerate(grown.parents.tolist()):
            target = chances[text].double().numpy()
            draft = np.zeros_like(target)
            draft[:, self.ids.numpy()] = grown.draft[text].double().numpy()
            target /= target.sum(1, keepdims=True)
            draft /= draft.sum(1, keepdims=True)
            tree = Tree(parents, tokens[text].tolist(), target, draft)
            verdicts.append(rule(tree, self.random))
        return verdicts

    def _walked(self, grown: Grown, tokens: Tensor, drawn: Tensor) -> list[Verdict]:
        """Follow the target's own draws down the trees, as the engine does."""
        verdicts = []
        texts = zip(grown.parents.tolist(), tokens.tolist(), drawn.tolist(), strict=True)
        for parents, drafted, wanted in texts:
            path, node = [], 0
            for child in range(1, len(parents)):
                if parents[child] == node and drafted[child] == wanted[node]:
                    node = child
                    path.append(child)
            verdicts.append(Verdict(path, wanted[node]))
        return verdicts

    def _commit(self, nodes: _Nodes, verdicts: list[Verdict]) -> list[list[int]]:
        """Take over what was accepted, and run the draft over it."""
        emitted = [
            [*nodes.tokens[text, verdict.path].tolist(), verdict.bonus]
            for text, verdict in enumerate(verdicts)
        ]
        counts = torch.tensor([len(tokens) for tokens in emitted])
        longest = int(counts.max())

        def padded(lists: list[list[int]]) -> Tensor:
            return torch.tensor([each + [0] * (longest - len(each)) for each in lists])

        rows = torch.arange(len(verdicts))[:, None]
        path = padded([[0, *verdict.path] for verdict in verdicts])
        places = self.lengths[:, None] + torch.arange(longest)
        # What is put behind a text's end is overwritten before it is seen.
        for keys, (k, v) in zip(self._keys, nodes.keys, strict=True):
            keys.put(k[rows, path], v[rows, path], places)
        self.roots = torch.tensor([tokens[-1] for tokens in emitted])
        self._extend(padded(emitted), nodes.aux[rows, path], counts)
        return emitted


def lengths_of(texts: Texts, tokens: int) -> list[list[int]]:
    """Write `tokens` tokens to each text; return what each of its steps emitted, as a number.

    A text's last step counts whole, as the lengths of other texts' steps do.
    """
    found: list[list[int]] = [[] for _ in texts.roots]
    going = list(range(len(found)))
    while going:
        for text, emitted in zip(going, texts.step(), strict=True):
            found[text].append(len(emitted))
        unfinished = [place for place, text in enumerate(going) if sum(found[text]) < tokens]
        if len(unfinished) < len(going):
            going = [going[place] for place in unfinished]
            texts.keep(unfinished)
    return found
