"""Computes mixtures of experts: `routing` sorts tokens by expert, `multiply` has the products, `experts` launches."""
