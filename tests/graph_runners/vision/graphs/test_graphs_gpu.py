"""Real CUDA graphs of a small tower: captures while it serves, memory, eviction."""

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vllm_graft.graph_runners.vision import replay_plan as plan
from vllm_graft.graph_runners.vision.capture.admission import Admission
from vllm_graft.graph_runners.vision.capture.graph_backend import GraphBackend, borrowed
from vllm_graft.graph_runners.vision.graphs.graph_store import GraphStore, StoreRules
from vllm_graft.graph_runners.vision.graphs.vision_batch import ExactReplay, VisionBatch
from vllm_graft.graph_runners.vision.graphs.vision_metrics import VitStats
from vllm_graft.graph_runners.vision.towers.adapter import row_slices
from vllm_graft.graph_runners.vision.towers.tower import Item, Tower

pytestmark = pytest.mark.gpu

HIDDEN, HEADS, LAYERS = 512, 8, 8


class Segmented(Tower):
    """A transformer with attention within segments, which offsets on the device describe."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        scale = HIDDEN**-0.5
        make = lambda *size: torch.randn(*size, device="cuda", dtype=dtype) * scale  # noqa: E731
        self.layers = [(make(HIDDEN, 3 * HIDDEN), make(HIDDEN, HIDDEN)) for _ in range(LAYERS)]

    def items(self, inputs: Any) -> list[Item]:
        return [Item((rows, str(inputs["x"].dtype)), rows) for rows in inputs["lengths"]]

    def data(self, inputs: Any, indices: Sequence[int]) -> Any:
        return {"x": row_slices(inputs["x"], inputs["lengths"], indices)}

    def constants(self, items: Sequence[Item]) -> Any:
        offsets = torch.tensor([0, *(item.rows for item in items)]).cumsum(0)
        return {"offsets": offsets.to(torch.int32).cuda()}

    def forward(self, buffers: Any) -> torch.Tensor:
        x, offsets = buffers["x"], buffers["offsets"]
        segment = torch.searchsorted(offsets, torch.arange(len(x), device="cuda"), right=True)
        mask = segment[:, None] == segment
        for qkv, out in self.layers:
            q, k, v = F.layer_norm(x @ qkv, [3 * HIDDEN]).view(-1, 3, HEADS, 64).permute(1, 2, 0, 3)
            mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)
            x = x + mixed[0].transpose(0, 1).reshape(-1, HIDDEN) @ out
        return x

    def split(self, output: Any, inputs: Any, indices: Any, items: Any) -> list[torch.Tensor]:
        sizes = [items[index].rows for index in indices]
        return list(output[: sum(sizes)].split(sizes))

    def eager(self, inputs: Any, indices: Sequence[int]) -> list[torch.Tensor]:
        items = self.items(inputs)
        x = torch.cat(self.data(inputs, indices)["x"])
        constants = self.constants([items[index] for index in indices])
        return self.split(self.forward({"x": x, **constants}), inputs, indices, items)

    def padding(self, like: Item, rows: int) -> list[Item]:
        whole, rest = divmod(rows, 64)
        return [Item(("pad", size), size) for size in [64] * whole + [rest] * bool(rest)]

    def sample(self, rows: int) -> Any:
        return batch([rows * 3 // 4, rows // 8])


def batch(lengths: list[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(sum(lengths), HIDDEN, device="cuda", generator=generator)
    return {"x": x.to(dtype), "lengths": lengths}


@pytest.fixture
def store() -> Iterator[GraphStore]:
    with torch.inference_mode():
        made = make_store(Segmented(torch.float32), 256 << 20)
        yield made
        made.clear()


def make_store(tower: Tower, limit: int) -> GraphStore:
    torch.cuda.empty_cache()
    backend, rules = GraphBackend(torch.device("cuda")), StoreRules(verify=True, timing=False)
    made = GraphStore(tower, backend, limit, Admission(1), VitStats(), rules)
    made.open(torch.cuda.graph_pool_handle())
    return made


def state(store: GraphStore) -> str:
    """Everything that decides about room, for the message of a failed assertion."""
    owners = {owner: f"{size / 2**20:.1f}" for owner, size in store.budget.owners.items()}
    return (
        f"MiB: limit {store.budget.limit >> 20}, by owner {owners}; largest pass "
        f"{store.memory.peak / 2**20:.1f}; buckets {sorted(store.buckets)}; "
        f"exact {[key[0][0] for key in store.exact]}; dropped {dict(store.stats.dropped)}; "  # type: ignore[index]
        f"failures {store.stats.failures}"
    )


def run(store: GraphStore, inputs: Any, captured: bool = True) -> list[torch.Tensor]:
    batch = VisionBatch.read(store.tower, inputs)
    exact = plan.groups(batch.items, 4096)
    store.admission.see(group.key for group in exact)
    for group in exact:
        if captured and group.key not in store.exact:
            why = store.capture_exact(group, batch)
            assert why is None, f"{why}: {state(store)}"
    replays = plan.choose(batch.items, exact, store.exact, sorted(store.buckets), 64)
    assert replays is not None
    found = store.run(replays, batch)
    assert found is not None
    return found


def near(store: GraphStore, inputs: Any) -> bool:
    """Whether padded graphs answer nearly as the eager pass."""
    found = run(store, inputs, captured=False)
    expected = store.tower.eager(inputs, range(len(found)))
    return all((a - b).norm() <= 1e-3 * b.norm() for a, b in zip(found, expected, strict=True))


def test_exact_graphs_are_bitwise_eager(store: GraphStore) -> None:
    for seed in range(20):
        for lengths in ([256], [96], [256, 256], [64, 32, 64]):
            inputs = batch(lengths, seed=seed)
            found = run(store, inputs)
            for step in plan.groups(store.tower.items(inputs), 4096):
                expected = store.tower.eager(inputs, step.indices)
                assert all(map(torch.equal, [found[index] for index in step.indices], expected))


def test_buckets_agree_at_every_tail(store: GraphStore) -> None:
    for rows in (512, 256):
        assert store.capture_bucket(rows, 0, False) is None
    for first in range(16, 500, 37):
        assert near(store, batch([first, 11], seed=first))


def settled() -> int:
    """Bytes that the allocator holds after it has given back what is unused."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def fill(store: GraphStore) -> dict[int, str | None]:
    """Capture many graphs; per number of rows, why the exact graph was not kept."""
    for rows in (1024, 512, 256):
        if store.buckets or store.fits(rows):
            store.capture_bucket(rows, 0, False)
    why: dict[int, str | None] = {}
    for rows in (64, 512, 192, 128, 768, 256, 1024, 320, 640, 960, 64 * 9, 64 * 11):
        given = VisionBatch.read(store.tower, batch([rows], seed=rows))
        for group in plan.groups(given.items, 4096):
            store.admission.see([group.key])
            why[rows] = store.capture_exact(group, given)
    return why


