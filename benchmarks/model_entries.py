"""The calls that models.py measures: attention as open models make it, each with the source of its shape.

Batches and lengths are chosen: lengths are those that a model is trained at or has as its limit, and some odd
ones. Under n-way tensor parallelism a device has 1/n of the query heads and of the key heads.
"""

from model_entry import Entry

LLAMA_8B = (
    "meta-llama/Meta-Llama-3-8B config.json: hidden_size 4096, num_attention_heads 32, num_key_value_heads 8"
)
LLAMA_8B_128K = (
    "meta-llama/Llama-3.1-8B config.json: hidden_size 4096, num_attention_heads 32, num_key_value_heads 8, "
    "max_position_embeddings 131072"
)
LLAMA_70B = (
    "meta-llama/Meta-Llama-3-70B config.json: hidden_size 8192, num_attention_heads 64, num_key_value_heads 8"
)
LLAMA_405B = (
    "meta-llama/Llama-3.1-405B config.json: hidden_size 16384, num_attention_heads 128, num_key_value_heads 8"
)
LLAMA2_7B = "meta-llama/Llama-2-7b-hf config.json: hidden_size 4096, num_attention_heads 32"
QWEN_05B = "Qwen/Qwen2.5-0.5B config.json: hidden_size 896, num_attention_heads 14, num_key_value_heads 2"
QWEN_7B = "Qwen/Qwen2.5-7B config.json: hidden_size 3584, num_attention_heads 28, num_key_value_heads 4"
QWEN_72B = "Qwen/Qwen2.5-72B config.json: hidden_size 8192, num_attention_heads 64, num_key_value_heads 8"
MISTRAL = (
    "mistralai/Mistral-7B-v0.1 config.json: hidden_size 4096, num_attention_heads 32, num_key_value_heads 8, "
    "sliding_window 4096"
)
GEMMA2_9B = (
    "google/gemma-2-9b config.json: num_attention_heads 16, num_key_value_heads 8, head_dim 256, "
    "attn_logit_softcapping 50.0, sliding_window 4096 in every other layer"
)
GEMMA2_27B = (
    "google/gemma-2-27b config.json: num_attention_heads 32, num_key_value_heads 16, head_dim 128, "
    "attn_logit_softcapping 50.0, sliding_window 4096 in every other layer"
)
GEMMA3_4B = (
    "google/gemma-3-4b-it config.json, text_config: num_attention_heads 8, num_key_value_heads 4, "
    "head_dim 256, sliding_window 1024 in five of six layers"
)
GEMMA3_27B = (
    "google/gemma-3-27b-it config.json, text_config: num_attention_heads 32, num_key_value_heads 16, "
    "head_dim 128, sliding_window 1024 in five of six layers"
)
GPT2 = "openai-community/gpt2 config.json: n_embd 768, n_head 12, n_ctx 1024"
GPT2_XL = "openai-community/gpt2-xl config.json: n_embd 1600, n_head 25, n_ctx 1024"
GPT_J = "kingoflolz/mesh-transformer-jax configs/6B_roto_256.json: d_model 4096, n_heads 16, seq 2048"
PYTHIA = "EleutherAI/pythia-1.4b config.json: hidden_size 2048, num_attention_heads 16"
FALCON = "tiiuae/falcon-7b config.json: hidden_size 4544, num_attention_heads 71, multi_query true"
DEEPSEEK = (
    "deepseek-ai/DeepSeek-V3 inference/configs/config_671B.json: n_heads 128, qk_nope_head_dim 128, "
    "qk_rope_head_dim 64, v_head_dim 128"
)
BERT = "google-research/bert README.md, BERT-Large: 1024-hidden, 16-heads; pre-trained at length 512"
VIT_B = (
    "google-research/vision_transformer vit_jax/configs/models.py, ViT-B_16: hidden_size 768, num_heads 12; "
    "224 / 16 squared patches and a class token"
)
VIT_L = (
    "openai/clip-vit-large-patch14 config.json, vision_config: hidden_size 1024, num_attention_heads 16, "
    "image_size 224, patch_size 14, and a class token"
)
WHISPER = (
    "openai/whisper whisper/model.py, dims of large: n_audio_ctx 1500, n_audio_state 1280, n_audio_head 20, "
    "n_text_ctx 448, n_text_head 20"
)
QWEN_VL = (
    "Qwen/Qwen2.5-VL-7B-Instruct config.json, vision_config: hidden_size 1280, num_heads 16; images "
    "packed one after another"
)
DIT = (
    "facebookresearch/DiT models.py, DiT-XL/2: hidden_size 1152, num_heads 16, patch_size 2; "
    "512 pixels are 64 squared latents"
)
SD15 = (
    "CompVis/stable-diffusion configs/stable-diffusion/v1-inference.yaml: model_channels 320, num_heads 8; "
    "512 pixels are 64 squared latents, 77 text tokens"
)
SD21 = (
    "Stability-AI/stablediffusion configs/stable-diffusion/v2-inference.yaml: model_channels 320, "
    "num_head_channels 64; 512 pixels are 64 squared latents, 77 text tokens"
)
FLUX = (
    "black-forest-labs/flux src/flux/util.py, flux-dev: hidden_size 3072, num_heads 24; 1024 pixels are 4096 "
    "tokens, after 512 of text"
)
WAN_1B = (
    "Wan-Video/Wan2.1 wan/configs/wan_t2v_1_3B.py: dim 1536, num_heads 12, vae_stride (4, 8, 8), patch_size "
    "(1, 2, 2); 81 frames of 832 × 480 are 21 × 30 × 52 tokens"
)
WAN_14B = (
    "Wan-Video/Wan2.1 wan/configs/wan_t2v_14B.py: dim 5120, num_heads 40; tokens as those of the 1.3B model; "
    "generate.py --ulysses_size 8 splits heads over 8 devices"
)
# Calls of no model, in which the device has few key heads, or a rare head dim.
SYNTHETIC = "no model: groups of 16 query heads, an odd length and few key heads"
SYNTHETIC_192 = (
    "no model: the head dim of DeepSeek-V3's keys for values, too, as it is where values are padded"
)

