"""Draft tokens that a step checks: from the prompt (`prompt_lookup`) or from a smaller model (`draft_model_policy`).

`speculation` proposes them, and `draft_budget` bounds how many are worth their time. Pure Python: no torch.
"""