@pytest.mark.parametrize("limit", [64 << 20, 256 << 20, 512 << 20])
@torch.inference_mode()
def test_memory_stays_within_the_budget(limit: int) -> None:
    tower = Segmented(torch.float32)
    tower.eager(batch([1024], seed=1), [0])  # The eager pass takes a workspace of its own.
    taken_before = GraphBackend(torch.device("cuda")).overhead
    before = settled() - taken_before
    store = make_store(tower, limit)
    why = fill(store)
    taken = settled() - before
    told = f"taken {taken / 2**20:.1f} {state(store)}; not kept {why}"
    assert len(store.exact) >= 2, told
    assert store.budget.used <= limit, told
    assert taken <= limit, told
    # Graphs that were captured under a tight budget give the right answers.
    for (layout, _), _graph in list(store.exact.items()):
        inputs = batch([layout[0]], seed=7)  # type: ignore[index]
        found = run(store, inputs, captured=False)
        assert torch.equal(found[0], store.tower.eager(inputs, [0])[0]), f"{layout}: {told}"
    store.clear()
    left = settled() - before
    assert left <= store.backend.overhead + (2 << 20), f"{left / 2**20:.1f} MiB stay; {told}"


def test_outputs_of_many_graphs_take_one_place(store: GraphStore) -> None:
    """Outputs of 2 MiB each share memory, so answers have to be clones."""
    layouts = [[first, 1024 - first] for first in range(64, 512 + 64, 32)]
    sizes, answers = [], []
    for lengths in layouts:
        given = VisionBatch.read(store.tower, batch(lengths, seed=lengths[0]))
        whole = ExactReplay((0, 1), 1024, key=(tuple(lengths), 1))
        why = store.capture_exact(whole, given)
        assert why is None, f"{why}: {state(store)}"
        sizes.append(store.budget.owners["pool"])
        answers.append((whole, given))
    assert len(store.exact) == len(layouts) >= 16
    assert sizes[-1] - sizes[0] <= 4 << 20, f"pool {sizes}; {state(store)}"
    outputs = {graph._captured.output.data_ptr() for graph in store.exact.values()}  # type: ignore[union-attr]
    assert len(outputs) < len(layouts), "no output is where another one is"
    found = [store.replay(*answer) for answer in answers]
    for parts, (_, given) in zip(found, answers, strict=True):
        assert parts is not None
        assert all(map(torch.equal, parts, store.tower.eager(given.inputs, (0, 1))))


