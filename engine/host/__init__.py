"""The machine that engines share: its cores, how much memory it has, and how much of it each engine takes.

Pure Python: no torch.
"""
