"""FlashAttention-3's own kernels for PyTorch on one GPU: forward in e4m3, and decoding with a cache.

    python benchmarks/torch_fa3.py --out fa3.json
    python benchmarks/fp8.py --merge fa3.json --out benchmarks/results/fp8_h100.json
    python benchmarks/decode.py --merge fa3.json --out benchmarks/results/decode_h100.json

JAX can't call them. They need the wheel fa3-fwd. A process of its own, on the same GPU, one after the other.
Forward takes a descale for each head, and writes bfloat16. Of decoding, calls are those of decode.py.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import cases
import decode_cases
import torch
import torch_timing

FORWARD, DECODE = "fa3_fp8", "fa3_kvcache"
SHAPES = [
    (batch, length, 16, head_dim)
    for head_dim in (64, 128, 192, 256)
    for batch, length in ((4, 4096), (1, 16384))
]
"""Of fp8.py: batch, length, heads and head dim."""
GROUPS = ("contiguous", "speculative", "8 bits")
DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}


def forward(batch: int, length: int, heads: int, head_dim: int, causal: bool) -> Callable[[], object]:
    import fa3_fwd_interface as fa3

    shape = (batch, length, heads, head_dim)
    query, key, value = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn) for _ in range(3)
    )
    descales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), torch.ones(batch, heads, device="cuda"))
    scale = head_dim**-0.5
    return lambda: fa3._flash_attn_forward(query, key, value, softmax_scale=scale, causal=causal, **descales)


def decode(call: decode_cases.Call) -> Callable[[], object]:
    import fa3_fwd_interface as fa3

    dtype = DTYPES[call.cache_dtype]
    B, S, K, H = call.batch, call.capacity, call.kv_heads, call.head_dim
    # It takes queries in the dtype of the cache alone.
    query = torch.randn(B, call.queries, call.heads, H, device="cuda", dtype=torch.bfloat16).to(dtype)
    key = torch.randn(B, S, K, H, device="cuda", dtype=torch.bfloat16).to(dtype)
    value = torch.randn(B, S, K, H, device="cuda", dtype=torch.bfloat16).to(dtype)
    lengths = torch.from_numpy(call.key_lengths).to("cuda")
    return lambda: fa3.flash_attn_with_kvcache(query, key, value, cache_seqlens=lengths, causal=True)


def row(case: str, peer: str, make: Callable[[], Callable[[], object]]) -> dict:
    try:
        time = torch_timing.graph_milliseconds(make())
        return {"case": case, "peer": peer, "milliseconds": time, "us": 1e3 * time}
    except Exception as error:  # the other calls are measured nevertheless
        return {"case": case, "peer": peer, "error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default=f"{FORWARD},{DECODE}", help="which to measure, by commas")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    calls: list[tuple[str, str, Callable[[], Callable[[], object]]]] = []
    for shape in SHAPES:
        for causal in (False, True):
            batch, length, heads, head_dim = shape
            label = cases.label(batch, length, heads, heads, head_dim, causal)
            calls.append((label, FORWARD, lambda shape=shape, causal=causal: forward(*shape, causal)))
    for group in GROUPS:
        for case in decode_cases.GROUPS[group]:
            calls += [(call.label, DECODE, lambda call=call: decode(call)) for call in case.calls.values()]
    result = torch_timing.environment() | {"rows": []}
    # Groups have some calls in common.
    for (label, peer), make in {(label, peer): make for label, peer, make in calls}.items():
        if peer in options.peers.split(","):
            found = row(label, peer, make)
            result["rows"].append(found)
            print(label, peer, found.get("us") or found["error"][:160], flush=True)
            if options.out:
                options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
