"""Our own parts, registered through the same hooks as a third party's."""

from vllm_graft.base.markers import hookimpl
from vllm_graft.hooks import entries

_DRAFTERS = "vllm_graft.spec_decode.drafters"
_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"


@hookimpl(trylast=True)
def graft_drafters() -> list[entries.Drafter]:
    """Drafters of trees, a row each."""
    return [
        entries.Drafter(
            "eagle",
            f"{_DRAFTERS}.target_dependent:EagleTrees",
            "drafts a tree with an EAGLE head, verified in one pass",
            methods=("eagle", "eagle3"),
        ),
        entries.Drafter(
            "mtp",
            f"{_DRAFTERS}.mtp:MtpTrees",
            "drafts a tree with the target's own module for one token more",
            methods=("mtp",),
            speculator=f"{_SPECULATORS}.mtp.speculator:MTPSpeculator",
        ),
        entries.Drafter(
            "gemma4",
            f"{_DRAFTERS}.gemma4:Gemma4Trees",
            "drafts a tree with the assistant of a Gemma 4, which reads the target's K/V",
            methods=("mtp",),
            speculator=f"{_SPECULATORS}.gemma4.speculator:Gemma4Speculator",
            architectures=("Gemma4MTPModel",),
            unmeasured=True,
        ),
        *_block_drafters(),
        entries.Drafter(
            "draft_model",
            f"{_DRAFTERS}.standalone.draft_model:DraftModelTrees",
            "drafts a tree with a small model of its own, a pass for each level",
            methods=("draft_model",),
            speculator=f"{_SPECULATORS}.standalone_ar.speculator:StandaloneARSpeculator",
        ),
        entries.Drafter(
            "ngram",
            f"{_DRAFTERS}.ngram.ngram_trees:NgramTrees",
            "drafts a tree of several matches of the request's own text, without a draft model",
            methods=("ngram", "ngram_gpu"),
            speculator=f"{_SPECULATORS}.ngram.speculator:NgramGPUSpeculator",
            has_model=False,
        ),
    ]


def _block_drafters() -> list[entries.Drafter]:
    """Drafters whose draft predicts a block of positions in one pass, a row each."""
    return [
        entries.Drafter(
            "dflash",
            f"{_DRAFTERS}.block.dflash:DFlashTrees",
            "drafts a tree in one pass over a block of independent positions",
            methods=("dflash",),
            speculator=f"{_SPECULATORS}.dflash.speculator:DFlashSpeculator",
            block=True,
        ),
        entries.Drafter(
            "dflash2",
            f"{_DRAFTERS}.block.dflash2:DFlash2Trees",
            "drafts a tree from one pass and scores of neighbouring candidates",
            methods=("dflash",),
            speculator=f"{_SPECULATORS}.dflash2.speculator:DFlash2Speculator",
            architectures=("DFlash2DraftModel", "DFlash2BeamDraftModel"),
            block=True,
        ),
        entries.Drafter(
            "lilicorr",
            f"{_DRAFTERS}.block.dflash2:LiLiCorrTrees",
            "drafts a tree from one pass and attention between candidates",
            methods=("dflash",),
            speculator=f"{_SPECULATORS}.lilicorr.speculator:LiLiCorrSpeculator",
            architectures=("LiLiCorrDraftModel",),
            block=True,
        ),
        entries.Drafter(
            "xpress",
            f"{_DRAFTERS}.block.xpress:XPressTrees",
            "drafts a tree from one pass and a bias by all tokens before, from vLLM 0.33 on",
            methods=("dflash",),
            speculator=f"{_SPECULATORS}.xpress.speculator:XPressSpeculator",
            architectures=("Qwen3XPressModel", "DFlashQwen3XPressModel"),
            block=True,
            unmeasured=True,
        ),
        entries.Drafter(
            "dspark",
            f"{_DRAFTERS}.block.dspark:DSparkTrees",
            "drafts a tree from one pass and a bias by the token before",
            methods=("dspark",),
            speculator=f"{_SPECULATORS}.dspark.speculator:DSparkSpeculator",
            block=True,
        ),
    ]


