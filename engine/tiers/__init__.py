"""Keeps KV below the device's memory: blocks in memory of the machine and in files, and the threads that move them.

`mover` is what the core sees (engine.kv_tiers.KvMover). Never decides which blocks are kept: plans say so.
"""
