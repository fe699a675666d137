"""Ask a server in three ways, and read from its metrics what the drafts were worth.

::

    python client.py --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import re
import urllib.request

from openai import OpenAI

PROMPT = "def quicksort(values):"


def total(url: str, name: str) -> float:
    """Sum a counter of the server over its engines."""
    # A proxy of the environment must not see this request.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)", text, re.MULTILINE)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    url = parser.parse_args().url.rstrip("/")
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id

    whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=32, temperature=0)
    print("at once:   ", repr(whole.choices[0].text))

    # A step with a tree yields several tokens, so a chunk of the stream may have several.
    chunks = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=32, temperature=0, stream=True
    )
    streamed = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    print("streamed:  ", repr("".join(streamed)), f"in {len(streamed)} chunks")

    # Structured output gets full trees as well: each node is masked by its own path.
    options = {"structured_outputs": {"choice": ["quick", "slow"]}}
    chosen = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=8, temperature=0, extra_body=options
    )
    print("one of two:", repr(chosen.choices[0].text))

    trees = total(url, "vllm:graft_tree_trees_total")
    accepted = total(url, "vllm:graft_tree_nodes_accepted_total")
    if trees:
        print(f"tokens per step: {1 + accepted / trees:.2f}")


if __name__ == "__main__":
    main()
