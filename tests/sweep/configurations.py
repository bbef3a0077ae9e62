"""Tiny configurations of every causal family of transformers, made by structure: the family's own defaults, shrunk.

A configuration is a tree of named numbers, and names say what a number is: a width, a count of heads, a window. Each
becomes a small one; whatever is not listed, dropout above all, stays as the family has it. Of per-layer lists the
first layer of each kind stays, so that a hybrid is a hybrid still.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks", "layers", "depth")
MIN_LAYERS = 3

SIZES: dict[int, tuple[str, ...]] = {
    96: ("vocab_size", "decoder_vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"),
    32: ("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim", "emb_dim", "dim", "embed_dim",
         "backbone_hidden_size", "text_hidden_size", "out_hidden_size", "decoder_hidden_size", "attention_hidden_size", "lru_width"),
    4: ("num_attention_heads", "decoder_attention_heads", "encoder_attention_heads", "n_head", "n_heads",
        "attention_heads", "num_heads", "swa_num_attention_heads", "num_encoder_attention_heads",
        "num_decoder_attention_heads", "linear_num_heads", "linear_num_value_heads", "index_n_heads"),
    2: ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads", "linear_num_key_heads"),
}
