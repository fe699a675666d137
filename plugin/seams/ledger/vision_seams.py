"""What graphs of vision encoders rely on."""

from __future__ import annotations

from vllm_graft.seams.ledger.entry import Seam
from vllm_graft.seams.ledger.notation import seams

_ENCODER = "a registry of encoder graph managers"

# Columns: path, kind, what is expected, why.
# fmt: off
VISION: tuple[Seam, ...] = (
    *seams("fused", "vLLM fuses these operators where encoders are not compiled", "model_executor",
        ("layers.activation.SiluAndMul", "name", "present", "the gate that is fused"),
        ("layers.layernorm.RMSNorm", "has", "has_weight, hidden_size, variance_epsilon, variance_size_override, weight", "a norm that is fused with the sum before it"),
        ("models.qwen2_5_vl.Qwen2_5_VisionAttention", "has", "attn, hidden_size_per_attention_head, num_attention_heads_per_partition, proj, qkv", "its products and attention are called"),
        ("models.qwen2_5_vl.Qwen2_5_VisionAttention.forward", "source", "4a47c014f4e6", "done with queries and keys rotated in one kernel"),
        ("models.qwen2_5_vl.Qwen2_5_VisionMLP", "has", "act_fn, down_proj, gate_up_proj", "its products are called"),
        ("models.qwen2_5_vl.Qwen2_5_VisionMLP.forward", "source", "72fc6dd9e4cb", "done with its gate in one kernel"),
        ("models.qwen2_5_vl.Qwen2_5_VisionBlock", "has", "attn, mlp, norm1, norm2", "its parts are called"),
        ("models.qwen2_5_vl.Qwen2_5_VisionBlock.forward", "source", "0712d56a6a1c", "replaced on the instances of one tower while its graphs are captured"),
        ("models.qwen3_vl.Qwen3_VisionBlock", "has", "attn, mlp, norm1, norm2", "likewise"),
        ("models.qwen3_vl.Qwen3_VisionTransformer.forward", "order", "in enumerate(self.blocks), self.deepstack_merger_list[, self.merger(hidden_states), torch.cat(", "mergers of inner layers run beside the blocks, and nothing waits for them before the last merger"),
        ("models.qwen3_vl.Qwen3_VisionBlock.forward", "source", "5bd28617b3a0", "likewise"),
    ),
    *seams("vit", _ENCODER, "",
        ("v1.worker.encoder_cudagraph.EncoderCudaGraphManager", "has", "config, device, dtype, graph_hits, graph_misses, graph_pool, max_batch_size, max_frames_per_batch, model, token_budgets, use_dp, vllm_config", "base of the runner; its __new__ builds the chosen one"),
        ("v1.worker.encoder_cudagraph.EncoderCudaGraphManager.__init__", "call", "self, vllm_config, device, dtype, model", "likewise; reads the encoder_cudagraph_* options"),
        ("v1.worker.encoder_cudagraph.EncoderCudaGraphManager.capture", "call", "self, graph_pool", "overridden"),
        ("v1.worker.encoder_cudagraph.EncoderCudaGraphManager.clear", "call", "self", "overridden"),
        ("v1.worker.encoder_cudagraph.EncoderCudaGraphManager.execute", "order", "self.use_dp, self._dp_shard(, self._execute_local(, self._dp_gather(", "a data-parallel tower: called with our _execute_local"),
        ("v1.worker.encoder_cudagraph.EncoderCudaGraphManager._execute_local", "call", "self, mm_kwargs", "overridden: one rank's share"),
        ("v1.worker.encoder_cudagraph_defs.EncoderCudaGraphConfig", "has", "buffer_keys, capture_axes, modalities, out_hidden_size, paths", "what a model says of its encoder; an adapter's is made"),
        ("v1.worker.encoder_cudagraph_defs.EncoderItemSpec", "has", "input_size, output_tokens, get_path_output_tokens", "sizes of an item"),
        ("v1.worker.gpu.mm.encoder_runner.EncoderRunner", "has", "cudagraph_manager", "the proof that our runner is used"),
        ("v1.worker.gpu.mm.encoder_runner.EncoderRunner.execute_mm_encoder", "order", "cg_manager.execute(, is_captured(), supports_modality(, cudagraph_output is not None, self.model.embed_multimodal(", "None leaves a batch to the model's own path"),
        ("v1.worker.gpu.mm.encoder_runner.EncoderRunner.capture", "order", "graph_capture(, manager.capture(graph_pool=", "collectives are ready for capture"),
        ("v1.worker.gpu.model_states.interface.ModelState.__init__", "order", "supports_encoder_cudagraph(model), EncoderCudaGraphManager(", "wrapped: the adapter is attached before the model is asked"),
        ("v1.worker.gpu_model_runner.GPUModelRunner._create_encoder_cudagraph_manager", "order", "supports_encoder_cudagraph(raw_model), return EncoderCudaGraphManager(", "likewise, in Model Runner V1"),
        ("v1.worker.gpu_model_runner.GPUModelRunner", "has", "get_model, supports_mm_inputs", "likewise"),
        ("model_executor.models.interfaces.SupportsEncoderCudaGraph", "has", "encoder_cudagraph_forward, encoder_eager_forward, get_encoder_cudagraph_budget_range, get_encoder_cudagraph_config, get_encoder_cudagraph_item_specs, get_input_modality, get_max_frames_per_video, postprocess_encoder_output, prepare_encoder_cudagraph_capture_inputs, prepare_encoder_cudagraph_replay_buffers, select_encoder_cudagraph_items, supports_encoder_cudagraph", "the protocol that towers speak"),
        ("model_executor.models.interfaces.SupportsEncoderCudaGraph.prepare_encoder_cudagraph_capture_inputs", "call", "self, token_budget, max_batch_size, max_frames_per_batch, device, dtype, path=, axis_keys=", "bounds of host numbers, shape of pixels"),
        ("model_executor.models.interfaces.SupportsEncoderCudaGraph.prepare_encoder_cudagraph_replay_buffers", "call", "self, mm_kwargs, max_batch_size, max_frames_per_batch, path=", "metadata of a batch"),
        ("model_executor.models.interfaces.SupportsEncoderCudaGraph.postprocess_encoder_output", "call", "self, outputs, indices, per_item_out_tokens, dest, clone=, batch_mm_kwargs=", "embeddings of each item"),
        ("model_executor.models.interfaces.supports_encoder_cudagraph", "call", "model", "whether a model needs an adapter"),
        ("model_executor.layers.attention.mm_encoder_attention.MMEncoderAttention", "has", "_fp8_dynamic_scale, attn_backend", "what cannot be captured"),
        ("v1.attention.backends.registry.AttentionBackendEnum", "has", "FLASHINFER, TORCH_SDPA", "likewise"),
        ("v1.attention.ops.vit_attn_wrappers.flash_attn_maxseqlen_wrapper", "order", "current_platform.is_cuda() and torch.cuda.is_current_stream_capturing(), torch.zeros(, torch.empty_like(", "zeros under captured attention are spared where every row is written"),
        ("v1.attention.ops.vit_attn_wrappers.current_platform", "name", "present", "replaced while a tower runs, to that end"),
        ("utils.gpu_sync_debug.gpu_sync_allowed", "call", "first_only=", "grids are read on the host"),
        ("config.LoRAConfig", "has", "enable_tower_connector_lora", "a tower with LoRA is not captured"),
        ("platforms.interface.Platform.support_static_graph_mode", "call", "cls", "a platform without graphs is refused"),
    ),
    *seams("pixtral", "vLLM captures Pixtral's tower (vLLM #56277)", "model_executor.models",
        ("mistral3.Mistral3ForConditionalGeneration._process_image_input", "source", {"0.32": "6a96520bd9b7", "0.33": "a06e5b1bab25"}, "the adapter's pass follows it"),
        ("pixtral.PixtralForConditionalGeneration._process_image_input", "source", "8e9f311de9fe", "likewise"),
        ("pixtral.PixtralHFVisionModel.forward", "source", "847b4754b21d", "likewise"),
        ("pixtral.VisionTransformer.forward", "source", {"0.32": "521d47e45d0d", "0.33": "22c8fc74955a"}, "likewise"),
        ("pixtral._make_packed_sequence_metadata", "call", "sequence_lengths, attn_backend, hidden_size, tp_size, device", "segments of attention"),
        ("pixtral.pixtral_patch_embed", "call", "images, weight, input_norm", "patches of images that are normalised on the device"),
        ("pixtral.position_ids_in_meshgrid", "source", {"0.32": "ff905f83b4de", "0.33": "2884d94689f4"}, "positions of patches; since 0.33 on their device"),
    ),
    *seams("phi4mm", "vLLM captures Phi-4-multimodal's tower", "model_executor.models.phi4mm",
        ("Phi4MMForCausalLM._process_image_input", "source", "22177b8b164d", "the adapter's pass follows it"),
        ("Phi4MMImageEncoder.forward", "source", "400ba8b0cf31", "called with features that are there"),
        ("Phi4MMImageEncoder.get_img_features", "call", "self, img_embeds, attention_mask=", "the tower, captured"),
    ),
)
