"""The table of all parts, in the order in which they look at a configuration."""

from vllm_graft.base.part import Part
from vllm_graft.graph_runners.vision.vision_part import VISION
from vllm_graft.hicache.cache_part import CACHE
from vllm_graft.learn.learn_part import LEARNING
from vllm_graft.spec_decode.chain_part import CHAINS
from vllm_graft.spec_decode.tree_part import TREES

PARTS: tuple[Part, ...] = (CACHE, VISION, CHAINS, TREES, LEARNING)
