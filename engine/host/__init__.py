"""The machine that an engine shares with others: the memory it has, and which engine takes how much of it.

Pure Python: no torch.
"""
