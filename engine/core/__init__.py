"""The engine's loop over steps: plan, launch, collect, apply, and the events that follow.

`core` owns the loop, `applier` turns a step's results into requests' progress, and `step_clock` says
how long a step has lasted. `engine_chunking` splits a prompt inside one step. `calibration` measures what
steps of given shapes take, for the model in `engine.scheduling.step_time`. Pure Python: no torch.
"""