PACKED_16K = (5210, 3307, 2048, 1531, 1290, 911, 702, 533, 401, 207, 129, 115)
PACKED_2X8K = (4096, 2611, 1000, 485, 3001, 2222, 1404, 880, 444, 150, 91)
IMAGES = (3072, 1296, 1120, 1024, 768, 484, 416)
PADDED_512 = (512, 512, 480, 433, 390, 366, 341, 300, 277, 254, 214, 190, 155, 128, 96, 61)


def _entry(
    name: str, model: str, source: str, group: str, shape: tuple[int, int, int, int, int, int], **options
) -> Entry:
    """Of `shape`, which is batch, queries, keys, query heads, key heads, head dim."""
    batch, queries, keys, heads, kv_heads, head_dim = shape
    return Entry(
        name=name,
        model=model,
        source=source,
        group=group,
        batch=batch,
        queries=queries,
        keys=keys,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        **{"value_head_dim": head_dim} | options,
    )


def _decoder(
    name: str, model: str, source: str, shape: tuple[int, int, int, int, int], group="decoders", **options
) -> Entry:
    """Causal, of `shape`: batch, length, query heads, key heads, head dim."""
    batch, length, *heads = shape
    return _entry(name, model, source, group, (batch, length, length, *heads), causal=True, **options)


def _full(
    name: str, model: str, source: str, group: str, shape: tuple[int, int, int, int], **options
) -> Entry:
    """Each query sees every key; of `shape`: batch, length, heads, head dim."""
    batch, length, heads, head_dim = shape
    return _entry(name, model, source, group, (batch, length, length, heads, heads, head_dim), **options)


_MLA = {"value_head_dim": 128}

