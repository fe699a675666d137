import pytest
import torch

from tests.support.engines.recorded_engine import recorded_engine
from vllm_graft.testing import (
    cpu_engine,
    greedy,
    model_runner,
    spec_metrics,
    write_eagle,
    write_eagle3,
    write_llama,
)

if torch.cuda.is_available():
    pytest.skip("engines on the CPU", allow_module_level=True)

pytestmark = pytest.mark.engine

PROMPTS = ["def main(argv):", "The quick brown fox", "return"]
TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    write_llama(folder / "target")
    write_eagle(folder / "eagle")
    write_eagle3(folder / "eagle3")
    write_eagle3(folder / "eagle3_hot", draft_vocab_size=256)
    return folder


def speculation(folder, head):
    method = "eagle" if head == "eagle" else "eagle3"
    return {"method": method, "model": str(folder / head), "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def expected(folder):
    with cpu_engine(folder / "target") as llm:
        assert type(model_runner(llm)).__module__ == "vllm.v1.worker.cpu.model_runner"
        outputs = greedy(llm, PROMPTS, TOKENS)
    assert len({tuple(tokens) for tokens in outputs}) == len(PROMPTS)
    return outputs


@pytest.mark.parametrize("head", ["eagle", "eagle3", "eagle3_hot"])
def test_greedy_output_is_that_of_the_target(folder, expected, head):
    with cpu_engine(folder / "target", speculative_config=speculation(folder, head)) as llm:
        assert greedy(llm, PROMPTS, TOKENS) == expected
        metrics = spec_metrics(llm)
    assert metrics.draft_tokens == 3 * metrics.drafts > 0
    assert sum(metrics.accepted_per_position) == metrics.accepted_tokens
    assert 1.0 <= metrics.acceptance_length <= 4.0


def test_async_scheduling(folder, expected):
    config = speculation(folder, "eagle3")
    with cpu_engine(folder / "target", async_scheduling=True, speculative_config=config) as llm:
        core = llm.llm_engine.engine_core.engine_core
        assert type(core.scheduler).__name__ == "AsyncScheduler"
        assert core.batch_queue is not None
        del core
        assert greedy(llm, PROMPTS, TOKENS) == expected


def graphs_of(runner):
    managers = [runner.cudagraph_manager]
    managers += [m for m in vars(runner.speculator).values() if hasattr(m, "graphs")]
    return [graph for manager in managers for graph in manager.graphs.values()]


def test_full_graphs_of_target_and_speculator(folder, expected):
    config = speculation(folder, "eagle3")
    with recorded_engine(folder / "target", graphs=[4, 12], speculative_config=config) as llm:
        assert greedy(llm, PROMPTS, TOKENS) == expected
        runner = model_runner(llm)
        graphs = graphs_of(runner)
        assert len(graphs) >= 5
        assert sum(graph.replays for graph in graphs) > TOKENS
        # This plants a bug: the graph reads the old buffer, the runner writes a new one.
        runner.input_buffers.positions = runner.input_buffers.positions.clone()
        assert greedy(llm, PROMPTS, TOKENS) != expected
        del runner, graphs


def use_triton_attention_and_fail(folder):
    with cpu_engine(folder / "target", attention="triton", max_num_seqs=2) as llm:
        backend = model_runner(llm).attn_groups[0][0].backend.__name__
        raise RuntimeError(f"attention is {backend}")


def test_everything_is_undone_after_an_error(folder, expected):
    from vllm.platforms.cpu import CpuPlatform

    before = CpuPlatform.check_and_update_config, torch.cuda.CUDAGraph
    with pytest.raises(RuntimeError, match="attention is TritonAttentionBackend"):
        use_triton_attention_and_fail(folder)
    assert (CpuPlatform.check_and_update_config, torch.cuda.CUDAGraph) == before
    with cpu_engine(folder / "target") as llm:
        assert "CPU" in model_runner(llm).attn_groups[0][0].backend.__name__
        assert greedy(llm, PROMPTS, TOKENS) == expected