@hookimpl(trylast=True)
def graft_target_families() -> list[entries.TargetFamily]:
    """The families of target models whose passes over trees we know."""
    load = "vllm_graft.spec_decode.targets.dense.layer:DenseFamily"
    serves = (
        "sliding-window attention",
        "chunked attention",
        "attention sinks",
        "K/V shared with another layer",
    )
    return [
        entries.TargetFamily(
            "dense", load, "plain attention, sliding windows and chunks", serves=serves
        ),
        entries.TargetFamily(
            "latent",
            "vllm_graft.spec_decode.targets.latent.latent_layer:LatentFamily",
            "MLA, which caches latents",
            serves=("MLA attention",),
        ),
        entries.TargetFamily(
            "recurrent",
            "vllm_graft.spec_decode.targets.recurrent.recurrent_family:RecurrentFamily",
            "the gated delta rule, Kimi delta attention and Mamba-2, which keep states",
            serves=("gated delta rule", "Kimi delta attention", "Mamba-2"),
            refusals="vllm_graft.spec_decode.targets.recurrent.recurrent_features:STATES",
        ),
    ]


@hookimpl(trylast=True)
def graft_tree_policies() -> list[entries.TreePolicy]:
    """The shape that the configuration asks for, and one that `auto` makes no smaller."""
    shapes = "vllm_graft.spec_decode.tuning.shapes"
    return [
        entries.TreePolicy(
            "dynamic", f"{shapes}:dynamic", "the configured topk and steps, best nodes kept"
        ),
        entries.TreePolicy(
            "whole", f"{shapes}:whole", "all topk and steps for each number of nodes of shape: auto"
        ),
    ]


@hookimpl(trylast=True)
def graft_draft_graph_runners() -> list[entries.DraftGraphRunner]:
    """One graph for all levels of a tree or all steps of a chain: padded, checked, none."""
    module = "vllm_graft.graph_runners.language.draft"
    return [
        entries.DraftGraphRunner(
            "cuda_graph",
            f"{module}:DraftGraphRunner",
            "the draft loop as one CUDA graph a batch size",
        ),
        entries.DraftGraphRunner(
            "eager", f"{module}:EagerDraftRunner", "launches each draft step, no CUDA graph"
        ),
        entries.DraftGraphRunner(
            "verify",
            f"{module}:VerifyingDraftRunner",
            "each size's first replay is compared with launches",
        ),
    ]


@hookimpl(trylast=True)
def graft_vit_graph_runners() -> list[entries.VitGraphRunner]:
    """Exact graphs of hot layouts, buckets for the rest."""
    load = "vllm_graft.graph_runners.vision.runner:ViTCudaGraphRunner"
    return [
        entries.VitGraphRunner("cuda_graph", load, "exact graphs of hot layouts, padded buckets")
    ]


@hookimpl(trylast=True)
def graft_vision_adapters() -> list[entries.VisionAdapter]:
    """Models that do not speak vLLM's encoder protocol, by architecture."""
    adapters = "vllm_graft.graph_runners.vision.towers.adapters"
    return [
        entries.VisionAdapter(
            "LlavaForConditionalGeneration",
            f"{adapters}.llava:LlavaAdapter",
            "CLIP or SigLIP of one size, and the projector",
        ),
        entries.VisionAdapter(
            "PaliGemmaForConditionalGeneration",
            f"{adapters}.llava:PaliGemmaAdapter",
            "SigLIP of one size, and the projector",
        ),
        entries.VisionAdapter(
            "PixtralForConditionalGeneration",
            f"{adapters}.pixtral:PixtralAdapter",
            "Pixtral's tower, merger and projector, a graph a size",
        ),
        entries.VisionAdapter(
            "Mistral3ForConditionalGeneration",
            f"{adapters}.pixtral:Mistral3Adapter",
            "Pixtral's tower and the projector, a graph a size",
        ),
    ]


@hookimpl(trylast=True)
def graft_kv_connectors() -> list[entries.KVConnector]:
    """The host KV cache."""
    load = "vllm_graft.hicache.connector:HiCacheConnector"
    summary = "KV below GPU memory: host memory, storage"
    return [entries.KVConnector("HiCacheConnector", load, summary)]


@hookimpl(trylast=True)
def graft_storage_backends() -> list[entries.StorageBackend]:
    """Stores of the host KV cache below host memory."""
    return [
        entries.StorageBackend(
            "segments",
            "vllm_graft.hicache.storage.segments.store:SegmentsBackend",
            "append-only segments of checked records, bounded, recovered after a crash",
        )
    ]


@hookimpl(trylast=True)
def graft_eviction_policies() -> list[entries.EvictionPolicy]:
    """Eviction policies of the host pool."""
    module = "vllm_graft.hicache.host.eviction"
    return [
        entries.EvictionPolicy("lru", f"{module}:LruPolicy", "least recently used"),
        entries.EvictionPolicy("arc", f"{module}:ArcPolicy", "adaptive: recency against frequency"),
    ]
