"""An executor without a model: scripted answers, for tests, simulations and load tests of everything else.

Pure Python: no torch.
"""
