"""Both forms that are timed compute the same, and leave the same state of the accepted path."""

from __future__ import annotations

import pytest
import torch

from benchmarks import recurrent_forms
from benchmarks.recurrent_forms import keeping, layer, writing


@pytest.mark.parametrize("kind", ["delta", "kda"])
def test_the_forms_agree(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_forms, "KEY_HEADS", 1)
    monkeypatch.setattr(recurrent_forms, "VALUE_HEADS", 2)
    torch.manual_seed(0)
    given = layer(2, 8, device="cpu", kind=kind)
    assert given.path[0, :3].tolist() == [0, 2, 6]
    assert given.counts.tolist() == [3, 3]
    before, found = given.states.clone(), []
    for form in (writing, keeping):
        given.states.copy_(before)
        given.outputs.zero_()
        run, commit = form(given)
        run()
        commit()
        last = given.states[given.rows.columns[:, 2].long()].clone()
        found.append((given.outputs.clone(), last))
    (outputs, states), (chunked, folded) = found
    assert torch.equal(states, folded)
    assert outputs.any()
    torch.testing.assert_close(outputs, chunked, rtol=1e-2, atol=1e-3)
