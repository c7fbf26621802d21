"""Attention to sequences that are sharded over devices: context parallelism.

    attention      the public function
    arguments      its checks
    strategy       which strategy runs a call: `ring.py`, `gather.py` or `ulysses.py`
    ring           keys and values go round from device to device
    pairs          queries and keys that a ring's step has, and which of them it visits
    packed         arrays that travel as one
    partial        how results with several sets of keys are combined
    gather         keys and values of all devices on each
    halo           of a narrow window, what it reaches of neighbours' keys
    chunk_axis     a device's chunks as one call
    ulysses        shards of heads in place of shards of the sequence
    two_axes       Ulysses over one mesh axis, another strategy over the other
    sharded        how parts of a call on shards become ordinary calls
    functions      score_mod and block_mask of these calls
    load_balance   the order of tokens on devices

It stands above the implementations: each step is an ordinary call, through the same transforms as any other.

A sharded `jit` of `flash_attention` runs these strategies too, below those transforms
(`transforms/sharded_sequences.py`). So they and what they need import no more of `transforms/` than
`lowering.py`, `debugging.py`, `saved.py` and `varying.py`, and this file imports nothing.
"""