ENTRIES: tuple[Entry, ...] = (
    _decoder("llama3-8b-2k", "Llama 3 8B", LLAMA_8B, (4, 2048, 32, 8, 128)),
    _decoder("llama3-8b-8k", "Llama 3 8B", LLAMA_8B, (1, 8192, 32, 8, 128)),
    _decoder("llama3-8b-32k", "Llama 3.1 8B", LLAMA_8B_128K, (1, 32768, 32, 8, 128)),
    _decoder("llama3-8b-odd", "Llama 3 8B", LLAMA_8B, (3, 2777, 32, 8, 128)),
    _decoder("llama3-8b-tp8", "Llama 3 8B, TP 8", LLAMA_8B, (8, 4096, 4, 1, 128)),
    _decoder("llama3-70b-8k", "Llama 3 70B", LLAMA_70B, (1, 8192, 64, 8, 128)),
    _decoder("llama3-70b-tp8", "Llama 3 70B, TP 8", LLAMA_70B, (2, 8192, 8, 1, 128)),
    _decoder("llama3-405b-tp8", "Llama 3.1 405B, TP 8", LLAMA_405B, (2, 4096, 16, 1, 128)),
    _decoder("llama2-7b-tp4", "Llama 2 7B, TP 4", LLAMA2_7B, (1, 4096, 8, 8, 128)),
    _decoder("qwen2.5-0.5b", "Qwen2.5 0.5B", QWEN_05B, (4, 2048, 14, 2, 64)),
    _decoder("qwen2.5-7b", "Qwen2.5 7B", QWEN_7B, (1, 4096, 28, 4, 128)),
    _decoder("qwen2.5-72b", "Qwen2.5 72B", QWEN_72B, (2, 4096, 64, 8, 128)),
    _decoder("qwen2.5-72b-tp8", "Qwen2.5 72B, TP 8", QWEN_72B, (1, 32768, 8, 1, 128)),
    _decoder("mistral-7b", "Mistral 7B", MISTRAL, (1, 16384, 32, 8, 128), window=4096),
    _decoder("gemma2-9b", "Gemma 2 9B", GEMMA2_9B, (1, 8192, 16, 8, 256), soft_cap=50.0),
    _decoder("gemma2-9b-local", "Gemma 2 9B", GEMMA2_9B, (1, 8192, 16, 8, 256), soft_cap=50.0, window=4096),
    _decoder("gemma2-27b", "Gemma 2 27B", GEMMA2_27B, (1, 8192, 32, 16, 128), soft_cap=50.0),
    _decoder("gemma3-4b-local", "Gemma 3 4B", GEMMA3_4B, (2, 8192, 8, 4, 256), window=1024),
    _decoder("gemma3-27b-local", "Gemma 3 27B", GEMMA3_27B, (1, 16384, 32, 16, 128), window=1024),
    _decoder("gpt2", "GPT-2", GPT2, (8, 1024, 12, 12, 64)),
    _decoder("gpt2-xl", "GPT-2 XL", GPT2_XL, (8, 1024, 25, 25, 64)),
    _decoder("gpt-j", "GPT-J 6B", GPT_J, (4, 2048, 16, 16, 256)),
    _decoder("pythia-1.4b", "Pythia 1.4B", PYTHIA, (1, 1024, 16, 16, 128)),
    _decoder("falcon-7b", "Falcon 7B", FALCON, (4, 2048, 71, 1, 64)),
    _decoder("deepseek-v3", "DeepSeek V3", DEEPSEEK, (1, 4096, 128, 128, 192), **_MLA),
    _decoder("deepseek-v3-tp8", "DeepSeek V3, TP 8", DEEPSEEK, (2, 4096, 16, 16, 192), **_MLA),
    _decoder("groups-of-16", "16 heads a key head", SYNTHETIC, (1, 5000, 48, 3, 128)),
    _decoder("head-dim-192", "head dim 192", SYNTHETIC_192, (2, 4096, 12, 12, 192)),
    _entry("llama3-8b-chunk", "Llama 3.1 8B, chunk of a prompt", LLAMA_8B_128K, "prefill",
           (1, 512, 16384, 32, 8, 128), causal=True),
    _entry("llama3-70b-tp8-chunk", "Llama 3 70B, TP 8, chunk of a prompt", LLAMA_70B, "prefill",
           (1, 512, 16384, 8, 1, 128), causal=True),
    _full("bert-large", "BERT large, full rows", BERT, "encoders", (16, 512, 16, 64)),
    _full("bert-large-padded", "BERT large, padded rows", BERT, "encoders", (16, 512, 16, 64),
          lengths=PADDED_512),
    _full("vit-b-16", "ViT-B/16", VIT_B, "encoders", (64, 197, 12, 64)),
    _full("vit-l-14", "ViT-L/14", VIT_L, "encoders", (32, 257, 16, 64)),
    _full("whisper-large", "Whisper large encoder", WHISPER, "encoders", (8, 1500, 20, 64)),
    _entry("whisper-large-cross", "Whisper large, text to audio", WHISPER, "encoders",
           (8, 448, 1500, 20, 20, 64)),
    _full("dit-xl-2", "DiT-XL/2", DIT, "diffusion", (8, 1024, 16, 72)),
    _full("sd1.5-self", "Stable Diffusion 1.5", SD15, "diffusion", (4, 4096, 8, 40)),
    _entry("sd1.5-cross", "Stable Diffusion 1.5, image to text", SD15, "diffusion", (8, 4096, 77, 8, 8, 40)),
    _entry("sd2.1-cross", "Stable Diffusion 2.1, image to text", SD21, "diffusion", (8, 4096, 77, 5, 5, 64)),
    _full("flux", "FLUX.1", FLUX, "diffusion", (1, 4608, 24, 128)),
    _full("wan-1.3b", "Wan 2.1 1.3B", WAN_1B, "diffusion", (1, 32760, 12, 128)),
    _full("wan-14b-sp8", "Wan 2.1 14B, Ulysses 8", WAN_14B, "diffusion", (1, 32760, 5, 128)),
    _decoder("llama3-8b-varlen", "Llama 3 8B, packed", LLAMA_8B, (1, 16384, 32, 8, 128), "documents",
             documents=PACKED_16K, varlen=True),
    _decoder("llama3-8b-segments", "Llama 3 8B, packed", LLAMA_8B, (2, 8192, 32, 8, 128), "documents",
             documents=PACKED_2X8K),
    _full("qwen2.5-vl-images", "Qwen2.5-VL 7B vision, packed", QWEN_VL, "documents", (1, sum(IMAGES), 16, 80),
          documents=IMAGES, varlen=True),
)  # fmt: skip
