"""Operations by torch's operators, many tokens at once; `native` has them in C++.

One file for each kind of operation: `attention`, `elementwise`, `experts`, `linear_attention`. `narrow_cache` is the KV
cache in 8 bits, `low_rank` is what a LoRA adapter adds, and `processor` says what this machine's processor can do.
Importing this package imports nothing else.
"""
