"""What each step computes: the requests, their queues, their memory, and the plan of a step.

Start with `scheduler` (queues and state) and `planner` (one step's plan, which changes nothing). `chunk_policy` ends a
prompt's chunk; `waiting`, `tenant_shares` and `deadlines` order requests; `reservation`, `forecast` and
`answer_lengths` keep memory for answers; `block_manager`, `state_slots` and `encoder_cache` hand it out.

Pure Python: no torch.
"""
