"""A language model writes with its cache spread over processes: each holds some of the keys, and all write the same.

    torchrun --nproc-per-node 2 examples/sharded_generate.py "Why is the sky blue?"

Without torchrun it is one process, which writes the same text. On a machine with GPUs, --device cuda gives each process
its own. The model is that of `make demo` or one that --model names, and every process has a whole copy of it: what is
spread is the cache.
"""

from __future__ import annotations

import argparse
import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface

from flash_decoding import KVCache
from flash_decoding.cli.generate import find_model, load_model
from flash_decoding.distributed import ShardedKVCache

NAME = "sharded_kv"
# The name that all versions of Transformers 5 know.
warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)


class ShardedModelCache:
    """What the model takes for its cache: one ShardedKVCache per layer.

    update() hands back only what is new. In the prompt that is everything, and in a decode step attention() asks the
    sharded cache itself.
    """

    is_compileable = False

    def __init__(self, config, max_len: int, dtype: torch.dtype, device: torch.device, block: int) -> None:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        room = -(-max_len // (dist.get_world_size() * block)) * block  # keys per process, in whole blocks
        self.layers = [
            ShardedKVCache(
                KVCache(1, config.num_key_value_heads, room, head_dim, dtype=dtype, device=device), block=block
            )
            for _ in range(config.num_hidden_layers)
        ]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_args, **_options) -> tuple[Tensor, Tensor]:
        self.layers[layer_idx].append(key, value)
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.layers[layer_idx].lengths[0]


def register(cache: ShardedModelCache) -> None:
    """Make the cache the model's attention, under NAME."""

    def attention(module, query, key, value, attention_mask, scaling=None, **_options) -> tuple[Tensor, None]:
        if query.shape[2] > 1:  # the prompt, whose keys are all here
            group = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        else:
            out = cache.layers[module.layer_idx].decode(query, scale=scaling)
        return out.transpose(1, 2), None

    # No mask goes with the name, so the model makes none: there is one sequence, and nothing is padded.
    AttentionInterface.register(NAME, attention)


@torch.no_grad()
def generate(model, ids: Tensor, new_tokens: int, block: int) -> list[int]:
    """The likeliest tokens, one by one; every process computes and returns the same."""
    cache = ShardedModelCache(model.config, ids.shape[1] + new_tokens, model.dtype, model.device, block)
    register(cache)
    model.set_attn_implementation(NAME)
    written: list[int] = []
    while len(written) < new_tokens:
        at = torch.arange(cache.get_seq_length(), cache.get_seq_length() + ids.shape[1], device=ids.device)
        logits = model(ids, past_key_values=cache, position_ids=at[None], use_cache=True, logits_to_keep=1).logits
        written.append(int(logits[0, -1].argmax()))
        ids = torch.tensor([written[-1:]], device=ids.device)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Explain in a few sentences why the sky is blue.")
    parser.add_argument("--model", help="a directory, a .gguf file or a hub name; Llama, Qwen and the like")
    parser.add_argument("--tokens", type=int, default=48, help="how many to write")
    parser.add_argument("--block", type=int, default=16, help="keys per block, dealt round robin")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()

    alone = "RANK" not in os.environ
    if alone:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=3),
        **(dict(store=dist.HashStore(), rank=0, world_size=1) if alone else {}),
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, tokenizer = load_model(find_model(arguments.model), device, dtype)
    text = arguments.prompt
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt").input_ids.to(device)
    written = generate(model, ids, arguments.tokens, arguments.block)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, tokens {written}")
        print(tokenizer.decode(written, skip_special_tokens=True))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
