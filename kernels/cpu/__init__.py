"""Implements the operations with torch's operators, many tokens at once; `native` has them in C++.

There is one file for each kind of operation: `attention`, `elementwise`, `experts`, `linear_attention`. `narrow_cache`
is the 8-bit KV cache, `low_rank` is what a LoRA adapter adds, `large_pages` is the memory of weights; `mapping` asks
the system for it. `processor` says what this machine's processor supports. Importing this package imports nothing else.
"""
