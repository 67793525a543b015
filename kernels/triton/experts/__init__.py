"""Computes mixtures of experts: `routing` chooses each token's experts and sorts the pairs, `experts` multiplies."""
