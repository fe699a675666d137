"""Generate without a server, with trees of drafts, and say what the trees were worth.

::

    python offline.py meta-llama/Llama-3.1-8B-Instruct yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
"""

from __future__ import annotations

import argparse
import json

from vllm import LLM, SamplingParams

PROMPTS = [
    "def quicksort(values):",
    "The capital of France is the city in which the Seine is crossed by most bridges, and",
    "def main(arguments):",
]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="the model that answers")
    parser.add_argument("draft", help="an EAGLE-3 head that was trained for it")
    parser.add_argument("--depth", type=int, default=5, help="of the trees (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32)
    # Argparse reads a default that is a text as it reads what is given.
    parser.add_argument(
        "--graft", type=json.loads, default='"auto"', help="JSON; default: a preset"
    )
    parser.add_argument("--engine", type=json.loads, default={}, help="more options of vllm.LLM")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    llm = LLM(
        arguments.target,
        speculative_config={
            "method": "eagle3",
            "model": arguments.draft,
            "num_speculative_tokens": arguments.depth,
        },
        additional_config={"graft": arguments.graft},
        disable_log_stats=False,  # Without it there are no metrics.
        **arguments.engine,
    )
    sampling = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
    outputs = llm.generate(PROMPTS, sampling)
    numbers = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    # A preset may leave trees off: there are no such metrics then.
    trees = numbers.get("vllm:graft_tree_trees")
    accepted = numbers.get("vllm:graft_tree_nodes_accepted", 0)
    told = {
        "answers": [output.outputs[0].text for output in outputs],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "prompts": [list(output.prompt_token_ids) for output in outputs],
        "parts": llm.collective_rpc("graft_info")[0]["parts"],
        "tokens per step": 1 + accepted / trees if trees else None,
    }
    print(json.dumps(told))


# vLLM starts its engine in a process of its own, which imports this file again.
if __name__ == "__main__":
    main()
