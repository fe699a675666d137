"""List the kernels of one vision graph by name, to see what is left to gain.

    python -m benchmarks.vit_kernels --towers qwen3 --sizes 224 672

Towers have true shapes and made-up weights, as in `vllm-graft bench vit`. There is one image per
size, and one replay of its exact graph. `--graft '{"fuse": false}'` shows the blocks as vLLM has
them. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys

from vllm_graft.bench.common import kernel_times as kernels
from vllm_graft.bench.common.timing import Deadline
from vllm_graft.bench.vision import image_cases as cases
from vllm_graft.bench.vision import speed
from vllm_graft.bench.vision.arms import Arm, Machine, make
from vllm_graft.bench.vision.random_towers import (
    TOWERS,
    Limits,
    Pixels,
    build,
    one_rank,
    vllm_config,
)

MOST_PATCHES = 8192
WARM = 9


def show(name: str, sizes: list[int], machine: Machine, most: int) -> None:
    """Print the graphs of one tower."""
    tower = TOWERS[name]
    config = vllm_config(machine.limits, None, False, machine.dtype, tower)
    model = build(tower, config, machine.device, machine.dtype)
    pixels = Pixels(tower, MOST_PATCHES, machine.device, machine.dtype)
    eager = Arm("eager", model, machine)
    for batch in cases.single_sizes(tower.patch, (224, 448)).values():
        eager.finished(pixels.of(batch))
    ours = make("ours", model, machine)
    print(f"{name}: fused {ours.manager.report()['fused']}", flush=True)
    for label, batch in cases.single_sizes(tower.patch, tuple(sizes)).items():
        inputs = pixels.of(batch)
        speed.settle(ours, inputs, WARM, Deadline(None))
        _, replay = speed.probe(ours, inputs)
        if replay is None:
            print(f"\n{name}, {label}, {batch.patches} patches: left to the model", flush=True)
            continue
        print(f"\n{name}, {label}, {batch.patches} patches: a replay {1e3 * replay:.0f} us")
        launched = kernels.kernels_of(lambda inputs=inputs: ours.finished(inputs))  # type: ignore[misc]
        print(*kernels.lines(launched, most), sep="\n", flush=True)


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--towers", nargs="+", choices=list(TOWERS), default=list(TOWERS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[224, 448, 672])
    parser.add_argument("--graft", default="{}", metavar="JSON", help="keys of graft.vit")
    parser.add_argument("--most", type=int, default=20, help="kernels that are shown")
    arguments = parser.parse_args(given)
    import torch

    if not torch.cuda.is_available():
        print(
            "vit_kernels.py: there is no CUDA device, and no kernels without one", file=sys.stderr
        )
        return 1
    graft = {"buckets": [], **json.loads(arguments.graft)}
    machine = Machine("cuda", torch.bfloat16, Limits(), graft)
    with one_rank():
        for name in arguments.towers:
            show(name, arguments.sizes, machine, arguments.most)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
