"""Drafts that a step verifies: looked up in the request's own text, or proposed by a smaller model.

`speculation` proposes drafts that `prompt_lookup` finds, `draft_model_policy` decides what a draft model proposes, and
`draft_budget` decides how many drafted tokens are worth their time. Pure Python: no torch.
"""