def test_interleaved_sizes_share_poisoned_buffers(store: GraphStore) -> None:
    for rows in (512, 384, 256):
        assert store.capture_bucket(rows, 0, False) is None
    run(store, batch([192]))
    for turn in range(24):
        for buffer in store.arena._buffers.values():
            buffer.fill_(float("nan"))
        assert near(store, batch([[192], [100, 31], [300, 17], [500], [256]][turn % 5], seed=turn))
    assert store.arena.sizes == [512 * HIDDEN * 4]


def test_metadata_lies_in_pinned_memory_and_costs_the_device_nothing(store: GraphStore) -> None:
    assert store.capture_bucket(512, 0, False) is None
    static = store.budget.owners["static"]
    kinds = [[first, 401 - first] for first in range(16, 400, 16)]
    for turn in range(3):
        for lengths in kinds:
            assert near(store, batch(lengths, seed=turn))
    told = store.metadata.report()
    assert told["hits"] >= 2 * len(kinds), told
    assert told["host_bytes"] > 0, told
    block = store.metadata._block
    assert block is not None
    assert block.is_pinned()
    assert store.budget.owners["static"] == static, state(store)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_borrowed_tensor_keeps_no_memory(dtype: torch.dtype) -> None:
    tensor = torch.arange(1 << 20, device="cuda").to(dtype).view(1024, -1)
    alias = borrowed(tensor)
    assert alias.data_ptr() == tensor.data_ptr()
    assert torch.equal(alias, tensor)
    assert torch.equal(borrowed(tensor[3]), tensor[3])
    assert torch.equal(borrowed(tensor[3, 4]), tensor[3, 4])
    for kept in (tensor[:, 1], tensor[:0]):
        assert borrowed(kept) is kept
    before = torch.cuda.memory_allocated()
    size = tensor.nbytes
    del tensor, kept
    assert before - torch.cuda.memory_allocated() >= size


def test_all_stores_of_a_process_share_a_workspace(store: GraphStore) -> None:
    reserved = store.backend.reserved()
    other = make_store(store.tower, 64 << 20)
    grown = other.backend.reserved() - reserved
    told = f"{grown / 2**20:.1f} MiB; overhead {other.backend.overhead / 2**20:.1f}"
    assert grown <= 4 << 20, told
    assert other.budget.owners["overhead"] == store.budget.owners["overhead"], told
    other.clear()


def test_passes_at_the_start_cost_no_other_workspace(store: GraphStore) -> None:
    inputs = batch([512])
    before = settled()
    # vLLM captures on a new stream.
    with torch.cuda.stream(torch.cuda.Stream()), store.backend.stream():
        store.tower.eager(inputs, [0])
    grown = settled() - before
    assert grown <= 4 << 20, f"{grown / 2**20:.1f} MiB"


def test_evicted_graphs_make_room_in_the_pool(store: GraphStore) -> None:
    run(store, batch([512]))
    sizes = []
    for turn in range(12):
        store.drop_exact(next(iter(store.exact)))
        run(store, batch([512], seed=turn))
        sizes.append((store.budget.owners["pool"], store.budget.owners["static"], settled()))
    # In the first turn, buffers and outputs are allocated in another order: it may cost a segment.
    assert len(set(sizes[1:])) == 1, f"pool, static, reserved: {sizes}; {state(store)}"


def test_a_failed_capture_leaves_the_device_usable(store: GraphStore) -> None:
    cell = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError):
        store.backend.capture(lambda: cell.sum().item())
    assert not torch.cuda.is_current_stream_capturing()
    inputs = batch([128])
    found = run(store, inputs)
    assert torch.equal(found[0], store.tower.eager(inputs, [0])[0])
