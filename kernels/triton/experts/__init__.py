"""Mixtures of experts: `routing` chooses each token's experts and sorts the pairs, and `experts` multiplies."""
